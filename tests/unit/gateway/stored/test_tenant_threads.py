"""Tenants take turns on the threads of stored objects; work without a waiter is not done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engines.base import SessionRef
from gateway.stored.objects import Objects
from gateway.stored.stored import MAX_WAITING, NUM_THREADS, Stored
from gateway.stored.table import Steps, StoreFailed
from tests.stored_objects import entry, stored_in


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    made = stored_in(tmp_path / "stored.sqlite")
    yield made
    await made.close()


class Gate:
    """Work that waits to be let go on, and notes that it ran."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.opened = threading.Event()
        self.full = threading.Event()

    def work(self, name: str, waits: bool = True) -> Callable[[Objects], Steps[str]]:
        def noted(objects: Objects) -> Steps[str]:
            self.order.append(name)
            if len(self.order) == NUM_THREADS:
                self.full.set()
            assert not waits or self.opened.wait(20)
            yield 0
            return name

        return noted


async def test_tenants_take_turns_and_who_was_cancelled_has_none(stored: Stored) -> None:
    before, after = Gate(), Gate()
    held = [asyncio.create_task(stored.ask(x, before.work("held"), "")) for x in "xxyy"]
    await asyncio.to_thread(before.full.wait, 20)
    waiting = [
        asyncio.create_task(stored.ask(x[0], after.work(x), ""))
        for x in ("a1", "a2", "a3", "a4", "b", "c", "d")
    ]
    await asyncio.sleep(0)
    waiting[3].cancel()
    waiting[6].cancel()
    await asyncio.sleep(0.01)
    before.opened.set()
    await asyncio.to_thread(after.full.wait, 20)
    assert sorted(after.order) == ["a1", "a2", "b", "c"]  # they have all threads
    after.opened.set()
    assert await asyncio.gather(*held, *waiting[:3], *waiting[4:6]) == [
        *["held"] * 4,
        *("a1", "a2", "a3", "b", "c"),
    ]
    assert after.order[NUM_THREADS:] == ["a3"]


async def test_who_left_takes_a_place_until_the_work_has_ended(stored: Stored) -> None:
    """Or a tenant whose clients leave would have all threads."""
    gate = Gate()
    for _ in range(2):
        left = [asyncio.create_task(stored.ask("a", gate.work("a"), "")) for _ in range(2)]
        await asyncio.sleep(0.1)  # the second time none may begin
        async with asyncio.timeout(20):
            while len(gate.order) < 2:
                await asyncio.sleep(0.01)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    assert await asyncio.wait_for(stored.ask("b", gate.work("b", waits=False), ""), 5) == "b"
    assert gate.order == ["a", "a", "b"]
    gate.opened.set()


async def test_an_error_is_that_of_who_asked(stored: Stored) -> None:
    def fails(objects: Objects) -> Steps[None]:
        yield 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stored.ask("a", fails, None)
    assert await stored.ask("a", lambda objects: objects.forget("s"), 1) == 0


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
    assert await stored.ask("b", lambda objects: objects.put(*made), False)
    assert await stored.ask("b", lambda objects: objects.show("conversation", "1"), None)
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
    assert await stored.ask("b", lambda objects: objects.show("conversation", "1"), None) is None
    stop.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_place_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file in its place")
    stored = stored_in(tmp_path / "folder" / "stored.sqlite")
    with pytest.raises(StoreFailed):
        await stored.ask("a", lambda objects: objects.show("conversation", "1"), None)
    (tmp_path / "folder").unlink()
    put = await stored.ask("a", lambda objects: objects.put(*entry("1")), False)
    assert put
    await stored.close()


async def test_what_was_stored_while_its_session_was_deleted_goes_as_well(stored: Stored) -> None:
    """The deletion may have looked before the answer was there."""
    session, talk = SessionRef("a", "s", b""), entry("1")
    deleted = iter([False, True])

    def put(objects: Objects) -> Steps[str]:
        yield from objects.put(*talk)
        return ""

    assert await stored.keep("it", session, put, lambda: next(deleted)) == "gone"
    assert await stored.ask("a", lambda x: x.show(talk.kind, "1"), None) is None
    assert await stored.keep("it", session, put, lambda: True) == "gone"
    assert await stored.keep("it", session, put, lambda: False) == ""
    assert await stored.ask("a", lambda x: x.show(talk.kind, "1"), None) is not None
