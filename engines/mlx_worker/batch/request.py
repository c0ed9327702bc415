"""Requests while the owner thread works on them, from their arrival to their last event.

A ``Request`` has ``n`` answers, each of which is a ``Sequence``. A ``PrefillTask`` is a run of
tokens to put into a cache, with the sequences that decode from it afterwards: first those of a new
request, later a single one if that had to leave its batch.

At the end of a turn, its KV stays as an idle hot session and is saved, whether the turn was
completed or cancelled, so that no computed KV is wasted.
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
    """Keeps errors of one sequence's sampling out of the batched step.

    An exception inside the step would fail every other sequence as well. So the first one is kept
    in ``fault``, the step continues with an arbitrary token for this sequence, and the batch loop
    fails its request before that token reaches a client.

    A step samples one token ahead, so a request's sampler is also called once after the last token;
    an error there does no harm.
    """

    def __init__(self, sampling: SequenceSampling) -> None:
        self._sampling = sampling
        self._sampler: Any = sampling.sampler
        self._num_samples = 0
        self.fault: Exception | None = None
        self._first_faulty = 0

    def is_faulty_within(self, num_tokens: int) -> bool:
        """Return whether one of the answer's first ``num_tokens`` tokens is arbitrary."""
        return self.fault is not None and self._first_faulty < num_tokens

    @property
    def sampler(self) -> _Step | None:
        """The guarded sampler; None for greedy sequences, which share one batched argmax."""
        return None if self._sampler is None else self._sample

    @property
    def processors(self) -> tuple[_Process, ...]:
        """One guarded logits processor that calls all of the request's, or none."""
        return (self._process,) if self._sampling.logits_processors else ()

    def _sample(self, logprobs: mx.array) -> mx.array:
        """Sample from (1, vocab) log-probabilities; return integers (1,)."""
        if not self._sampling.logits_processors:  # otherwise ``_process`` counts
            self._num_samples += 1
        sampled = self._guarded(lambda: self._sampler(logprobs), (1,))
        return mx.argmax(logprobs, axis=-1) if sampled is None else sampled

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Process (1, vocab) logits, given the tokens so far; return the same shape."""
        self._num_samples += 1
        processed = self._guarded(lambda: self._processed(tokens, logits), logits.shape)
        return logits if processed is None else processed

    def _processed(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for processor in self._sampling.logits_processors:
            logits = processor(tokens, logits)
        return logits

    def _guarded(self, step: Callable[[], mx.array], shape: tuple[int, ...]) -> mx.array | None:
        """Run a step of the request's code; None if it fails, or failed before."""
        if self.fault is not None:
            return None
        try:
            made = step()
            if made.shape == shape:
                return made
            raise ValueError(f"a sampler or processor returned shape {made.shape}, not {shape}")
        except Exception as error:  # an error of the request's code must fail this sequence only
            self.fault, self._first_faulty = error, self._num_samples - 1
            return None


