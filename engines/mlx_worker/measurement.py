"""Measures the model that this engine serves, between users' requests.

``Measuring`` begins and ends the measurement. ``engines.calibration`` measures with the
``MlxServingInstrument``, on its own thread: all calls of mlx are small steps on the owner thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.utils import get_total_parameters

from engines.calibration.first_order import TooShort, first_order
from engines.calibration.instrument import (
    HeldSession,
    Interrupted,
    LayerNotice,
    Note,
    NotObservable,
    StateNotice,
    draw_seed,
)
from engines.config import CalibrationOrder, WorkerConfig
from engines.mlx_worker.cache.layout import CachePlan
from engines.mlx_worker.measuring_steps import Dropped, HeldPrefix, IdleSteps
from engines.mlx_worker.model.instrument import MlxInstrument, rope_readers
from engines.mlx_worker.model.loading import LoadedModel
from engines.mlx_worker.owner import Owner
from engines.wire import CodecReport
from kvstore.shapes import KVRun, Rope

logger = logging.getLogger(__name__)

CPU_WORK: Final = 10**10  # tokens of a step times parameters
GPU_WORK: Final = 10**12
SMALLEST: Final = 8
LARGEST: Final = 512
T = TypeVar("T")
MOST_NOTED: Final = 128  # tokens at a time whose calls are differentiated


def step_tokens(num_parameters: int, *, on_gpu: bool) -> int:
    """Return the tokens of a step, a power of two."""
    wanted = (GPU_WORK if on_gpu else CPU_WORK) // max(num_parameters, 1)
    return max(SMALLEST, min(LARGEST, 1 << max(wanted.bit_length() - 1, 0)))


def step_tokens_of(model: Any) -> int:
    """Return the tokens of a step of this model, on the device that computes it."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    count: int = get_total_parameters(model)  # type: ignore[no-untyped-call]
    return step_tokens(count, on_gpu=on_gpu)


class MlxServingInstrument(MlxInstrument):
    """Measures the served model: its methods wait for idle moments of the owner thread.

    All of them raise ``Interrupted`` once the engine ends.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: CachePlan,
        fingerprint: str,
        steps: IdleSteps,
        held: HeldPrefix,
        step_tokens: int = 0,
    ) -> None:
        """Look at the plan of the served model's cache.

        ``step_tokens``: that are fed at a time; 0 = what suits the model's size.

        Raises:
            ValueError: this model's cache cannot be kept.
        """
        super().__init__(loaded, plan)
        self.fingerprint = fingerprint
        self._steps = steps
        self._held = held
        self._step_tokens = step_tokens or step_tokens_of(loaded.model)

    def _ropes(self, *, windows: bool) -> tuple[Rope | None, ...]:
        find = partial(rope_readers, self._loaded.model, self._plan, windows=windows)
        return tuple(self._steps.run(read) for read in self._steps.run(find))

    def log_probs_whole(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        return self._until_done(lambda: self._scored(session, tokens))

    def prefill_whole(self, tokens: Sequence[int], past: HeldSession | None = None) -> HeldSession:
        return self._until_done(lambda: self._whole(tokens, past or HeldSession((), 0)))

    def observe(self, tokens: Sequence[int], first: int, note: Note) -> KVRun:
        noted = _NotedOnce(note)
        try:
            return self._until_done(lambda: self._observed(tokens, first, noted))
        except (RuntimeError, ValueError) as error:  # mlx says so in either way
            raise NotObservable(f"mlx cannot differentiate a layer: {error}") from error

    def _until_done(self, work: Callable[[], T]) -> T:
        """Do work of several steps, again from its start whenever the KV was needed by others."""
        while True:
            try:
                return work()
            except Dropped:
                continue  # its first step waits for the next idle moment
            except Exception:
                with suppress(Interrupted):
                    self._steps.run(self._held.drop)
                raise

    def _whole(self, tokens: Sequence[int], past: HeldSession) -> HeldSession:
        self._feed(past, tokens[past.num_tokens :])
        return self._steps.run(lambda: self._held.take(len(tokens)))

    def _feed(self, past: HeldSession, tokens: Sequence[int]) -> None:
        """Have ``past``, followed by ``tokens``, held."""
        self._steps.run(lambda: self._held.begin(past))
        at = 0
        while at < len(tokens):
            part = tokens[at : at + self._step_tokens]
            self._steps.run(partial(self._held.feed, part))
            at += len(part)

    def _observed(self, tokens: Sequence[int], first: int, noted: _NotedOnce) -> KVRun:
        noted.begin()
        self._feed(HeldSession((), 0), tokens[:first])
        at = first
        while at < len(tokens):
            part = tokens[at : at + min(self._step_tokens, MOST_NOTED)]
            for number in range(self._steps.run(partial(self._held.feed_noted, part))):
                seed = draw_seed(tokens, at, number)
                look = partial(self._held.notice, number, first, seed)
                noted.note(partial(self._steps.run, look))
            at += len(part)
        return self._steps.run(lambda: self._held.take(len(tokens))).run

    def _scored(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        self._steps.run(lambda: self._held.begin(session))
        found, at = np.empty((0, 0), np.float32), 0
        while at < len(tokens):
            part = tokens[at : at + self._step_tokens]
            is_last = at + len(part) == len(tokens)
            scores = self._steps.run(partial(self._score, part, is_last))
            if not at:
                found = np.empty((len(tokens), scores.shape[1]), np.float32)
            found[at : at + len(part)] = scores
            at += len(part)
        return found

    def _score(self, tokens: Sequence[int], is_last: bool) -> np.ndarray:
        """Score one part, on the owner thread; nothing is held after the last."""
        found = self._held.score(tokens)
        if is_last:
            self._held.drop()
        return found


class _NotedOnce:
    """Passes each notice of a text on once, also where the text had to be begun again.

    Steps and draws are the same each time, and so is the order of notices.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._num_noted = 0
        self._number = 0  # of the next look since the text was begun

    def begin(self) -> None:
        """Begin the text, perhaps again."""
        self._number = 0

    def note(self, look: Callable[[], LayerNotice | StateNotice | None]) -> None:
        """Pass on the notice that ``look`` returns, unless that was done before."""
        self._number += 1
        if self._number > self._num_noted:
            notice = look()
            self._num_noted = self._number
            if notice is not None:
                self._note(notice)


