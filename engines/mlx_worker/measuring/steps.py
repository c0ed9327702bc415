"""The owner thread's part of a measurement: small steps, and the one prefix whose KV is live.

The measuring thread hands in steps and waits for each; the owner thread takes one between two
rounds, and only if nothing runs, waits or is being saved. So a new request waits for one step at
most. The prefix is outside of all batches and belongs to no session: it counts against no budget,
and is dropped at once when requests need its memory. It belongs to the owner thread, except where a
docstring says any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engines.calibration.instrument import HeldSession, Interrupted, LayerNotice, StateNotice
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.model.layer_calls import (
    NotedRows,
    NotedState,
    noted_calls,
    noted_rows,
    noted_states,
)
from kvstore.blobs.state_tree import copied_state
from kvstore.shapes import KVLayout
from kvstore.workers import usable_cores

T = TypeVar("T")
ENDS: Final = "the engine ends"
Noticed: TypeAlias = LayerNotice | StateNotice | None  # None: a state that mlx cannot differentiate
PART_TOKENS: Final = 128  # tokens per forward pass whose layer calls are differentiated


class Steps(Protocol):
    """Runs steps that need the model."""

    waited_s: float  # total time that steps waited for their turn, in seconds

    def run(self, step: Callable[[], T]) -> T:
        """Run ``step`` and return its result."""


class AtOnce:
    """Runs steps on the calling thread, which loaded the model."""

    waited_s = 0.0

    def run(self, step: Callable[[], T]) -> T:
        return step()


class _WaitingStep(NamedTuple):
    step: Callable[[], Any]
    done: Future[Any]
    since_s: float


class IdleSteps:
    """``Steps`` that run on the owner thread in idle moments; at most one waits at a time."""

    def __init__(
        self, wake: Callable[[], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """``wake`` makes the owner thread look for a step; it is called on any thread."""
        self._wake = wake
        self._monotonic = monotonic
        self._others_at = float("-inf")  # time when a request last used the model
        self._lock = threading.Lock()
        self._next: _WaitingStep | None = None
        self._closed = False
        self.num_done = 0  # steps since the start
        self.waited_s = 0.0

    # ---- the measuring thread

    def run(self, step: Callable[[], T]) -> T:
        """Run ``step`` on the owner thread in an idle moment, and return its result.

        Raises:
            Interrupted: the engine ends.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise Interrupted(ENDS)
            self._next = _WaitingStep(step, done, self._monotonic())
        self._wake()
        return done.result()

    @property
    def alone_s(self) -> float:
        """Seconds since a request used the model."""
        return self._monotonic() - self._others_at

    # ---- the owner thread

    def note_others(self) -> None:
        """Record that a request uses the model now."""
        self._others_at = self._monotonic()

    @property
    def is_waiting(self) -> bool:
        """True if a step waits. Any thread."""
        return self._next is not None

    def do_one(self) -> None:
        """Run the waiting step, if there is one."""
        if (waiting := self._taken()) is not None:
            self.num_done += 1
            self.waited_s += self._monotonic() - waiting.since_s
            try:
                waiting.done.set_result(waiting.step())
            except Exception as error:  # raised in the thread that waits for the step
                waiting.done.set_exception(error)

    def close(self) -> None:
        """Raise ``Interrupted`` for the waiting step and all later ones. Any thread."""
        self._closed = True
        if (waiting := self._taken()) is not None:
            waiting.done.set_exception(Interrupted(ENDS))

    def _taken(self) -> _WaitingStep | None:
        with self._lock:
            waiting, self._next = self._next, None
            return waiting


class Dropped(Exception):
    """The prefix was dropped for a user's request; the work on it has to start again."""


def log_probs(logits: mx.array) -> mx.array:
    """Return log-probabilities over the last axis, in fp32."""
    wide = logits.astype(mx.float32)
    scores: mx.array = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
    return scores