@dataclass(eq=False)
class Request:
    """A request from its arrival to its last event."""

    generation: Generation
    events: EventQueue
    prompt: np.ndarray = field(init=False)  # int32, (num_tokens,)
    sequences: list[Sequence] = field(default_factory=list)  # those that have not ended
    is_waiting: bool = True  # counts against the limit of the waiting queue
    admitted: bool = False  # ``PromptAdmitted`` was sent
    num_fed: int = 0  # tokens of its prompt that are in a cache; any thread may read it
    forgotten: bool = False  # the session was deleted meanwhile: keep no KV of it
    # This many first tokens of its KV may come from a lossy copy. Only grows: sequences that left
    # their batch start again from the KV that is there by then.
    restored_tokens: int = 0
    # States at chunk ends that a later turn may return to, for the save at the end: those in the
    # prompt here, and in ``answer_state`` the newest in the answer.
    states: list[StateAt] = field(default_factory=list)
    # The known hashes of its prompt's first chunks, which are not computed again.
    chain: Chain = ()
    answer_state: StateAt | None = None

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.generation.prompt, np.int32)

    @property
    def key(self) -> SessionName | None:
        """The name of the session that this is a turn of; None for a request without a session."""
        session = self.generation.session
        return session.name if session else None

    @property
    def progress(self) -> RequestProgress:
        """The tokens computed so far; only for a request with a session. Any thread."""
        assert self.key is not None
        prompt = len(self.prompt)
        answered = sum(len(x.emitted) for x in list(self.sequences))
        return RequestProgress(*self.key, prompt, min(prompt, self.num_fed), answered)

    @property
    def taken_states(self) -> list[StateAt]:
        """All states that the request holds."""
        return [*self.states, *([self.answer_state] if self.answer_state else [])]

    def note_chain(self, chain: Chain, chunk_tokens: int) -> None:
        """Keep the known chunk hashes of the prompt, which all answers share."""
        self.chain = chain[: (len(self.prompt) - 1) // chunk_tokens]

    def note_restored(self, num_tokens: int) -> None:
        """Record that the first ``num_tokens`` may come from a lossy copy."""
        self.restored_tokens = max(self.restored_tokens, num_tokens)


@dataclass(eq=False)
class Sequence:
    """One answer being generated; its KV holds ``tokens``, except perhaps the last of them."""

    request: Request
    index: int  # its number among the request's answers
    guard: SamplingGuard
    remaining: int  # tokens that it may still emit
    emitted: list[int] = field(default_factory=list)  # every token emitted so far
    entered: int = 0  # order of entry into a batch: the youngest is sent back first

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.emitted)

    @property
    def last(self) -> int:
        """The last token, of the prompt or of the answer so far."""
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
    num_reused: int = 0  # those of ``num_cached`` that did not have to be computed
    # Whether the reused KV is also in the cold store; None: it was never saved.
    saved: Future[bool] | None = None
    state_positions: list[int] = field(default_factory=list)  # where to take states, ascending
    pauses: set[int] = field(default_factory=set)  # where followers copy its caches
    # The outcome that the client got; None: none yet, or from another task of the request.
    shown: CacheOutcome | None = None

    @property
    def target(self) -> int:
        """The number of tokens that must be in the cache before the sequences can decode."""
        return len(self.tokens) - 1

    @property
    def next_stop(self) -> int:
        """The position that the next chunk must not pass: a state's, a pause, or the target."""
        stops = (*self.state_positions, *self.pauses)
        return min((x for x in stops if x > self.num_cached), default=self.target)

    def reuse(self, caches: Caches, num_tokens: int, saved: Future[bool] | None) -> None:
        """Start from ``caches``, which hold the first ``num_tokens`` tokens.

        ``saved``: see the attribute.
        """
        self.caches, self.saved = caches, saved
        self.num_cached = self.num_reused = num_tokens

    def drop(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Remove those of ``sequences`` that are in the task, and return them."""
        leaving = [x for x in self.sequences if x in sequences]
        self.sequences = [x for x in self.sequences if x not in leaving]
        return leaving


def split_request(request: Request, max_tokens: int, at_once: int) -> list[PrefillTask]:
    """Make the request's sequences; return prefill tasks of up to ``at_once`` sequences each."""
    generation = request.generation
    request.sequences = [
        Sequence(request, i, SamplingGuard(sampling), max_tokens)
        for i, sampling in enumerate(generation.sampling)
    ]
    groups = range(0, len(request.sequences), at_once)
    parts = [request.sequences[i : i + at_once] for i in groups]
    return [PrefillTask(request, part, request.prompt) for part in parts]


class RunningRequests:
    """All requests that have not had their last event; belongs to the owner thread.

    A sequence is in a batch or in a prefill task, but during a step it may be in neither; a caller
    that must not miss any looks here.
    """

    def __init__(self, hot_cache: HotCache, events: EventBuffer) -> None:
        self._hot_cache = hot_cache
        self._events = events
        self._requests: dict[Request, None] = {}
        self.counters: Counter[str] = Counter()

    def all(self) -> list[Request]:
        return list(self._requests)

    def begin(self, request: Request) -> None:
        """Add a request; its session is busy from now on."""
        self.counters["turns"] += 1
        self._requests[request] = None
        if key := request.key:
            self._hot_cache.sessions.begin_turn(key, len(request.generation.prompt))

    def send(self, request: Request, event: Event) -> None:
        """Send the client an event, at the end of this round."""
        self._events.put(request.events, event)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        """End one sequence and keep its KV; the request ends with its last sequence.

        Args:
            caches: the sequence's KV, taken over; empty if it has none of its own.
            num_cached: number of its tokens that ``caches`` hold.
            unchanged: the earlier save, if the KV is as it was saved; see ``HotCache.keep``.
        """
        sequence.request.sequences.remove(sequence)
        self.send(sequence.request, Finished(sequence.index, reason))
        self._events.flush()  # the client need not wait for the KV to be kept
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
        """Keep the first sequence's KV as the session's; the other sequences' is dropped."""
        request, session = sequence.request, sequence.request.generation.session
        if session is None or sequence.index or request.forgotten or not caches or not num_cached:
            return
        tokens = sequence.tokens[:num_cached]
        hot = HotSession(session, caches, num_cached, tokens, request.chain)
        hot.restored_tokens = min(request.restored_tokens, num_cached)
        self._hot_cache.keep(hot, request.taken_states, unchanged)
        request.states, request.answer_state = [], None

    def fail(self, request: Request, error: Exception) -> None:
        """End the whole request with an error, and keep none of its KV."""
        self.counters["failed_turns"] += 1
        request.sequences.clear()
        self.send(request, Failed(f"{type(error).__name__}: {error}"))
        self._end(request)

    def forget(self, key: SessionName) -> None:
        """Mark the session's running requests, so that none of their KV is kept."""
        for request in self._requests:
            request.forgotten = request.forgotten or request.key == key

    def _end(self, request: Request) -> None:
        del self._requests[request]
        request.states, request.answer_state = [], None
        if (key := request.key) and (session := request.generation.session):
            self._hot_cache.sessions.end_turn(key, len(request.generation.prompt))
            if not request.forgotten:
                self._hot_cache.notify("turn", session)
