"""Calibrates codecs on vLLM; ``engines.calibration.program`` describes the order and the report.

    python -m engines.vllm_plugin.calibrate      in vLLM's own environment

vLLM runs in this one process: the instrument passes it arrays directly, and no other process is
left running when this one ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from engines.calibration.instrument import StatefulInstrument
from engines.calibration.messages import CalibrationOrder, CalibrationReport
from engines.calibration.program import run
from engines.calibration.survey import CannotCalibrate, check_contexts, survey_report


def calibrate(order: CalibrationOrder) -> CalibrationReport:
    """Measure the ordered codecs on the ordered model.

    Raises ``CannotCalibrate``: the order asks for several ranks, or its contexts are too short.
    """
    if order.vllm.tensor_parallel > 1:
        raise CannotCalibrate(
            "each of several ranks has heads of its own, which one process cannot measure; their"
            " server can: thermocline calibrate --url URL"
        )
    os.environ.update(_environment(order))
    # vLLM reads its environment when it is imported.
    from engines.vllm_plugin.calibration.calibration_engine import open_engine, version
    from engines.vllm_plugin.calibration.session_instrument import open_instrument

    engine = open_engine(order)
    remembered = Path(order.data_path) if order.data_path else None
    instrument = open_instrument(engine, remembered)
    if isinstance(instrument, StatefulInstrument):
        check_contexts(instrument, order.contexts)
    report = survey_report(instrument, order, f"vllm {version()}")
    instrument.close()
    return report


def _environment(order: CalibrationOrder) -> dict[str, str]:
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "DEBUG" if order.log_level == "debug" else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # each would become a line of the log
    }
    if Path(order.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env


if __name__ == "__main__":
    run(calibrate)
