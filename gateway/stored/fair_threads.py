"""A few threads that tenants take in turns: a tenant that asks for much waits for itself only."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class LineFull(Exception):
    """Too much of this tenant waits already."""


class _Job(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class FairThreads:
    """Runs pieces of work. Belongs to the event loop.

    Args:
        per_tenant: of one tenant's, so many run at once.
        max_waiting: of one tenant's, so many wait.
    """

    def __init__(self, num_threads: int, per_tenant: int, max_waiting: int) -> None:
        self._num_threads = num_threads
        self._per_tenant = per_tenant
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="stored")
        self._lines: dict[str, deque[_Job]] = {}  # whose turn is next stands first
        self._running: Counter[str] = Counter()
        self._ending: set[asyncio.Future[Any]] = set()

    async def do(self, tenant: str, work: Callable[[], T]) -> T:
        """Run ``work`` when it is its tenant's turn; what is cancelled before is not run.

        Raises:
            LineFull: too much of the tenant waits.
        """
        line = self._lines.setdefault(tenant, deque())
        if len(line) >= self._max_waiting:
            raise LineFull
        job = _Job(work, asyncio.get_running_loop().create_future())
        line.append(job)
        self._start()
        done: T = await job.done
        return done

    async def close(self) -> None:
        """Wait for the work that runs; nothing else is begun."""
        self._lines.clear()
        if self._ending:
            await asyncio.wait(self._ending)
        await asyncio.to_thread(self._threads.shutdown)

    def _start(self) -> None:
        while self._running.total() < self._num_threads and (tenant := self._next()) is not None:
            line = self._lines.pop(tenant)
            job = line.popleft()
            if line:
                self._lines[tenant] = line  # after the others
            if job.done.cancelled():
                continue
            self._running[tenant] += 1
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, job.work)
            self._ending.add(running)
            running.add_done_callback(partial(self._ended, tenant, job.done))

    def _next(self) -> str | None:
        free = (x for x, line in self._lines.items() if line)
        return next((x for x in free if self._running[x] < self._per_tenant), None)

    def _ended(self, tenant: str, done: asyncio.Future[Any], ran: asyncio.Future[Any]) -> None:
        self._ending.discard(ran)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if not done.done():
            if (error := ran.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(ran.result())
        else:
            ran.exception()  # looked at, though its caller does not wait for it any more
        self._start()
