"""Gives the event loop what is stored: on a few threads, in steps that tenants take in turns."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from gateway.stored.objects import Objects
from gateway.stored.table import Misshapen, Steps, StoreFailed

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


class TenantThreads:
    """Runs pieces of work on threads that tenants take in turns. Belongs to the event loop.

    The threads take work in order; of one tenant's at most ``per_tenant`` pieces stand in their
    line or run, so another's wait for few.

    Args:
        max_waiting: of one tenant's, so many wait besides.
    """

    def __init__(self, num_threads: int, per_tenant: int, max_waiting: int) -> None:
        self._per_tenant = per_tenant
        self._most = max_waiting + per_tenant
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="stored")
        self._asked: Counter[str] = Counter()
        self._places: dict[str, asyncio.Semaphore] = {}

    async def do(self, tenant: str, work: Callable[[], T]) -> T:
        """Run ``work`` when it is its tenant's turn; what is cancelled before is not run.

        Raises:
            LineFull: too much of the tenant waits.
        """
        if self._asked[tenant] >= self._most:
            raise LineFull
        place = self._places.setdefault(tenant, asyncio.Semaphore(self._per_tenant))
        self._asked[tenant] += 1
        try:
            await place.acquire()
        except asyncio.CancelledError:
            self._leave(tenant)
            raise
        loop = asyncio.get_running_loop()
        job = self._threads.submit(work)

        def ended(job: Future[T]) -> None:  # on any thread, even if the caller waits no more
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, tenant, place)

        job.add_done_callback(ended)
        try:
            return await asyncio.shield(asyncio.wrap_future(job))
        except asyncio.CancelledError:
            job.cancel()
            raise

    async def close(self) -> None:
        """Wait for the work that runs; nothing else is begun."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _end(self, tenant: str, place: asyncio.Semaphore) -> None:
        place.release()
        self._leave(tenant)

    def _leave(self, tenant: str) -> None:
        self._asked[tenant] -= 1
        if not self._asked[tenant]:
            del self._asked[tenant], self._places[tenant]


class _Step(NamedTuple):
    """The bytes that the next step will hold, or the result."""

    nbytes: int
    result: list[object] | None


class Stored:
    """The stored objects of one gateway."""

    def __init__(self, opened: Callable[[], Objects] | None = None) -> None:
        """``opened`` is called on a thread at the first use; None: nothing is stored here."""
        self._open = opened
        self._objects: Objects | None = None
        self._opening = threading.Lock()
        self._threads = TenantThreads(NUM_THREADS, THREADS_PER_TENANT, MAX_WAITING)
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

        It is the answer, too, where something is found that this code has not written. When this is
        cancelled, the step that runs is the last one.

        Args:
            hold: called with the bytes that the next step will hold; what it raises ends the work.

        Raises:
            StoreFailed: the table cannot be read or written now.
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
            self._objects.table.close()
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
                assert self._open is not None
                self._objects = self._open()
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
