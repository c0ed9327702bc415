"""Turns messages into token ids with the model's own chat template, and tokenizes prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jinja2 import TemplateError

from engines.host.control_tokens import ControlTokens
from engines.host.segment_cache import SegmentCache
from engines.mlx_worker.generation import ModelFacts
from engines.mlx_worker.model.loading import Vocabulary
from engines.mlx_worker.prompt.tools import (
    ChatMessage,
    ToolPlan,
    plain_messages,
    plan_tools,
    template_knows_tools,
    template_messages,
)
from engines.openai.errors import InvalidRequest, context_too_long
from engines.openai.requests import MAX_CONTEXTS, ChatRequest, Detokenize, TokenizeText

# A prompt with more characters than this per token of the context is probably too long, so its
# tokens are counted part by part before it is tokenized whole.
_CONTEXT_CHARS = 4
_PART_CHARS = 1 << 15
_CUT_TOKENS = 16
# The errors of a template for messages that it was not written for.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A chat as the model reads it."""

    token_ids: np.ndarray  # int32, (num_tokens,)
    # Positions that a later turn may return to: the end of the system prompt, and, as the last, the
    # end of the messages, before the generation prompt.
    boundaries: tuple[int, ...]
    thinking: bool  # the generation prompt opens a block of reasoning


class PromptWriter:
    """Writes prompts for one model; not thread-safe.

    Attributes:
        segments: the cached ids of parts of earlier prompts.
    """

    def __init__(self, vocabulary: Vocabulary, max_context: int) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._max_context = max_context
        self._knows_tools = template_knows_tools(self._tokenizer)
        self._controls = ControlTokens(self._tokenizer, vocabulary.markers)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        template = str(self._tokenizer.chat_template or "")
        self.segments = SegmentCache(backend, self._whole, template)

    def text(self, text: str) -> np.ndarray:
        """Return the ids of a text completion's prompt, int32 (num_tokens,), at least one.

        Raises:
            InvalidRequest: the prompt is empty, or fills the context.
        """
        self._check_size(text, "prompt")
        return self.checked(self._tokenizer.encode(text), "prompt")

    def checked(self, token_ids: Sequence[int] | np.ndarray, param: str) -> np.ndarray:
        """Return ids as int32 (num_tokens,) if the model can read them.

        Args:
            param: the request's field that they come from.

        Raises:
            InvalidRequest: there are none, they fill the context, or one is outside the vocabulary.
        """
        ids = np.asarray(token_ids)
        if not len(ids):
            raise InvalidRequest("The prompt is empty: it needs at least one token.", param)
        if len(ids) >= self._max_context:
            raise context_too_long(self._max_context, len(ids), param)
        size, largest = self._vocabulary.size, int(ids.max())
        if largest >= size:
            raise InvalidRequest(f"Token id {largest} is outside the vocabulary of {size}.", param)
        return ids.astype(np.int32, copy=False)

    def chat(self, request: ChatRequest, plan: ToolPlan, key: bytes | None = None) -> ChatPrompt:
        """Return a chat's prompt.

        Args:
            key: the tenant's key of cached parts of earlier prompts; None = encode the whole prompt
                without the cache.

        Raises:
            InvalidRequest: the template refuses the messages, or they exceed the context.
        """
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions.", "messages"
            )
        messages = self._messages(request, plan)
        # Only templates that support tools get them.
        tools = list(plan.tools) if self._knows_tools and plan.tools else None
        options = self._controls.marked_value({"tools": tools, **_options(request)})
        text = self._render(messages, True, options)
        self._check_size(text, "messages")
        ids = self.checked(self._encode(text, key), "messages")
        marker = text[_num_shared(text, self._render(messages, False, options)) :]
        system_end = self._system_end(messages, options, text, ids, key)
        ends = {system_end, self._marker_start(marker, ids)}
        boundaries = tuple(sorted(x for x in ends if 0 < x < len(ids)))
        return ChatPrompt(ids, boundaries, self._opens_thinking(marker))

    def _messages(self, request: ChatRequest, plan: ToolPlan) -> list[ChatMessage]:
        if self._knows_tools:
            messages = template_messages(request.messages)
        else:
            messages = plain_messages(request.messages, plan.tools)
        return self._controls.marked(messages)

    def _render(
        self, messages: Sequence[ChatMessage], answer: bool, options: dict[str, Any]
    ) -> str:
        render: Any = self._tokenizer.apply_chat_template
        try:
            return str(render(messages, tokenize=False, add_generation_prompt=answer, **options))
        except _TEMPLATE_ERRORS as error:
            why = self._controls.unmarked(str(error))
            raise InvalidRequest(
                f"The model's chat template cannot take these messages: {why}", "messages"
            ) from error

    def _encode(self, text: str, key: bytes | None = None) -> np.ndarray:
        if key is not None and self._controls.is_plain(text):
            return self.segments.ids(text, key)
        encode = self._whole if key is None else partial(self.segments.encode, key=key)
        return np.array(self._controls.encode(text, encode), np.int32)

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check_size(self, text: str, param: str) -> None:
        """Raise ``InvalidRequest`` for a text that is surely too long, before tokenizing it."""
        least = len(text) // self._vocabulary.max_token_chars
        if least < self._max_context and len(text) > _CONTEXT_CHARS * self._max_context:
            least = self._least_tokens(text)
        if least >= self._max_context:
            raise context_too_long(self._max_context, least, param, at_least=True)

    def _least_tokens(self, text: str) -> int:
        """Return a lower bound on a long text's tokens, counted until it exceeds the context."""
        least = first = 0
        while first < len(text) and least < self._max_context:
            part = text[first : first + _PART_CHARS]
            # A cut may give a part some tokens more than the same text has in the whole.
            least += max(0, len(self._encode(part)) - _CUT_TOKENS)
            first += _PART_CHARS
        return least

    def _marker_start(self, marker: str, ids: np.ndarray) -> int:
        """Return the number of tokens before the generation prompt.

        If that has no tokens of its own, return the number of all tokens but one.
        """
        size = len(tail := self._encode(marker)) if marker else 0
        return len(ids) - (size if size and np.array_equal(ids[-size:], tail) else 1)

    def _system_end(
        self,
        messages: Sequence[ChatMessage],
        options: dict[str, Any],
        text: str,
        ids: np.ndarray,
        key: bytes | None,
    ) -> int:
        """Return the number of first tokens that depend only on the system message and tools."""
        head = [x for x in messages[:1] if x["role"] == "system"]
        if not head and not options["tools"]:
            return 0
        try:
            other = self._render([*head, {"role": "user", "content": ""}], False, options)
        except InvalidRequest:
            return 0  # the template refuses the shortened chat, though it took the request's own
        head_ids = self._encode(text[: _num_shared(text, other)], key)
        return _num_equal(ids, head_ids)

    def _opens_thinking(self, marker: str) -> bool:
        if not self._tokenizer.has_thinking:
            return False
        last = marker.rfind(self._tokenizer.think_start)
        return last > marker.rfind(self._tokenizer.think_end)


