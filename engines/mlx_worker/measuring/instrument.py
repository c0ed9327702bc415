"""The instrument with which ``engines.calibration`` measures an mlx model, in small steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.utils import get_total_parameters

from engines.calibration.instrument import (
    NOTHING,
    HeldSession,
    Interrupted,
    Note,
    NotObservable,
    draw_seed,
)
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.measuring.steps import (
    PART_TOKENS,
    AtOnce,
    Dropped,
    HeldPrefix,
    Noticed,
    Steps,
)
from engines.mlx_worker.model.loading import LoadedModel, fingerprint
from engines.mlx_worker.model.ropes import rope_readers
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import KVLayout, KVRun, Rope, StateLayout

CPU_WORK: Final = 2 * 10**10  # work of a step: its tokens x the model's parameters
GPU_WORK: Final = 10**12
SMALLEST: Final = 8  # tokens of a step
LARGEST: Final = 512
T = TypeVar("T")


def step_tokens(num_parameters: int, *, on_gpu: bool) -> int:
    """Return the number of tokens of a step, a power of two."""
    wanted = (GPU_WORK if on_gpu else CPU_WORK) // max(num_parameters, 1)
    return max(SMALLEST, min(LARGEST, 1 << max(wanted.bit_length() - 1, 0)))


def step_tokens_of(model: Any) -> int:
    """Return the number of tokens of a step for this model on mlx's device."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    count: int = get_total_parameters(model)  # type: ignore[no-untyped-call]
    return step_tokens(count, on_gpu=on_gpu)


class MlxInstrument:
    """An ``Instrument`` for a model of this process, or the served one, in idle moments.

    In an engine, all of its methods raise ``Interrupted`` once the engine ends.
    """

    sees_states = True
    state_step = CHUNK_TOKENS

    def __init__(
        self,
        loaded: LoadedModel,
        plan: CachePlan,
        folder: Path | None = None,
        steps: Steps | None = None,
        held: HeldPrefix | None = None,
        step_tokens: int = LARGEST,
    ) -> None:
        """Make an instrument for a loaded model.

        Args:
            plan: the plan of the model's caches.
            folder: see ``fingerprint``.
            steps, held: those of the owner thread; None = the model belongs to this thread.
            step_tokens: number of tokens fed at a time.

        Raises:
            ValueError: this model's caches cannot be kept.
        """
        if plan.layout is None:
            raise ValueError(plan.reason)
        self.layout: KVLayout = plan.layout
        self.states: StateLayout | None = plan.states
        self._plan = plan
        self._loaded = loaded
        self._folder = folder
        self._steps: Steps = steps or AtOnce()
        self._held = held or HeldPrefix(loaded.model, plan.layout)
        self._step_tokens = step_tokens
        self._lost_s = 0.0  # time of work that had to be started again

    @property
    def waited_s(self) -> float:
        return self._steps.waited_s + self._lost_s

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._loaded, self._plan, self._folder)

    def encode(self, text: str) -> list[int]:
        return list(self._loaded.tokenizer.encode(text, verbose=False))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        return self._ropes(windows=False)

    def window_ropes(self) -> tuple[Rope | None, ...]:
        return self._ropes(windows=True)

    def _ropes(self, *, windows: bool) -> tuple[Rope | None, ...]:
        find = partial(rope_readers, self._loaded.model, self._plan, windows=windows)
        return tuple(self._steps.run(read) for read in self._steps.run(find))

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        return self._until_done(lambda: self._scored(session, tokens))

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        return self._until_done(lambda: self._whole(tokens, past))

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        num_passed = 0  # looks whose notices were passed on; a repeated text must not pass on again

        def observed() -> KVRun:
            nonlocal num_passed
            self._feed(NOTHING, tokens[:first])
            for number, look in enumerate(self._looks(tokens, first)):
                if number == num_passed:
                    found = self._steps.run(look)
                    num_passed += 1
                    for notice in (x for x in found if x is not None):
                        note(notice)
            return self._steps.run(lambda: self._held.take(len(tokens))).run

        try:
            return self._until_done(observed)
        except (RuntimeError, ValueError) as error:  # mlx raises either
            raise NotObservable(f"mlx cannot differentiate a layer: {error}") from error

    def _looks(self, tokens: Sequence[int], first: int) -> Iterator[Callable[[], list[Noticed]]]:
        """Feed the tokens from ``first`` on; yield functions that differentiate some layer calls.

        Steps and random draws are the same at each repetition, and so is the order of notices.
        """
        size, at_once = min(self._step_tokens, PART_TOKENS), len(self._held.streams)
        for at in range(first, len(tokens), size):
            num_calls = self._steps.run(partial(self._held.feed_noted, tokens[at : at + size]))
            for number in range(0, num_calls, at_once):
                some = range(number, min(number + at_once, num_calls))
                seeds = [draw_seed(tokens, at, x) for x in some]
                yield partial(self._held.notices, some, first, seeds)

    def _until_done(self, work: Callable[[], T]) -> T:
        """Return the result of work of several steps; restart it if requests took its memory."""
        while True:
            began, waited_s = time.perf_counter(), self._steps.waited_s
            try:
                return work()
            except Dropped:  # the first step of the next attempt waits for an idle moment
                took = time.perf_counter() - began
                self._lost_s += max(0.0, took - (self._steps.waited_s - waited_s))
            except Exception:
                with suppress(Interrupted):
                    self._steps.run(self._held.drop)
                raise

    def _whole(self, tokens: Sequence[int], past: HeldSession) -> HeldSession:
        self._feed(past, tokens[past.num_tokens :])
        return self._steps.run(lambda: self._held.take(len(tokens)))

    def _feed(self, past: HeldSession, tokens: Sequence[int]) -> None:
        """Make ``held`` hold ``past`` followed by ``tokens``."""
        self._steps.run(lambda: self._held.begin(past))
        for part in self._parts(tokens):
            self._steps.run(partial(self._held.feed, part))

    def _parts(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the tokens of each step."""
        for at in range(0, len(tokens), self._step_tokens):
            yield tokens[at : at + self._step_tokens]

    def _scored(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        self._steps.run(lambda: self._held.begin(session))
        found = [self._steps.run(partial(self._held.score, x)) for x in self._parts(tokens)]
        self._steps.run(self._held.drop)
        return np.concatenate(found)
