"""``python -m engines.mlx_worker.calibrate``: see ``engines.calibration.program``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from engines.calibration.messages import CalibrationOrder, CalibrationReport
from engines.calibration.program import run
from engines.calibration.survey import CannotCalibrate, survey_report
from engines.mlx_worker.cache.layout import CannotServe, probe
from engines.mlx_worker.model.instrument import MlxInstrument
from engines.mlx_worker.model.loading import load_model


def calibrate(order: CalibrationOrder) -> CalibrationReport:
    try:
        loaded = load_model(order.model_path, order.dtype)
        plan = probe(loaded.model)
    except CannotServe as error:
        raise CannotCalibrate(str(error)) from error
    instrument = MlxInstrument(loaded, plan, Path(order.data_path) if order.data_path else None)
    engine = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    return survey_report(instrument, order, engine)


if __name__ == "__main__":
    run(calibrate)