def _num_shared(a: str, b: str) -> int:
    """Return the length of the common prefix of two long texts."""
    if a.startswith(b):
        return len(b)
    size = min(len(a), len(b))
    encoded = (x[:size].encode("utf-32-le", "surrogatepass") for x in (a, b))
    return _num_equal(*(np.frombuffer(x, np.uint32) for x in encoded))


def _num_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


def _options(request: ChatRequest) -> dict[str, Any]:
    """Return the template's arguments; the client's own override ours."""
    options: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            options["enable_thinking"] = False
    return {**options, **(request.chat_template_kwargs or {})}


class PromptTokens:
    """Tokenizes and detokenizes for one model; slow, and not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, facts: ModelFacts) -> None:
        self._vocabulary = vocabulary
        self._max_context = facts.max_context
        self._writer = PromptWriter(vocabulary, MAX_CONTEXTS * facts.max_context)

    def of(self, asked: ChatRequest | TokenizeText) -> dict[str, Any]:
        """Return the answer to a request to tokenize a chat, as it would be answered, or a text.

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
            "tokens": ids.tolist(),
            "token_strs": strings,
        }

    def _ids(self, asked: ChatRequest | TokenizeText) -> np.ndarray:
        if isinstance(asked, ChatRequest):
            return self._writer.chat(asked, plan_tools(asked, self._vocabulary)).token_ids
        if asked.add_special_tokens:
            return self._writer.text(asked.prompt)
        return self._writer.checked(self._plain(asked.prompt), "prompt")

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._vocabulary.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def text_of(self, asked: Detokenize) -> dict[str, Any]:
        """Return the answer to a request to detokenize.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        size = self._vocabulary.size
        if max(asked.tokens, default=0) >= size:
            raise InvalidRequest(f"tokens: an id is outside the vocabulary of {size}.", "tokens")
        return {"prompt": str(self._vocabulary.tokenizer.decode(asked.tokens))}
