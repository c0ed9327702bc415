"""Requests while the owner thread works on them, from their arrival to their last event.

A ``Request`` has ``n`` answers, and each of them is a ``Sequence``. A ``PrefillTask`` is a run of
tokens on its way into a cache, with the sequences that decode once it is there: those of a new
request at first, and a single one again if it had to leave its batch.

At its end a turn's KV stays as an idle hot session and is saved, whether the turn ran to its end
or was cancelled half-way: KV that was computed is not wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from engines.http import CacheOutcome
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.generation import (
    Event,
    EventBuffer,
    EventQueue,
    Failed,
    Finished,
    FinishReason,
    Generation,
    SequenceSampling,
)
from engines.mlx_worker.sessions.cold_sessions import HotSession
from engines.mlx_worker.sessions.hot_sessions import HotCache
from engines.wire import RequestProgress
from kvstore.blobs.chain import Chain
from kvstore.session import SessionName
from kvstore.store.states import StateAt

_Step: TypeAlias = Callable[[mx.array], mx.array]
_Process: TypeAlias = Callable[[mx.array, mx.array], mx.array]


class SamplingGuard:
    """Stands between one sequence's sampling and the batched step.

    An exception inside the step would take every other sequence down with it. So the first one is
    remembered in ``fault``, the step goes on with an arbitrary token for this sequence, and the
    batch loop fails its request before that token reaches a client.

    A step samples one token ahead, so the code of a request is also called once after its last
    token. What it raises there spoils nothing.
    """

    def __init__(self, sampling: SequenceSampling) -> None:
        self._sampling = sampling
        self._sampler: Any = sampling.sampler
        self._num_samples = 0
        self.fault: Exception | None = None
        self._first_faulty = 0

    def is_faulty_within(self, num_tokens: int) -> bool:
        """True if one of the first ``num_tokens`` tokens of the answer is arbitrary."""
        return self.fault is not None and self._first_faulty < num_tokens

    @property
    def sampler(self) -> _Step | None:
        """The guarded sampler; ``None`` for greedy: such sequences share one batched argmax."""
        return None if self._sampler is None else self._sample

    @property
    def processors(self) -> tuple[_Process, ...]:
        """The guarded logits processors: one that calls them all, or none."""
        return (self._process,) if self._sampling.logits_processors else ()

    def _sample(self, logprobs: mx.array) -> mx.array:
        """Sample from (1, vocab) log-probabilities; returns (1,), an integer."""
        if not self._sampling.logits_processors:  # else counted there
            self._num_samples += 1
        sampled = self._guarded(lambda: self._sampler(logprobs), (1,))
        return mx.argmax(logprobs, axis=-1) if sampled is None else sampled

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Process (1, vocab) logits, given the tokens so far; returns the same shape."""
        self._num_samples += 1
        processed = self._guarded(lambda: self._processed(tokens, logits), logits.shape)
        return logits if processed is None else processed

    def _processed(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for processor in self._sampling.logits_processors:
            logits = processor(tokens, logits)
        return logits

    def _guarded(self, step: Callable[[], mx.array], shape: tuple[int, ...]) -> mx.array | None:
        """Do a step of the request's; None after its first error, or if it is one."""
        if self.fault is not None:
            return None
        try:
            made = step()
            if made.shape == shape:
                return made
            raise ValueError(f"a sampler or processor returned shape {made.shape}, not {shape}")
        except Exception as error:  # code of the request: its defects are this sequence's alone
            self.fault, self._first_faulty = error, self._num_samples - 1
            return None


@dataclass(eq=False)
class Request:
    """A request from its arrival to its last event."""

    generation: Generation
    events: EventQueue
    prompt: np.ndarray = field(init=False)  # the generation's, int32, (num_tokens,)
    sequences: list[Sequence] = field(default_factory=list)  # those that have not ended
    is_waiting: bool = True  # counts against the limit of the waiting queue
    admitted: bool = False  # the client was informed
    num_fed: int = 0  # tokens of its prompt that are in a cache; any thread may read it
    forgotten: bool = False  # the session was deleted meanwhile: keep nothing of it
    # The first so many tokens of its KV may come from a lossy copy. Only grows: sequences that left
    # their batch begin again from the KV that is there by then.
    restored_tokens: int = 0
    # Its state at ends of chunks that a later turn may come back to, for the save at the end: those
    # in the prompt, and the newest in the answer.
    states: list[StateAt] = field(default_factory=list)
    # The names of its prompt's first chunks, as far as they are known: they are not hashed again.
    chain: Chain = ()
    answer_state: StateAt | None = None

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.generation.prompt, np.int32)

    @property
    def key(self) -> SessionName | None:
        """The session it is a turn of; None for a request without a session."""
        session = self.generation.session
        return session.name if session else None

    @property
    def progress(self) -> RequestProgress:
        """Tokens that are computed so far, of a session's request. Any thread."""
        assert self.key is not None
        prompt = len(self.prompt)
        answered = sum(len(x.emitted) for x in list(self.sequences))
        return RequestProgress(*self.key, prompt, min(prompt, self.num_fed), answered)

    @property
    def taken_states(self) -> list[StateAt]:
        """All states that it holds."""
        return [*self.states, *([self.answer_state] if self.answer_state else [])]

    def note_chain(self, chain: Chain, chunk_tokens: int) -> None:
        """Remember names of chunks of one of its answers, as far as all its answers share them."""
        self.chain = chain[: (len(self.prompt) - 1) // chunk_tokens]

    def note_restored(self, num_tokens: int) -> None:
        """Remember that its first ``num_tokens`` may come from a lossy copy."""
        self.restored_tokens = max(self.restored_tokens, num_tokens)


@dataclass(eq=False)
class Sequence:
    """One answer in the making. Its KV holds ``tokens``, except perhaps the last of them."""

    request: Request
    index: int  # of its request's answers
    guard: SamplingGuard
    remaining: int  # tokens it may still deliver
    emitted: list[int] = field(default_factory=list)  # every token delivered so far
    entered: int = 0  # when it came into its batch: the youngest is preempted first

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.emitted)

    @property
    def last(self) -> int:
        """The last of these tokens."""
        return self.emitted[-1] if self.emitted else int(self.request.prompt[-1])

    @property
    def tokens(self) -> np.ndarray:
        """The prompt and the answer so far; int32, (num_tokens,)."""
        return np.concatenate((self.request.prompt, np.array(self.emitted, np.int32)))