if TYPE_CHECKING:
    from engines.calibration.self_measurement import SelfMeasurement


class Measuring:
    """The measurement, if one is needed. Its methods belong to the event loop."""

    def __init__(self, owner: Owner, config: WorkerConfig) -> None:
        """Prepare for a started owner; nothing is measured before ``begin``."""
        self._owner = owner
        self._config = config
        self._running: SelfMeasurement | None = None

    def with_progress(self, report: CodecReport) -> CodecReport:
        """The report with the measurement's progress, and with its end. Any thread."""
        return self._running.with_progress(report) if self._running is not None else report

    @property
    def is_running(self) -> bool:
        """True while a measurement runs. Any thread."""
        return self._running is not None and self._running.is_running

    @property
    def has_verdict(self) -> bool:
        """True unless a measurement runs whose verdict is awaited. Any thread."""
        return not self.is_running or (self._running is not None and self._running.has_verdict)

    @property
    def possible(self) -> bool:
        """True if this model can be measured here, whether it has to be or not."""
        return (
            self._owner.codecs is not None and self._owner.held is not None and bool(self._folder)
        )

    def begin(self) -> None:
        """Begin to measure, if this model is to be measured and was not; says why if it cannot.

        If it was, what was not learned yet is learned.
        """
        asks = self._is_needed() or self._learns_on() or self._times_again()
        if self._config.store.calibrate and asks and self._folder:
            self._begin(again=False)

    def begin_again(self, order: CalibrationOrder | None = None) -> None:
        """Begin to measure, also if that was done before, unless it is being done already.

        ``order``: see ``engines.wire.Measure``.
        """
        if self.possible and not self.is_running:
            self._begin(order, again=True)

    @property
    def _folder(self) -> str:
        return self._config.data_path or self._config.store.disk_path

    def _begin(self, order: CalibrationOrder | None = None, *, again: bool) -> None:
        # Arithmetic of calibration, which a measured model's engine never needs.
        from engines.calibration.self_measurement import ALL, OpenQuestions, SelfMeasurement

        config, data = self._config, self._folder
        try:
            if order is None:
                wanted = first_order(config.store, self._owner.facts.max_context, data)
            else:
                wanted = order.within(config.runtime_dir, data)
        except TooShort as error:
            logger.warning("the model is not measured: %s", error)
            return
        if self._running is not None:
            self._running.close()
        self._running = SelfMeasurement(
            wanted,
            self._instrument,
            self._adopt,
            engine=f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}",
            resumes=order is None,
            wanted=ALL
            if again
            else OpenQuestions(self._is_needed, self._learns_on, self._times_again),
        )

    async def close(self) -> None:
        """End it; what it has found so far is kept. The owner closes after this."""
        if self._running is not None:
            self._running.close()
            self._owner.idle_steps.close()
            await asyncio.to_thread(self._running.join)

    # ---- the measuring thread

    def _is_needed(self) -> bool:
        """True if a codec was asked for that was never measured on this model."""
        codecs = self._owner.codecs
        return codecs is not None and self._owner.held is not None and codecs.report.unmeasured

    def _learns_on(self) -> bool:
        codecs = self._owner.codecs
        return codecs is not None and self._owner.held is not None and codecs.learns_on

    def _times_again(self) -> bool:
        codecs = self._owner.codecs
        return codecs is not None and self._owner.held is not None and codecs.times_again

    def _instrument(self) -> MlxServingInstrument:
        owner = self._owner
        assert owner.codecs is not None and owner.held is not None
        known = owner.codecs.report.fingerprint
        return MlxServingInstrument(owner.loaded, owner.plan, known, owner.idle_steps, owner.held)

    def _adopt(self) -> None:
        codecs, store = self._owner.codecs, self._owner.store
        if self._owner.is_closing or codecs is None or store is None:
            raise Interrupted("the engine ends")
        codecs.renew(store.adopt)
