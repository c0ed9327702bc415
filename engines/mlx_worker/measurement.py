"""Begins and ends the measurement of the model that this engine serves."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from engines.calibration.first_order import TooShort, first_order
from engines.calibration.fleet_profiles import FleetProfiles, open_sharing
from engines.calibration.instrument import Interrupted
from engines.config import CalibrationOrder, WorkerConfig
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.serving_instrument import ServingInstrument
from engines.wire import CodecReport

if TYPE_CHECKING:
    from engines.calibration.self_measurement import SelfMeasurement

logger = logging.getLogger(__name__)


class Measuring:
    """The measurement, if one is needed. Its methods belong to the event loop."""

    def __init__(self, owner: Owner, config: WorkerConfig) -> None:
        """Prepare for a started owner; nothing is measured before ``begin``."""
        self._owner = owner
        self._config = config
        self._running: SelfMeasurement | None = None
        self._sharing: FleetProfiles | None = None

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
        wanted = self._config.store.calibrate and (self._is_needed() or self._learns_on())
        if self.possible and self._owner.codecs is not None:
            self._sharing = open_sharing(self._config.store, self._owner.codecs, Path(self._folder))
        if wanted and self._folder:
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
        from engines.calibration.self_measurement import ALL, SelfMeasurement, Wanted

        config, data = self._config, self._folder
        try:
            if order is None:
                wanted = first_order(config.store, self._owner.facts.max_context, data)
            else:
                wanted = order.within(config.runtime_dir, data)
        except TooShort as error:
            logger.warning("the model is not measured: %s", error)
            return
        self._running = SelfMeasurement(
            wanted,
            self._instrument,
            self._adopt,
            engine=f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}",
            resumes=order is None,
            wanted=ALL if again else Wanted(self._is_needed, self._learns_on),
            sharing=None if again else self._sharing,
        )

    async def close(self) -> None:
        """End it; what it has found so far is kept. The owner closes after this."""
        if self._running is not None:
            self._running.close()
            self._owner.idle_steps.close()
            await asyncio.to_thread(self._running.join)
        if self._sharing is not None:
            await asyncio.to_thread(self._sharing.close)

    # ---- the measuring thread

    def _is_needed(self) -> bool:
        """True if a codec was asked for that was never measured on this model."""
        codecs = self._owner.codecs
        return codecs is not None and self._owner.held is not None and codecs.report.unmeasured

    def _learns_on(self) -> bool:
        codecs = self._owner.codecs
        return codecs is not None and self._owner.held is not None and codecs.learns_on

    def _instrument(self) -> ServingInstrument:
        owner = self._owner
        assert owner.codecs is not None and owner.held is not None
        known = owner.codecs.report.fingerprint
        return ServingInstrument(owner.loaded, owner.plan, known, owner.idle_steps, owner.held)

    def _adopt(self) -> None:
        codecs, store = self._owner.codecs, self._owner.store
        if self._owner.is_closing or codecs is None or store is None:
            raise Interrupted("the engine ends")
        codecs.renew(store.adopt)
