"""Instruments of models in this process, and the orders that one carries out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.calibration.calibrate import calibrate
from engines.calibration.gate.profiles import save
from engines.config import CalibrationOrder, CalibrationReport
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model
from tests.fields import fields
from tests.integration.tiny_models import tiny_model


def small_order(*presets: str, **given: Any) -> CalibrationOrder:
    """Learn and measure as little as there can be."""
    usual = fields("num_windows=2 window_tokens=128 num_scored=16 depths=() num_chains=0")
    return CalibrationOrder(presets=presets, contexts=(128,), **usual | given)


def instrument_of(kind: str, *more: Any) -> MlxInstrument:
    """Of a tiny model of this kind."""
    loaded = tiny_model(kind)
    return MlxInstrument(loaded, probe(loaded.model), *more)


def surveyed(folder: Path, order: CalibrationOrder) -> CalibrationReport:
    """Measure the model of this folder, in float32."""
    loaded = load_model(str(folder), "float32")
    instrument = MlxInstrument(loaded, probe(loaded.model), Path(order.data_path))
    profile = calibrate(instrument, order)
    path = save(profile, Path(order.data_path))
    return CalibrationReport(
        fingerprint=profile.fingerprint,
        engine="mlx",
        dtype=profile.layout.dtype,
        rows=profile.rows,
        profile=str(path),
    )
