"""Decides which tokens may come next in an answer that is held to a grammar.

llguidance's verdict is applied as the last of an answer's logits processors. The end-of-text tokens
are allowed only where the grammar accepts, and nothing else is allowed once it can take no more.
"""

from __future__ import annotations

import time

import llguidance.numpy as bitmasks
import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from mlx_lm.generate import StopSequences

from engines.host.grammar import FREE_MASK_S, MAX_MASKS_S, new_matcher, reason_of
from engines.mlx_worker.model.vocabulary import Vocabulary


class GrammarFailed(Exception):
    """llguidance gave up in the middle of an answer: the grammar is too complex here."""


class Grammar:
    """A compiled grammar, from which each answer takes a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @classmethod
    def compile(cls, vocabulary: Vocabulary, text: str) -> Grammar:
        """Compile a grammar that was tried out, see ``compiler``. Not on the event loop.

        Raises:
            GrammarFailed: it was not, or not well.
        """
        assert vocabulary.grammar is not None
        matcher = new_matcher(vocabulary.grammar, text)
        if matcher.is_error():
            raise GrammarFailed(reason_of(matcher.get_error()))
        return cls(matcher, vocabulary)

    def processor(self, prompt_tokens: int, after: tuple[int, ...] | None) -> GrammarProcessor:
        """Make the processor of one answer.

        ``after``: the grammar begins after these tokens (the end of thinking).
        """
        matcher = self._matcher.deep_copy()
        return GrammarProcessor(matcher, self._vocabulary.width, prompt_tokens, after)


class GrammarProcessor:
    """Logits processor of one answer; called on the owner thread only."""

    def __init__(
        self, matcher: LLMatcher, width: int, prompt_tokens: int, after: tuple[int, ...] | None
    ) -> None:
        self._matcher = matcher
        self._seen = prompt_tokens  # tokens so far that are settled
        # None once the grammar has begun.
        self._opening = StopSequences([after]).matcher() if after else None
        self._bits = bitmasks.allocate_token_bitmask(1, width)
        self._masks_s = 0.0  # beyond what is free
        self.failure = ""  # why it gave up

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return (1, vocab) logits with -inf for every token that may not come next.

        ``tokens``: integers, (num_tokens,): the prompt and the answer so far.

        Raises:
            GrammarFailed: the matcher gave up; the answer must not go on unchecked.
        """
        fresh: list[int] = np.array(tokens[self._seen :]).tolist()
        self._seen += len(fresh)
        for token in fresh:
            self._take(token)
        if self._opening is not None:
            return logits
        begin = time.thread_time()
        bitmasks.fill_next_token_bitmask(self._matcher, self._bits)
        self._masks_s += max(0.0, time.thread_time() - begin - FREE_MASK_S)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        allowed = mx.array(bits[: logits.shape[-1]].astype(bool))
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

    def _take(self, token: int) -> None:
        if self._opening is not None:
            if self._opening.advance(token):
                self._opening = None
        elif not self._matcher.is_stopped():
            # The step after the last token is already under way when the answer ends.
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._masks_s > MAX_MASKS_S:
            self.failure = "the grammar takes too long at every token"
        elif self._matcher.is_error():
            self.failure = reason_of(self._matcher.get_error())
        if self.failure:
            raise GrammarFailed(self.failure)
