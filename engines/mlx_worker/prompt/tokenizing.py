"""Answers what tokens a prompt has, by the code that writes prompts for the model."""

from __future__ import annotations

from typing import Any

from engines.mlx_worker.generation import ModelFacts
from engines.mlx_worker.model.vocabulary import Vocabulary
from engines.mlx_worker.prompt.chat_template import PromptWriter
from engines.mlx_worker.prompt.tools import plan_tools
from engines.openai.errors import InvalidRequest
from engines.openai.requests import MAX_CONTEXTS, ChatRequest, Detokenize, TokenizeText


class PromptTokens:
    """Tokenizes for one model. Slow, and not thread-safe: one call at a time."""

    def __init__(self, vocabulary: Vocabulary, facts: ModelFacts) -> None:
        self._vocabulary = vocabulary
        self._max_context = facts.max_context
        self._writer = PromptWriter(vocabulary, MAX_CONTEXTS * facts.max_context)

    def of(self, asked: ChatRequest | TokenizeText) -> dict[str, Any]:
        """Tokenize a chat as it would be answered, or a text.

        Raises:
            InvalidRequest: the template refuses the messages, or there are far too many tokens.
        """
        ids = self._ids(asked)
        strings = None
        if isinstance(asked, TokenizeText) and asked.return_token_strs:
            strings = [self._vocabulary.spelling(x).decode("utf-8", "replace") for x in ids]
        return {
            "count": len(ids),
            "max_model_len": self._max_context,
            "tokens": ids,
            "token_strs": strings,
        }

    def _ids(self, asked: ChatRequest | TokenizeText) -> list[int]:
        if isinstance(asked, ChatRequest):
            return self._writer.chat(asked, plan_tools(asked, self._vocabulary)).token_ids
        if asked.add_special_tokens:
            return self._writer.text(asked.prompt)
        return self._writer.checked(self._plain(asked.prompt), "prompt")

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._vocabulary.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def text_of(self, asked: Detokenize) -> dict[str, Any]:
        """Return the text of tokens.

        Raises:
            InvalidRequest: one is no token of this model.
        """
        size = self._vocabulary.size
        if max(asked.tokens, default=0) >= size:
            raise InvalidRequest(f"tokens: one is outside the vocabulary of {size}.", "tokens")
        return {"prompt": str(self._vocabulary.tokenizer.decode(asked.tokens))}
