"""Tenants take turns on the threads of stored objects; work without a waiter is not done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from gateway.stored.objects import Objects
from gateway.stored.stored import MAX_WAITING, NUM_THREADS, Stored, TenantThreads
from gateway.stored.table import Steps, StoreFailed
from tests.stored_objects import entry, stored_in


@pytest.fixture
async def threads() -> AsyncIterator[TenantThreads]:
    made = TenantThreads(num_threads=2, per_tenant=1, max_waiting=100)
    yield made
    await made.close()


class Gate:
    """Work that waits to be let go on, and notes that it ran."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._open = threading.Event()
        self.begun = threading.Event()

    def work(self, name: str) -> str:
        self.order.append(name)
        self.begun.set()
        assert self._open.wait(20)
        return name

    def open(self) -> None:
        self._open.set()


async def test_one_tenant_leaves_a_thread_for_others(threads: TenantThreads) -> None:
    gate = Gate()
    slow = [asyncio.create_task(threads.do("a", partial(gate.work, f"a{i}"))) for i in range(9)]
    await asyncio.to_thread(gate.begun.wait, 20)
    assert await asyncio.wait_for(threads.do("b", lambda: "b"), 20) == "b"
    assert gate.order == ["a0"]
    gate.open()
    assert await asyncio.gather(*slow) == [f"a{i}" for i in range(9)]


async def test_tenants_take_turns(threads: TenantThreads) -> None:
    gate, order = Gate(), []

    def note(name: str) -> None:
        order.append(name)

    held = [asyncio.create_task(threads.do(x, partial(gate.work, x))) for x in ("x", "y")]
    await asyncio.to_thread(gate.begun.wait, 20)
    waiting = [
        asyncio.create_task(threads.do(tenant, partial(note, tenant)))
        for tenant in ("a", "a", "a", "a", "b", "c")
    ]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(*held, *waiting)
    assert {order.index("b"), order.index("c")} <= {1, 2, 3}
    assert order.count("a") == 4


async def test_work_that_is_cancelled_before_its_turn_is_not_done(threads: TenantThreads) -> None:
    gate = Gate()
    held = asyncio.create_task(threads.do("a", partial(gate.work, "first")))
    await asyncio.to_thread(gate.begun.wait, 20)
    waiting = asyncio.create_task(threads.do("a", partial(gate.work, "second")))
    await asyncio.sleep(0)
    waiting.cancel()
    last = asyncio.create_task(threads.do("a", partial(gate.work, "third")))
    await asyncio.sleep(0)
    gate.open()
    assert await held == "first" and await last == "third"
    assert gate.order == ["first", "third"]


async def test_an_error_is_that_of_who_asked(threads: TenantThreads) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await threads.do("a", fails)
    assert await threads.do("a", lambda: 1) == 1


# ---- in steps


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    made = stored_in(tmp_path / "stored.sqlite")
    yield made
    await made.close()


def endless(stop: threading.Event, begun: threading.Event) -> Callable[[Objects], Steps[int]]:
    def work(objects: Objects) -> Steps[int]:
        number = 0
        while not stop.is_set():
            begun.set()
            number += 1
            yield 0
        return number

    return work


async def test_work_without_end_keeps_no_other_tenant_waiting(stored: Stored) -> None:
    stop, begun = threading.Event(), threading.Event()
    asks = [stored.ask("a", endless(stop, begun), 0) for _ in range(3 * NUM_THREADS)]
    tasks = [asyncio.create_task(x) for x in asks]
    await asyncio.to_thread(begun.wait, 20)
    made = entry("1")
    assert await stored.ask("b", lambda objects: objects.put("b", made, []), False)
    assert await stored.ask("b", lambda objects: objects.show("b", "conversation", "1"), None)
    assert not any(x.done() for x in tasks)
    stop.set()
    await asyncio.gather(*tasks)


async def test_who_is_cancelled_ends_at_the_next_step(stored: Stored) -> None:
    stop, begun = threading.Event(), threading.Event()
    count = 0

    def counted(objects: Objects) -> Steps[int]:
        nonlocal count
        for _ in endless(stop, begun)(objects):
            count += 1
            yield 0
        return 0

    asked = asyncio.create_task(stored.ask("a", counted, 0))
    await asyncio.to_thread(begun.wait, 20)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    before = -1
    async with asyncio.timeout(20):  # the slice that runs may go on to its end
        while count != before:
            before = count
            await asyncio.sleep(0.1)
    assert not stop.is_set()


async def test_who_may_not_hold_so_much_ends(stored: Stored) -> None:
    seen: list[int] = []

    def work(objects: Objects) -> Steps[str]:
        yield 5
        yield 0
        seen.append(1)
        yield 7
        seen.append(2)
        return "done"

    held: list[int] = []
    assert await stored.ask("a", work, "", held.append) == "done"
    assert held == [5, 7]

    def no(nbytes: int) -> None:
        if nbytes == 7:
            raise MemoryError

    with pytest.raises(MemoryError):
        await stored.ask("a", work, "", no)
    assert seen == [1, 2, 1]


async def test_too_many_questions_of_one_tenant_are_refused(stored: Stored) -> None:
    stop, begun = threading.Event(), threading.Event()
    work = endless(stop, begun)
    tasks = [asyncio.create_task(stored.ask("a", work, 0)) for _ in range(MAX_WAITING + 50)]
    done, _ = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_EXCEPTION)
    assert isinstance(done.pop().exception(), StoreFailed)
    assert (
        await stored.ask("b", lambda objects: objects.show("b", "conversation", "1"), None) is None
    )
    stop.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_place_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file in its place")
    stored = stored_in(tmp_path / "folder" / "stored.sqlite")
    with pytest.raises(StoreFailed):
        await stored.ask("a", lambda objects: objects.show("a", "conversation", "1"), None)
    (tmp_path / "folder").unlink()
    put = await stored.ask("a", lambda objects: objects.put("a", entry("1"), []), False)
    assert put
    await stored.close()
