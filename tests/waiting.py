"""Waiting for what other threads, tasks and processes bring about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil


def until(
    holds: Callable[[], object], within_s: float = 150.0, what: object = "", every_s: float = 0.02
) -> None:
    """Look again and again, and fail with ``what`` was awaited if it does not hold in time."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(every_s)


async def eventually(holds: Callable[[], object], within_s: float = 150.0) -> None:
    """Do as ``until`` does, while other tasks run."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.005)


def is_gone(process: psutil.Process) -> bool:
    """Has it ended? The process that inherits an orphan need not have reaped it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
