"""The frame of a calibrating process: an order on standard input, a report on the output.

A process of its own, so that measuring never competes with serving for one interpreter.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

import msgspec

from engines.calibration.order import Order, Report
from engines.calibration.survey import CannotCalibrate
from engines.config import WRONG_SETTINGS
from engines.log_lines import configure_logging
from kvstore.errors import UnknownCodec

logger = logging.getLogger(__name__)


def run(calibrate: Callable[[Order], Report]) -> None:
    """Ends with ``WRONG_SETTINGS`` and a line in the log for what another try would not change."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=_leave_with_parent, name="lifeline", daemon=True).start()
    configure_logging(order.log_level)
    # Whatever an engine prints goes where logs go: the output is the report's alone.
    # It is left open: its end tells the parent that this process has ended, too.
    output = os.fdopen(os.dup(1), "wb", closefd=False)
    os.dup2(2, 1)
    try:
        report = calibrate(order)
    except (CannotCalibrate, UnknownCodec, OSError, ValueError) as error:
        logger.error("%s", " ".join(str(error).split()))
        raise SystemExit(WRONG_SETTINGS) from error
    output.write(msgspec.json.encode(report) + b"\n")
    output.flush()


def _leave_with_parent() -> None:
    """Whoever ordered this is gone, however it went: nobody waits for the report."""
    while os.read(0, 1 << 12):  # not by sys.stdin, whose lock would be missed at the end
        pass
    os._exit(1)
