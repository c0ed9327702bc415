"""The tokenizer as the HTTP side needs it: the ids that end an answer, and the text of each id."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Protocol, cast

import llguidance
import llguidance.hf
from mlx_lm.tokenizer_utils import TokenizerWrapper

# Enough tokens for the detokenizer to know whether a word or a character goes on.
_CONTEXT_TOKENS = 4


class Detokenizer(Protocol):
    """mlx_lm's streaming detokenizer, as far as it is used here."""

    offset: int  # characters of ``text`` that ``last_segment`` has handed out

    @property
    def text(self) -> str: ...

    @property
    def last_segment(self) -> str: ...

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...


class Vocabulary:
    """One model's vocabulary. Read-only.

    ``grammar`` is built on first use, which takes about a second for large vocabularies.
    """

    def __init__(self, tokenizer: TokenizerWrapper, size: int) -> None:
        """``size`` is the width of the model's logits, which may exceed the tokenizer's."""
        self.tokenizer = tokenizer
        self.size = size
        self.width = max(size, len(tokenizer))  # of the masks of a grammar
        self.eos: frozenset[int] = frozenset(tokenizer.eos_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {x for x, token in added if token.special} - self._marker_ids()

    def hides(self, token: int, in_call: bool) -> bool:
        """True for ids that are no text: padding of the vocabulary, and special tokens.

        In a tool call special tokens may be part of the syntax that its parser reads.
        """
        return token >= len(self.tokenizer) or (token in self._special and not in_call)

    def spelling(self, token: int) -> bytes:
        """The exact bytes of one token, which may be a part of a character."""
        if self.grammar is None:
            return str(self.tokenizer.decode([token])).encode()
        return bytes(self.grammar.decode_bytes([token]))

    @cached_property
    def grammar(self) -> llguidance.LLTokenizer | None:
        """The vocabulary as a grammar sees it; None for tokenizers without a fast version."""
        try:
            # mlx_lm has no public name for the tokenizer that it wraps.
            return llguidance.hf.from_tokenizer(
                self.tokenizer._tokenizer, n_vocab=self.width, eos_token=sorted(self.eos)
            )
        except ValueError:
            return None

    def serialized(self) -> str:
        """Return the tokenizer as JSON, for another process; only where there is a ``grammar``."""
        backend = copy(self.tokenizer._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token, in characters."""
        return max(len(text) for text in self.tokenizer.get_vocab())

    def continuing(self, prompt: list[int]) -> tuple[Detokenizer, int]:
        """A detokenizer that has read the prompt's end, and how many characters it still owes.

        Started afresh it would take the space off the first word; the next turn's prompt would
        then hold another text than was generated, and part with the cache there. The characters
        owed belong to the prompt (a last space is kept back until the next token): not shown.
        """
        end = [x for x in prompt[-_CONTEXT_TOKENS:] if x < len(self.tokenizer)]
        whole, live = (cast(Detokenizer, self.tokenizer.detokenizer) for _ in range(2))
        for token in end:
            whole.add_token(token)
            live.add_token(token)
        whole.finalize()
        owed = whole.text[len(live.text) :]
        live.offset = len(live.text)
        return live, 0 if "\ufffd" in owed else len(owed)

    @property
    def markers(self) -> frozenset[str]:
        """The texts around reasoning and tool calls, which are parts of a model's own words."""
        tokenizer = self.tokenizer
        markers = [tokenizer.think_start, tokenizer.think_end]
        markers += [tokenizer.tool_call_start, tokenizer.tool_call_end]
        return frozenset(text for text in markers if text)

    def _marker_ids(self) -> set[int]:
        """Ids of the special tokens that mark reasoning and tool calls."""
        tokenizer = self.tokenizer
        markers = [*self.markers, *tokenizer.structural_markers]
        for edges in tokenizer.response_transitions.values():
            markers += [text for text, _ in edges]
        encode = tokenizer.encode
        return {x for text in markers if text for x in encode(text, add_special_tokens=False)}