class HeldPrefix:
    """The live KV of at most one prefix; ``layout``: that of its growing caches."""

    def __init__(self, model: Any, layout: KVLayout) -> None:
        self._model = model
        self._layout = layout
        self._caches: Caches | None = None
        self._noted: list[NotedRows | NotedState] = []  # the layer calls of the last tokens fed
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the live KV. Any thread."""
        return self._nbytes

    def begin(self, session: HeldSession) -> None:
        """Hold a copy of a session, which may be empty, instead of the earlier prefix.

        Raises:
            Mismatch: the session is not this model's.
        """
        self.drop()
        if session.num_tokens:
            known = (session.run, session.state, session.num_tokens)
            self._caches = kv_arrays.rebuild(self._model, self._layout, *known)
        else:
            self._caches = list(make_prompt_cache(self._model))
        self._count()

    def feed(self, tokens: Sequence[int]) -> None:
        """Prefill ``tokens`` after the held prefix. Raises ``Dropped``."""
        self._read(tokens)
        # Only the caches are evaluated: the logits of these positions are never computed.
        mx.eval([cache.state for cache in self._held()])
        mx.clear_cache()
        self._count()

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed ``tokens``; return the log-probabilities after each, fp32 (len(tokens), vocabulary).

        Raises ``Dropped``.
        """
        scores = self._read(tokens)
        mx.eval(scores)
        found = np.concatenate([np.array(x) for x in scores])
        mx.clear_cache()
        self._count()
        return found

    def _read(self, tokens: Sequence[int]) -> list[mx.array]:
        """Feed ``tokens`` in parts; return the parts' log-probabilities, not evaluated.

        On a CPU, mlx computes each stream on one thread. So the parts alternate between two
        streams, the second of which follows the first through the layers. Raises ``Dropped``.
        """
        caches, streams, found = self._held(), self.streams, []
        step = len(tokens) if len(streams) == 1 else PART_TOKENS
        for number, at in enumerate(range(0, len(tokens), step)):
            with mx.stream(streams[number % len(streams)]):
                part = mx.array(list(tokens[at : at + step]))[None]
                found.append(log_probs(self._model(part, cache=caches)[0]))
        return found

    @cached_property
    def streams(self) -> list[mx.Stream]:
        """The streams to compute on; one layer call at a time is differentiated on each."""
        device = mx.default_device()
        is_slow = device.type == mx.DeviceType.cpu and usable_cores() > 1
        return [mx.default_stream(device), *([mx.new_stream(device)] if is_slow else [])]

    def take(self, num_tokens: int) -> HeldSession:
        """Return a copy of the prefix, which has ``num_tokens`` tokens, and drop it.

        Raises ``Dropped``.
        """
        held = self._held()
        run = [(k.copy(), v.copy()) for k, v in kv_arrays.growing_run(held, num_tokens)]
        session = HeldSession(run, num_tokens, copied_state(kv_arrays.state_tree(held)))
        self.drop()
        return session

    def feed_noted(self, tokens: Sequence[int]) -> int:
        """Prefill ``tokens`` and keep the layers' calls; return the number of calls kept.

        Raises ``Dropped`` and ``NotObservable``.
        """
        held = self._held()
        before = kv_arrays.copy_of(held)
        with noted_calls(self._model, held) as layers:
            self.feed(tokens)
        self._noted = [*noted_rows(held, before, layers), *noted_states(held, before, layers)]
        return len(self._noted)

    def notices(self, numbers: Sequence[int], first: int, seeds: Sequence[int]) -> list[Noticed]:
        """Return how some calls depend on the first tokens' K and V, or on the state before them.

        Args:
            numbers: consecutive numbers of calls, at most one for each of ``streams``.
            first: number of first tokens.
            seeds: the seed of the random draws for each call.

        Raises ``Dropped``.
        """
        self._held()
        begun = []
        for number, seed, stream in zip(numbers, seeds, self.streams, strict=False):
            with mx.stream(stream):
                begun.append(self._noted[number].begin(first, seed))
        found = [end() for end in begun]
        if numbers[-1] == len(self._noted) - 1:
            self._noted = []
        mx.clear_cache()
        return found

    def drop(self) -> None:
        """Drop the prefix and free its memory."""
        if self._nbytes:
            self._caches = None
            self._noted = []
            mx.clear_cache()
        self._nbytes = 0

    def _held(self) -> Caches:
        if self._caches is None:
            raise Dropped("a request needed the prefix's memory")
        return self._caches

    def _count(self) -> None:
        self._nbytes = kv_arrays.nbytes_of(self._caches or [])
