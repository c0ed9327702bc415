"""The child that measures: bounded in memory and time, and never left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import psutil
import pytest

from engines.calibration.messages import CalibrationOrder
from launch.calibrate.background_run import KEPT_FREE_BYTES, run_in_background
from launch.errors import LaunchError

ORDER = CalibrationOrder(model_path="there", presets=("tq3",), contexts=(128,))
PLENTY = 1 << 40
# Says who it is and what it was told, then waits for the end of its input.
PROGRAM = """
import os, sys
print(os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), sys.stdin.readline(), file=sys.stderr)
sys.stderr.flush()
"""
WAITS = PROGRAM + "sys.stdin.read()"


def command(script: str) -> list[str]:
    return [sys.executable, "-c", script]


async def run(script: str, **bounds: float) -> int:
    most_bytes = int(bounds.pop("most_bytes", PLENTY))
    left = int(bounds.pop("left", PLENTY))
    return await run_in_background(
        command(script),
        os.environ,
        ORDER,
        most_bytes,
        look_every_s=0.05,
        available=lambda: left,
        **bounds,
    )


async def test_its_words_and_its_end_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await run(PROGRAM + "print('ERROR no such model', file=sys.stderr); sys.exit(78)") == 78
    assert any(x.levelname == "ERROR" and x.message == "no such model" for x in caplog.records)
    said = caplog.records[0].message
    assert said.split()[1] == "19" and '"model_path":"there"' in said


async def test_of_its_progress_a_line_is_told_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    lines = "".join(f"INFO text {n}\n" for n in range(5)) + "WARNING slow\n" + "INFO end\n"
    script = f"import sys; sys.stderr.write({lines!r}); raise RuntimeError('why it ended')"
    assert await run(script) == 1
    told = [x.message for x in caplog.records]
    assert told[:3] == ["text 0", "slow", "Traceback (most recent call last):"]
    assert told[-1] == "RuntimeError: why it ended"
    caplog.clear()
    assert await run(f"import sys; sys.stderr.write({lines!r})", tell_every_s=0.0) == 0
    assert len(caplog.records) == 7


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"most_bytes": 1}, "it took .* of memory"),
        ({"left": KEPT_FREE_BYTES - 1}, "it took .* of memory, and 512 MiB were left|were left"),
        ({"most_s": 2.0}, "not done after 0 minutes"),
    ],
)
async def test_beyond_a_bound_it_is_ended(
    bounds: dict[str, float], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(LaunchError, match=said):
        await run(WAITS, **bounds)
    _is_gone(caplog)


async def test_whoever_is_cancelled_takes_it_along(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    running = asyncio.create_task(run(WAITS))
    async with asyncio.timeout(60):
        while not caplog.records:
            await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    _is_gone(caplog)


def _is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """It may have been ended before it could say who it is."""
    for record in caplog.records:
        assert not psutil.pid_exists(int(record.message.split()[0]))


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(OSError, match="nowhere"):
        await run_in_background([str(Path("nowhere"))], {}, ORDER, PLENTY)
