"""Runs operations on stored objects for the event loop: on a few threads, in steps, fairly."""

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
from typing import Final, TypeVar

from engines.base import SessionRef
from gateway.stored.objects import Objects, ObjectStore
from gateway.stored.table import Misshapen, Steps, StoreFailed

T = TypeVar("T")
log = logging.getLogger("thermocline.gateway")
NUM_THREADS: Final = 4
THREADS_PER_TENANT: Final = 2
MAX_WAITING: Final = 256  # operations of one tenant
SLICE_S: Final = 0.01  # for which steps without bytes run before another tenant's turn
CHORES_EVERY_S: Final = 600.0
DELETED: Final = "gone"  # reason for not storing an answer: its session or conversation is deleted
_NO_TENANT: Final = ""  # the tenant under which chores run


class Stored:
    """The stored objects of one gateway. Runs on the event loop."""

    def __init__(self, opened: Callable[[], ObjectStore] | None = None) -> None:
        """
        Args:
            opened: opens the store; called on a thread at the first use. None: store nothing.
        """
        self._open = opened
        self._store: ObjectStore | None = None
        self._opening = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="stored")
        self._asked: Counter[str] = Counter()
        self._places: dict[str, asyncio.Semaphore] = {}
        self._chores: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        """False if this gateway stores nothing; then nothing is ever found."""
        return self._open is not None

    def start(self) -> None:
        """Start the background task that runs the chores every ``CHORES_EVERY_S``."""
        if self.enabled:
            self._chores = asyncio.create_task(self._do_chores(), name="stored-chores")

    async def ask(
        self,
        tenant: str,
        work: Callable[[Objects], Steps[T]],
        absent: T,
        hold: Callable[[int], None] = lambda nbytes: None,
    ) -> T:
        """Run ``work`` on a tenant's objects, step by step, and return its result.

        Tenants' steps take turns. If this is cancelled, the present step is the last one.

        Args:
            absent: returned if this gateway stores nothing, or the table has foreign data.
            hold: called with the bytes that the next step will hold; may raise to end the work.

        Raises:
            StoreFailed: the table cannot be read or written now.
        """
        steps: list[Steps[T]] = []
        while self.enabled:
            try:
                go_on = partial(self._go_on, tenant, work, steps)
                nbytes, result = await self._in_turn(tenant, go_on)
            except Misshapen as error:
                log.warning("stored objects: %s", error)
                break
            if result is not None:
                return result[0]
            if nbytes:
                hold(nbytes)
        return absent

    async def keep(
        self,
        what: str,
        session: SessionRef,
        work: Callable[[Objects], Steps[str]],
        is_deleted: Callable[[], bool],
    ) -> str:
        """Store an answer by ``work``; return "", or the reason in a word why it was not stored.

        Args:
            what: the answer's name in the log.
            is_deleted: returns whether its session was deleted since its turn began.
        """
        why = said = DELETED
        try:
            if not is_deleted():
                why = said = await self.ask(session.tenant, work, "unavailable")
            if not why and is_deleted():  # meanwhile, perhaps before this object was stored
                await self.ask(session.tenant, lambda objects: objects.forget(session.id), 0)
                why = said = DELETED
        except StoreFailed as error:
            why, said = error.trouble, str(error)
        if why:
            log.warning("%s was not stored: %s", what, said)
        return why

    async def close(self) -> None:
        """Finish the running steps, and close files and connections."""
        if self._chores is not None:
            self._chores.cancel()
            await asyncio.wait([self._chores])
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        if self._store is not None:
            self._store.table.close()
            self._store = None

    async def _in_turn(self, tenant: str, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread when it is the tenant's turn, unless cancelled before.

        The threads take work in order, and a tenant has at most ``THREADS_PER_TENANT`` places in
        their queue. A place is free when its work has ended, even if the caller was cancelled.
        """
        if self._asked[tenant] >= MAX_WAITING + THREADS_PER_TENANT:
            raise StoreFailed("too many operations of this tenant wait", "busy")
        place = self._places.setdefault(tenant, asyncio.Semaphore(THREADS_PER_TENANT))
        self._asked[tenant] += 1
        try:
            await place.acquire()
        except asyncio.CancelledError:
            self._leave(tenant)
            raise
        loop = asyncio.get_running_loop()
        job = self._threads.submit(work)

        def ended(job: Future[T]) -> None:  # on any thread
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._leave, tenant, place)

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def _leave(self, tenant: str, place: asyncio.Semaphore | None = None) -> None:
        if place is not None:
            place.release()
        self._asked[tenant] -= 1
        if not self._asked[tenant]:
            del self._asked[tenant], self._places[tenant]

    def _go_on(
        self, tenant: str, work: Callable[[Objects], Steps[T]], steps: list[Steps[T]]
    ) -> tuple[int, list[T] | None]:
        """Run some steps of the work; begin it if ``steps`` is empty, and put it there.

        Returns the bytes that the next step will hold, and the result, in a list, after the last.
        """
        if not steps:
            with self._opening:
                if self._store is None:
                    assert self._open is not None
                    self._store = self._open()
            steps.append(work(self._store.of(tenant)))
        until = time.perf_counter() + SLICE_S
        while True:
            try:
                nbytes = next(steps[0])
            except StopIteration as end:
                return 0, [end.value]
            if nbytes or time.perf_counter() > until:
                return nbytes, None

    async def _do_chores(self) -> None:
        while True:
            try:
                await self._chores_once()
            except StoreFailed as error:
                log.warning("chores of stored objects cannot be done now: %s", error)
            except Exception:  # the edge of a task: the chores are tried again later
                log.exception("chores of stored objects failed")
            await asyncio.sleep(CHORES_EVERY_S)

    async def _chores_once(self) -> None:
        """Run all chores; after each piece, sleep for as long as it took."""
        steps: list[Steps[None]] = []
        go_on = partial(self._go_on, _NO_TENANT, lambda objects: objects.table.chores(), steps)
        while True:
            began = time.perf_counter()
            if (await self._in_turn(_NO_TENANT, go_on))[1] is not None:
                return
            await asyncio.sleep(time.perf_counter() - began)
