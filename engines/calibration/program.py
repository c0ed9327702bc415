"""The frame of a calibration program: an order on standard input, a report on standard output.

A process of its own, so that measuring never competes with serving for one interpreter.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

import msgspec

from engines.calibration.messages import CalibrationOrder, CalibrationReport
from engines.calibration.survey import CannotCalibrate
from engines.config import WRONG_SETTINGS
from engines.log_lines import configure_logging
from kvstore.codecs.registration import import_registering
from kvstore.errors import UnknownCodec

logger = logging.getLogger(__name__)


def run(calibrate: Callable[[CalibrationOrder], CalibrationReport]) -> None:
    """Read the order, call ``calibrate`` and write its report.

    Exits with ``WRONG_SETTINGS`` and a line in the log after an error that another try would not
    change.
    """
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=CalibrationOrder)
    threading.Thread(target=_leave_with_parent, name="lifeline", daemon=True).start()
    configure_logging(order.log_level)
    # All that an engine prints goes to the log: standard output is for the report alone. It is
    # left open: when it closes, the parent knows that this process has ended.
    output = os.fdopen(os.dup(1), "wb", closefd=False)
    os.dup2(2, 1)
    try:
        import_registering(order.codec_modules)
        report = calibrate(order)
    except (CannotCalibrate, UnknownCodec, OSError, ValueError) as error:
        logger.error("%s", " ".join(str(error).split()))
        raise SystemExit(WRONG_SETTINGS) from error
    output.write(msgspec.json.encode(report) + b"\n")
    output.flush()


def _leave_with_parent() -> None:
    """End this process when its input ends: the parent is gone, and the report has no reader."""
    while os.read(0, 1 << 12):  # not by sys.stdin, whose lock would be missed at the end
        pass
    os._exit(1)
