"""Memory, processor time and gauges of running servers, from the system and from their metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.stacks.product_stack import MIB, Server


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    return [process, *process.children(recursive=True)]


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the processor time used so far, in seconds, with that of ended children."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):  # it ended meanwhile
            total += sum(process.cpu_times()[:4])
    return total


def rss_mib(*processes: psutil.Process) -> float:
    """Return the processes' own memory in MiB.

    On Linux that is anonymous memory: the disk tier's mapped file is page cache, and not counted.
    """
    total = 0.0
    for process in processes:
        with suppress(psutil.Error, OSError):  # it ended meanwhile
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else []
            own = [int(x.split()[1]) / 1024 for x in lines if x.startswith("RssAnon:")]
            total += own[0] if own else process.memory_info().rss / MIB
    return total


def gauges(server: Server, *names: str) -> float:
    """Return the sum of a server's metrics whose lines begin with one of ``names``."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith(names))


class Peak:
    """Records the largest value of each measure that ``look`` returned while the block ran."""

    def __init__(self, look: Callable[[], dict[str, float]], every_s: float = 0.25) -> None:
        self.most: dict[str, float] = {}
        self._look, self._every_s = look, every_s

    async def _watch(self) -> None:
        while True:
            for name, value in (await asyncio.to_thread(self._look)).items():
                self.most[name] = max(self.most.get(name, 0.0), value)
            await asyncio.sleep(self._every_s)

    async def __aenter__(self) -> Peak:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
