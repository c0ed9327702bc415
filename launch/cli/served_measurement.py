"""Has a running server measure its model, and waits for what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engines.calibration.messages import CalibrationReport
from engines.wire import CodecReport
from launch.cli.remote import Remote
from launch.errors import LaunchError

LOOK_EVERY_S: Final = 1.0
# An engine tells its gateway now and then how far it is, and after a restart it goes on where it
# was.
SILENCE_S: Final = 60.0


def measure_served(
    remote: Remote,
    tell: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> CalibrationReport:
    """Have the server begin, and return its figures when it has ended. Takes minutes.

    The measurement goes on if this is interrupted.

    Args:
        tell: told how far it is, whenever that changes.

    Raises:
        LaunchError: the server cannot measure, or has given up.
    """
    before = remote.codec()
    told = remote.measure()
    tell(told)
    has_begun, heard = False, clock()
    while True:
        sleep(LOOK_EVERY_S)
        codec = remote.codec()
        if codec is not None and codec.progress:
            has_begun, heard = True, clock()
            if codec.progress != told:
                told = codec.progress
                tell(told)
        elif codec is not None and _has_ended(codec, before, has_begun):
            return _report(codec)
        elif clock() - heard > SILENCE_S:
            raise LaunchError("the server measures no more; its log says why")


def _has_ended(codec: CodecReport, before: CodecReport | None, has_begun: bool) -> bool:
    """Tell whether the figures are those of the measurement."""
    is_new = before is None or codec.rows != before.rows or codec.others != before.others
    return not codec.unmeasured and (has_begun or is_new)


def _report(codec: CodecReport) -> CalibrationReport:
    rows = (*codec.rows, *codec.others)
    return CalibrationReport(fingerprint=codec.fingerprint, engine="", dtype="", rows=rows)
