"""Has a running server measure its model, and waits for the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engines.config import CalibrationReport
from engines.wire import CodecReport
from launch.cli.remote import Remote
from launch.errors import LaunchError

LOOK_EVERY_S: Final = 2.0
# An engine reports now and then how far it is; one that was restarted reports nothing more.
SILENCE_S: Final = 60.0


def measure_served(
    remote: Remote,
    on_progress: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> CalibrationReport:
    """Have the server begin, and return its figures when it has ended. Takes minutes.

    The measurement goes on if this is interrupted. The report has no bounds and no single texts,
    and beside the new figures those that older runs have left of other presets.

    Args:
        on_progress: called with the progress, whenever that changes.

    Raises:
        LaunchError: the server cannot measure, or has given up.
    """
    before = remote.codec()
    shown, heard = remote.measure(), clock()
    on_progress(shown)
    while True:
        sleep(LOOK_EVERY_S)
        codec = _looked(remote)
        if codec is not None and codec.progress:
            heard = clock()
            if codec.progress != shown:
                shown = codec.progress
                on_progress(shown)
        elif codec is not None and _has_ended(codec, before):
            return _report(codec)
        elif clock() - heard > SILENCE_S:
            raise LaunchError(
                "the server measures no more, and does not say why: its engine may have been"
                " restarted; look at its log, and ask again"
            )


def _looked(remote: Remote) -> CodecReport | None:
    """Ask what the server says now; None if it does not answer, which may pass."""
    try:
        return remote.codec()
    except LaunchError:
        return None


def _has_ended(codec: CodecReport, before: CodecReport | None) -> bool:
    return codec.ended is not None and (before is None or codec.ended != before.ended)


def _report(codec: CodecReport) -> CalibrationReport:
    """The report of a measurement that has ended. Raises ``LaunchError``: it found nothing."""
    if codec.ended is not None and codec.ended.error:
        raise LaunchError(f"the server has not measured its model: {codec.ended.error}")
    rows = (*codec.rows, *codec.others)
    if not rows:
        raise LaunchError("this server's engine has no codecs to measure")
    return CalibrationReport(fingerprint=codec.fingerprint, engine="", dtype="", rows=rows)
