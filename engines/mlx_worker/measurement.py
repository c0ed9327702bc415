"""Starts and stops the measurement of the model that this engine serves."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from engines.calibration.instrument import Interrupted
from engines.calibration.orders import TooShort, first_order
from engines.config import CalibrationOrder, WorkerConfig
from engines.mlx_worker.measuring.instrument import LARGEST, MlxInstrument, step_tokens_of
from engines.mlx_worker.owner import Owner
from engines.wire import CodecReport

if TYPE_CHECKING:
    from engines.calibration.gate.served_codecs import ServedCodecs
    from engines.calibration.self_measurement import SelfMeasurement

logger = logging.getLogger(__name__)


class Measuring:
    """The measurement of the served model, if one is needed.

    Its methods belong to the event loop, except where a docstring says any thread.
    """

    def __init__(self, owner: Owner, config: WorkerConfig) -> None:
        """Prepare for a started owner; nothing is measured before ``begin``."""
        self._owner = owner
        self._config = config
        self._running: SelfMeasurement | None = None

    def with_progress(self, report: CodecReport) -> CodecReport:
        """Return the report with the measurement's progress or end added. Any thread."""
        return self._running.with_progress(report) if self._running is not None else report

    @property
    def is_running(self) -> bool:
        """True while a measurement runs. Any thread."""
        return self._running is not None and self._running.is_running

    @property
    def has_verdict(self) -> bool:
        """False while a measurement runs that has no verdict yet. Any thread."""
        return not self.is_running or (self._running is not None and self._running.has_verdict)

    @property
    def possible(self) -> bool:
        """True if this model can be measured here, whether or not it needs to be."""
        return (
            self._owner.codecs is not None and self._owner.held is not None and bool(self._folder)
        )

    def begin(self) -> None:
        """Start the measurement that the served codecs still need; log why if it is impossible."""
        codecs = self._owner.codecs
        if codecs is not None:
            codecs.compile_rest()
        if self._config.store.calibrate and self.possible and codecs and codecs.has_open_questions:
            self._begin(codecs)

    def begin_again(self, order: CalibrationOrder | None = None) -> None:
        """Start a measurement even if there was one before, unless one runs already.

        ``order``: see ``engines.wire.Measure``.
        """
        if self.possible and not self.is_running:
            self._begin(None, order)

    @property
    def _folder(self) -> str:
        return self._config.data_path or self._config.store.disk_path

    def _begin(
        self, open_questions: ServedCodecs | None, order: CalibrationOrder | None = None
    ) -> None:
        # Imported here, since the engine of a model that was measured never needs it.
        from engines.calibration.self_measurement import SelfMeasurement

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
            # An engine that measures by order has no other users, so its steps may be long.
            partial(self._instrument, LARGEST if order is not None else 0),
            self._adopt,
            engine=f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}",
            stages=order is None,
            open_questions=open_questions,
        )

    async def close(self) -> None:
        """Stop the measurement and keep its results so far; call it before ``Owner.close``."""
        if self._running is not None:
            self._running.close()
            self._owner.idle_steps.close()
            await asyncio.to_thread(self._running.join)

    # ---- the measuring thread

    def _instrument(self, step_tokens: int) -> MlxInstrument:
        owner = self._owner
        assert owner.codecs is not None and owner.held is not None
        how = (owner.idle_steps, owner.held, step_tokens or step_tokens_of(owner.loaded.model))
        instrument = MlxInstrument(owner.loaded, owner.plan, None, *how)
        instrument.fingerprint = owner.codecs.fingerprint
        return instrument

    def _adopt(self) -> None:
        codecs, store = self._owner.codecs, self._owner.store
        if self._owner.is_closing or codecs is None or store is None:
            raise Interrupted("the engine ends")
        codecs.renew(store.adopt)
