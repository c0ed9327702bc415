"""``python -m engines.mlx_worker.calibrate``: an order on standard input, a report on the output.

A process of its own, so that measuring never competes with serving for one interpreter.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import msgspec

from engines.calibration.order import Order, Report
from engines.calibration.profiles import save
from engines.calibration.survey import CannotCalibrate, survey
from engines.config import WRONG_SETTINGS
from engines.log_lines import configure_logging
from engines.mlx_worker.instrument import MlxInstrument
from engines.mlx_worker.layout import CannotServe, probe
from engines.mlx_worker.loading import load_model
from kvstore.errors import UnknownCodec

logger = logging.getLogger(__name__)


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=_leave_with_parent, name="lifeline", daemon=True).start()
    configure_logging(order.log_level)
    try:
        report = calibrate(order)
    except (CannotCalibrate, CannotServe, UnknownCodec, OSError, ValueError) as error:
        logger.error("%s", " ".join(str(error).split()))
        raise SystemExit(WRONG_SETTINGS) from error
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


def _leave_with_parent() -> None:
    """Whoever ordered this is gone, however it went: nobody waits for the report."""
    while os.read(0, 1 << 12):  # not by sys.stdin, whose lock would be missed at the end
        pass
    os._exit(1)


def calibrate(order: Order) -> Report:
    loaded = load_model(order.model_path, order.dtype)
    folder = Path(order.data_path) if order.data_path else None
    instrument = MlxInstrument(loaded, probe(loaded.model), folder)
    profile = survey(instrument, order)
    return Report(
        fingerprint=instrument.fingerprint,
        engine=f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}",
        dtype=instrument.layout.dtype,
        rows=profile.rows,
        profile="" if folder is None else str(save(profile, folder)),
    )


if __name__ == "__main__":
    main()