@dataclass(eq=False)
class PrefillTask:
    """Tokens to feed before ``sequences`` can decode; the first decode step feeds the last one."""

    request: Request
    sequences: list[Sequence]
    tokens: np.ndarray  # int32, (num_tokens,)
    caches: Caches = field(default_factory=list)
    num_cached: int = 0  # tokens that ``caches`` hold
    num_reused: int = 0  # of these, how many did not have to be computed
    # Whether what was reused also rests in the cold store; None: it was never saved.
    saved: Future[bool] | None = None
    state_positions: list[int] = field(default_factory=list)  # to take its state at; ascending
    pauses: set[int] = field(default_factory=set)  # where others take over a copy of its caches
    # What the client was informed of; None: nothing yet, or by another task of its request.
    shown: CacheOutcome | None = None

    @property
    def target(self) -> int:
        """The number of tokens that must be in the cache before the sequences can decode."""
        return len(self.tokens) - 1

    @property
    def next_stop(self) -> int:
        """The position that the next chunk may reach at most: a state's, a pause, or the target."""
        stops = (*self.state_positions, *self.pauses)
        return min((x for x in stops if x > self.num_cached), default=self.target)

    def reuse(self, caches: Caches, num_tokens: int, saved: Future[bool] | None) -> None:
        """Start from ``caches``, which hold the first ``num_tokens`` tokens; see ``saved``."""
        self.caches, self.saved = caches, saved
        self.num_cached = self.num_reused = num_tokens

    def drop(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Take these out of the task, as far as they are in it; returns the ones taken."""
        leaving = [x for x in self.sequences if x in sequences]
        self.sequences = [x for x in self.sequences if x not in leaving]
        return leaving


def split_request(request: Request, max_tokens: int, at_once: int) -> list[PrefillTask]:
    """Make the request's sequences, and a prefill task for each ``at_once`` of them."""
    generation = request.generation
    request.sequences = [
        Sequence(request, i, SamplingGuard(sampling), max_tokens)
        for i, sampling in enumerate(generation.sampling)
    ]
    groups = range(0, len(request.sequences), at_once)
    parts = [request.sequences[i : i + at_once] for i in groups]
    return [PrefillTask(request, part, request.prompt) for part in parts]


class RunningRequests:
    """All requests that have not had their last event. Belongs to the owner thread.

    A sequence is in a batch or on its way there, but in the midst of a step it may be in neither;
    a caller that must miss none asks here.
    """

    def __init__(self, hot_cache: HotCache, events: EventBuffer) -> None:
        self._hot_cache = hot_cache
        self._events = events
        self._requests: dict[Request, None] = {}
        self.counters: Counter[str] = Counter()

    def all(self) -> list[Request]:
        return list(self._requests)

    def begin(self, request: Request) -> None:
        """Take a request in; its session is busy from now on."""
        self.counters["turns"] += 1
        self._requests[request] = None
        if key := request.key:
            self._hot_cache.sessions.begin_turn(key, len(request.generation.prompt))

    def send(self, request: Request, event: Event) -> None:
        """Have the client informed, at the end of this round."""
        self._events.put(request.events, event)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        """End one sequence and keep its KV; with the last one the request is over.

        Args:
            caches: its KV, given away; empty if it has none of its own.
            num_cached: how many of its tokens ``caches`` hold.
            unchanged: of KV that is as it was saved before; see ``HotCache.keep``.
        """
        sequence.request.sequences.remove(sequence)
        self.send(sequence.request, Finished(sequence.index, reason))
        self._events.flush()  # the client need not wait while KV is kept
        self.keep(sequence, caches, num_cached, unchanged)
        if not sequence.request.sequences:
            self._end(sequence.request)

    def keep(
        self,
        sequence: Sequence,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        """Make the first sequence's KV the session's; of the others nothing is kept."""
        request, session = sequence.request, sequence.request.generation.session
        if session is None or sequence.index or request.forgotten or not caches or not num_cached:
            return
        tokens = sequence.tokens[:num_cached]
        hot = HotSession(session, caches, num_cached, tokens, request.chain)
        hot.restored_tokens = min(request.restored_tokens, num_cached)
        self._hot_cache.keep(hot, request.taken_states, unchanged)
        request.states, request.answer_state = [], None

    def fail(self, request: Request, error: Exception) -> None:
        """End the whole request and keep nothing of it."""
        self.counters["failed_turns"] += 1
        request.sequences.clear()
        self.send(request, Failed(f"{type(error).__name__}: {error}"))
        self._end(request)

    def forget(self, key: SessionName) -> None:
        """Keep nothing of the requests that run for this session."""
        for request in self._requests:
            request.forgotten = request.forgotten or request.key == key

    def _end(self, request: Request) -> None:
        del self._requests[request]
        request.states, request.answer_state = [], None
        if (key := request.key) and (session := request.generation.session):
            self._hot_cache.sessions.end_turn(key, len(request.generation.prompt))
            if not request.forgotten:
                self._hot_cache.notify("turn", session)
