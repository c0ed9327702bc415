"""Makes answers obey a grammar: JSON, a JSON schema, or calls of given functions.

A small schema can keep llguidance busy for minutes and take gigabytes (``multipleOf``, ``allOf``
with patterns) in spite of its own limits. So each grammar is first compiled in another process,
which ends if it takes too much or its client leaves (``host.grammar_trial``). A grammar that passes
takes little work, and is compiled here, on a thread. Results, refusals included, are cached per
tenant: with a shared cache, response times would reveal other tenants' schemas.

llguidance's masks are applied as the last of an answer's logits processors. End-of-text tokens are
allowed only where the grammar accepts, and only they are allowed once it is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import llguidance.numpy as bitmasks
import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from mlx_lm.generate import StopSequences

from engines.host.grammar import (
    FREE_MASK_S,
    MAX_MASKS_S,
    GrammarSource,
    GrammarWish,
    Verdict,
    new_matcher,
    reason_of,
    source_of,
)
from engines.host.grammar_trial import GrammarTrials, TrialVocabulary
from engines.host.tenant_cache import TenantCache
from engines.host.work_line import QueueFull, WorkLine, to_its_end
from engines.mlx_worker.model.loading import Vocabulary
from engines.openai.requests import InvalidRequest

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_WAITING: Final = 64  # requests
MAX_KNOWN: Final = 64  # grammars
MAX_KNOWN_BYTES: Final = 64 << 20
# The least memory counted for a grammar, per character of its text.
_BYTES_PER_CHAR: Final = 64


class GrammarFailed(Exception):
    """llguidance failed with a grammar, in compiling it or in the middle of an answer."""


class Grammar:
    """A compiled grammar, of which each answer gets its own copy of the matcher."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @classmethod
    def compile(cls, vocabulary: Vocabulary, text: str) -> Grammar:
        """Compile a grammar that has passed its trial. Not on the event loop.

        Raises:
            GrammarFailed: it cannot be compiled.
        """
        assert vocabulary.grammar is not None
        matcher = new_matcher(vocabulary.grammar, text)
        if matcher.is_error():
            raise GrammarFailed(reason_of(matcher.get_error()))
        return cls(matcher, vocabulary)

    def processor(self, prompt_tokens: int, after: tuple[int, ...] | None) -> GrammarProcessor:
        """Return the logits processor of one answer.

        Args:
            prompt_tokens: number of tokens of the prompt.
            after: tokens after which the grammar begins (the end of reasoning); None = at once.
        """
        matcher = self._matcher.deep_copy()
        return GrammarProcessor(matcher, self._vocabulary.width, prompt_tokens, after)


class GrammarProcessor:
    """The logits processor of one answer; called on the owner thread only."""

    def __init__(
        self, matcher: LLMatcher, width: int, prompt_tokens: int, after: tuple[int, ...] | None
    ) -> None:
        self._matcher = matcher
        self._seen = prompt_tokens  # tokens processed so far, the prompt included
        # Finds the tokens after which the grammar begins; None once it has begun.
        self._opening = StopSequences([after]).matcher() if after else None
        self._bits = bitmasks.allocate_token_bitmask(1, width)
        self._masks_s = 0.0  # CPU seconds of masks beyond ``FREE_MASK_S`` each
        self.failure = ""  # why the grammar failed; "" = it has not

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return (1, vocab) logits with -inf for every token that may not come next.

        Args:
            tokens: integers (num_tokens,), the prompt and the answer so far.

        Raises:
            GrammarFailed: the matcher failed; the answer must not continue unchecked.
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
            # A step samples one token ahead, so one may follow the grammar's end.
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._masks_s > MAX_MASKS_S:
            self.failure = "the grammar takes too long at every token"
        elif self._matcher.is_error():
            self.failure = reason_of(self._matcher.get_error())
        if self.failure:
            raise GrammarFailed(self.failure)


class _KnownGrammar(NamedTuple):
    grammar: Grammar | None
    verdict: Verdict
    nbytes: int

    def of(self) -> Grammar:
        if self.grammar is None:
            raise InvalidRequest(
                f"{self.verdict.param}: {self.verdict.reason}", self.verdict.param or None
            )
        return self.grammar


class GrammarCompiler:
    """Compiles grammars for one model, and caches them; belongs to the event loop."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._line = WorkLine(MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.known = TenantCache[_KnownGrammar](MAX_KNOWN, MAX_KNOWN_BYTES)
        self.trials = GrammarTrials(partial(_for_trials, vocabulary))

    async def of(self, tenant: str, wish: GrammarWish) -> Grammar:
        """Return the compiled grammar, from the tenant's cache if it is there.

        Raises:
            InvalidRequest: a schema is wrong or cannot be enforced; the error names the field.
            QueueFull: too many requests wait already, or no trial is possible now.
        """
        source = await self._source(wish)
        key = tenant, hashlib.blake2b(source.text.encode()).digest()
        if known := self.known.find(key):
            return known.of()
        async with self._line.turn():
            known = self.known.find(key) or await self._compiled(source)
            self.known.add(key, known, known.nbytes)
        return known.of()

    async def close(self) -> None:
        """End the trial process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self.trials.close()

    async def _source(self, wish: GrammarWish) -> GrammarSource:
        source = await asyncio.to_thread(_written, self._vocabulary, wish)
        if len(source.text) > MAX_SOURCE_CHARS:
            message = f"{wish.param}: the JSON schemas are too large to enforce."
            raise InvalidRequest(message, wish.param)
        return source

    async def _compiled(self, source: GrammarSource) -> _KnownGrammar:
        verdict = await self.trials.of(source)
        if not verdict.is_final:
            raise QueueFull(f"{verdict.param}: {verdict.reason}")
        if verdict.reason:
            return _KnownGrammar(None, verdict, len(verdict.reason))
        compiling = asyncio.get_running_loop().run_in_executor(
            self._thread, Grammar.compile, self._vocabulary, source.text
        )
        try:
            grammar = await to_its_end(compiling)
        except GrammarFailed as error:
            return _KnownGrammar(None, Verdict(f"cannot be enforced: {error}", source.param), 0)
        return _KnownGrammar(
            grammar, verdict, max(verdict.nbytes, _BYTES_PER_CHAR * len(source.text))
        )


def _written(vocabulary: Vocabulary, wish: GrammarWish) -> GrammarSource:
    if vocabulary.grammar is None:
        raise InvalidRequest(
            "Grammars are not supported with this model's tokenizer: drop response_format and "
            "leave tool_choice at auto.",
            "tool_choice" if wish.param == "tools" else wish.param,
        )
    return source_of(wish)


def _for_trials(vocabulary: Vocabulary) -> TrialVocabulary:
    return TrialVocabulary(vocabulary.serialized(), vocabulary.width, sorted(vocabulary.eos))
