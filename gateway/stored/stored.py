"""Gives the event loop what is stored: on a few threads, in steps that tenants take in turns."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from gateway.stored.objects import Objects
from gateway.stored.seal import KeyOf
from gateway.stored.shelf import Misshapen, Shelf, Steps, StoreFailed

T = TypeVar("T")
log = logging.getLogger("thermocline.gateway")
NUM_THREADS: Final = 4
THREADS_PER_TENANT: Final = 2
MAX_WAITING: Final = 256  # questions of one tenant
SLICE_S: Final = 0.01  # steps that hold nothing go on for so long without another's between them
CHORES_EVERY_S: Final = 600.0
_NO_TENANT: Final = ""  # the tenant of work that is done for none


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


class _Step(NamedTuple):
    """The bytes that the next step will hold, or the result."""

    nbytes: int
    result: list[object] | None


class Stored:
    """The stored objects of one gateway."""

    def __init__(
        self, open_shelf: Callable[[], Shelf] | None = None, key_of: KeyOf | None = None
    ) -> None:
        """
        Args:
            open_shelf: called on a thread at the first use; None: nothing is stored here.
            key_of: makes tenants' keys; needed where something is stored.
        """
        self._open = open_shelf
        self._key_of = key_of
        self._objects: Objects | None = None
        self._opening = threading.Lock()
        self._threads = FairThreads(NUM_THREADS, THREADS_PER_TENANT, MAX_WAITING)
        self._chores: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        """False if nothing is ever stored: then every lookup finds nothing."""
        return self._open is not None

    def start(self) -> None:
        """Begin the chores, which are done now and then in the background."""
        if self.enabled:
            self._chores = asyncio.create_task(self._do_chores(), name="stored-chores")

    async def ask(
        self,
        tenant: str,
        work: Callable[[Objects], Steps[T]],
        absent: T,
        hold: Callable[[int], None] = lambda nbytes: None,
    ) -> T:
        """Do ``work``, step by step; ``absent`` is the answer where nothing is stored.

        It is the answer, too, where an entry is found that this code has not written. When this is
        cancelled, the step that runs is the last one.

        Args:
            hold: hears how many bytes the next step will hold; an error it raises ends the work.

        Raises:
            StoreFailed: the shelf cannot be read or written now.
        """
        if self._open is None:
            return absent
        steps: list[Steps[T]] = []
        while True:
            try:
                step = await self._threads.do(tenant, partial(self._go_on, steps, work))
            except LineFull:
                raise StoreFailed("too many questions of this tenant wait", "busy") from None
            except Misshapen as error:
                log.warning("stored objects: %s", error)
                return absent
            if step.result is not None:
                result: T = step.result[0]  # type: ignore[assignment]
                return result
            if step.nbytes:
                hold(step.nbytes)

    async def keep(self, what: str, tenant: str, work: Callable[[Objects], Steps[str]]) -> str:
        """Store an answer by ``work``; return "", or a word for why it was not stored.

        Args:
            what: names the answer in the log.
        """
        try:
            why = await self.ask(tenant, work, "unavailable")
        except StoreFailed as error:
            log.warning("%s was not stored: %s", what, error)
            return error.trouble
        if why:
            log.warning("%s was not stored: %s", what, why)
        return why

    async def close(self) -> None:
        """Finish what runs, and let go of files and connections."""
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.wait([self._chores])
        await self._threads.close()
        if self._objects is not None:
            self._objects.shelf.close()
            self._objects = None

    def _go_on(self, steps: list[Steps[T]], work: Callable[[Objects], Steps[T]]) -> _Step:
        """Do some steps; ``steps`` has the work itself once it was begun."""
        if not steps:
            steps.append(work(self._opened()))
        until = time.perf_counter() + SLICE_S
        while True:
            try:
                nbytes = next(steps[0])
            except StopIteration as end:
                return _Step(0, [end.value])
            if nbytes or time.perf_counter() > until:
                return _Step(nbytes, None)

    def _opened(self) -> Objects:
        with self._opening:
            if self._objects is None:
                assert self._open is not None and self._key_of is not None
                self._objects = Objects(self._open(), self._key_of)
            return self._objects

    async def _do_chores(self) -> None:
        while True:
            try:
                await self._chores_once()
            except (StoreFailed, LineFull) as error:
                log.warning("stored objects are not looked after now: %s", error)
            except Exception:  # the edge of a task: a defect here must not end the others' work
                log.exception("looking after stored objects failed")
            await asyncio.sleep(CHORES_EVERY_S)

    async def _chores_once(self) -> None:
        """Do all chores; between two pieces as much time is left to others as one has taken."""
        steps: list[Steps[None]] = []
        while True:
            began = time.perf_counter()
            go_on = partial(self._go_on, steps, Objects.chores)
            if (await self._threads.do(_NO_TENANT, go_on)).result is not None:
                return
            await asyncio.sleep(time.perf_counter() - began)
