"""Holds answers to a grammar: JSON, a JSON schema, or calls of given functions.

A small schema can keep llguidance busy for minutes and take gigabytes (``multipleOf``, ``allOf``
with patterns), its own limits notwithstanding. So each grammar is compiled in another process
first, which ends when it takes too much or its client leaves (``host.grammar_trial``). What passes
is little work, and compiled here, on a thread. What came of a text is
remembered for its tenant, refusals too; for its tenant only, or times would reveal what schemas
others use.

llguidance's verdict is applied as the last of an answer's logits processors. The end-of-text tokens
are allowed only where the grammar accepts, and nothing else is allowed once it can take no more.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeAlias

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
from engines.host.work_line import QueueFull, WorkLine, to_its_end
from engines.mlx_worker.model.loading import Vocabulary
from engines.openai.requests import InvalidRequest

MAX_SOURCE_CHARS: Final = 1 << 20
MAX_WAITING: Final = 64  # requests
MAX_KNOWN: Final = 64  # grammars
MAX_KNOWN_BYTES: Final = 64 << 20
# A grammar takes so much for a character of its text at least.
_BYTES_PER_CHAR: Final = 64
_Key: TypeAlias = tuple[str, bytes]  # tenant, digest of the text


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
    """Compiles grammars for one model. Belongs to the event loop."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._line = WorkLine(MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.known = _KnownGrammars()
        self.trials = GrammarTrials(partial(_for_trials, vocabulary))

    async def of(self, tenant: str, wish: GrammarWish) -> Grammar:
        """Compile a grammar, or find it among those of the tenant.

        Raises:
            InvalidRequest: a schema is wrong, or beyond what can be enforced. Names the field.
            QueueFull: too many wait already, or none can be tried out now.
        """
        source = await self._source(wish)
        key = tenant, hashlib.blake2b(source.text.encode()).digest()
        if known := self.known.find(key):
            return known.of()
        async with self._line.turn():
            known = self.known.find(key) or await self._compiled(source)
            self.known.add(key, known)
        return known.of()

    async def close(self) -> None:
        """End the process that tries grammars out."""
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


class _KnownGrammars:
    """Remembers what came of the texts that were tried lately, within so many bytes."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, _KnownGrammar] = OrderedDict()  # used last is last
        self._nbytes: Counter[str] = Counter()  # of each tenant

    def __len__(self) -> int:
        return len(self._known)

    def find(self, key: _Key) -> _KnownGrammar | None:
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def add(self, key: _Key, known: _KnownGrammar) -> None:
        """Remember it; if it is too much, the tenant with most forgets what it used longest ago."""
        self._forget(key)
        self._known[key] = known
        self._nbytes[key[0]] += known.nbytes
        while self._nbytes.total() > MAX_KNOWN_BYTES:
            self._forget_of(max(self._nbytes, key=self._nbytes.__getitem__))
        while len(self._known) > MAX_KNOWN:
            self._forget_of(Counter(x for x, _ in self._known).most_common(1)[0][0])

    def _forget_of(self, tenant: str) -> None:
        self._forget(next(x for x in self._known if x[0] == tenant))

    def _forget(self, key: _Key) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._nbytes[key[0]] -= known.nbytes


def _written(vocabulary: Vocabulary, wish: GrammarWish) -> GrammarSource:
    if vocabulary.grammar is None:
        raise InvalidRequest(
            "This model's tokenizer cannot be held to a grammar: drop response_format and "
            "leave tool_choice at auto.",
            "tool_choice" if wish.param == "tools" else wish.param,
        )
    return source_of(wish)


def _for_trials(vocabulary: Vocabulary) -> TrialVocabulary:
    return TrialVocabulary(vocabulary.serialized(), vocabulary.width, sorted(vocabulary.eos))
