"""Runs the calibration program beside a server: lowest priority, bounded, ended when we end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import psutil

from engines.calibration.messages import CalibrationOrder
from engines.log_lines import read_line
from launch.errors import LaunchError
from launch.machine.memory import available_memory
from launch.settings.units import show_bytes

log = logging.getLogger("thermocline.calibration")

LEAST_PRIORITY: Final = 19
MOST_S: Final = 3 * 3600.0  # long: an engine that is never idle leaves it little time
KEPT_FREE_BYTES: Final = 512 << 20  # if the machine has less memory left, the program is ended
LOOK_EVERY_S: Final = 2.0
# The program reports each text; in a server's log now and then a line is enough.
TELL_EVERY_S: Final = 60.0
PROGRESS: Final = "INFO "


async def run_in_background(
    command: Sequence[str],
    env: Mapping[str, str],
    order: CalibrationOrder,
    most_bytes: int,
    *,
    most_s: float = MOST_S,
    look_every_s: float = LOOK_EVERY_S,
    tell_every_s: float = TELL_EVERY_S,
    available: Callable[[], int] = available_memory,
) -> int:
    """Run the program to its end and return its exit code.

    However this ends, the program and all processes that it started have ended, too.

    Args:
        most_bytes: memory that the program may take.
        tell_every_s: at most one line of progress is logged in so many seconds.
        available: bytes of memory that the machine can still give.

    Raises:
        LaunchError: it took too much memory or time, and was ended.
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, env=env, start_new_session=True
    )
    relaying = asyncio.create_task(_relay(process, tell_every_s))
    try:
        # Before it has threads: each inherits what its maker has.
        psutil.Process(process.pid).nice(LEAST_PRIORITY)
        assert process.stdin is not None  # open until the end, which is the end of the program
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(most_s):
            while not await _ended(process, look_every_s):
                if reason := _too_much(process.pid, most_bytes, available()):
                    raise LaunchError(reason)
        assert process.returncode is not None
        return process.returncode
    except TimeoutError as error:
        raise LaunchError(f"it was not done after {most_s / 60:.0f} minutes") from error
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await relaying


async def _ended(process: Process, within_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await process.wait()
    return process.returncode is not None


def _too_much(pid: int, most_bytes: int, left: int) -> str:
    """The reason to end the program; "" if there is none."""
    taken = _memory_of(pid)
    if taken <= most_bytes and left >= KEPT_FREE_BYTES:
        return ""
    return f"it took {show_bytes(taken)} of memory, and {show_bytes(left)} were left"


def _memory_of(pid: int) -> int:
    """Bytes that the process and all that it started hold in memory; 0 if it has ended."""
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        return sum(int(x.memory_info().rss) for x in [parent, *parent.children(recursive=True)])
    return 0


async def _relay(process: Process, tell_every_s: float) -> None:
    """Copy the program's log lines into our log."""
    assert process.stderr is not None
    told = float("-inf")
    while line := await process.stderr.readline():
        text = line.decode("utf-8", "replace").rstrip()
        level, words = read_line(text)
        if text.startswith(PROGRESS):  # nothing else is left out, such as the lines of a traceback
            if time.monotonic() - told < tell_every_s:
                continue
            told = time.monotonic()
        if words:
            log.log(level, "%s", words)
