"""Lines of stored responses: found in a few questions, read once, and never believed unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.openai.responses import history
from gateway.stored.objects import Objects
from gateway.stored.recall import REMEMBERED_S, USED_EVERY_S, Memory, ReadItems, Remembered
from gateway.stored.seal import Head
from gateway.stored.shelf import SLICE_ITEMS, Limits, Shelf
from gateway.stored.stored import Stored
from tests.clock import Clock
from tests.stored_objects import KEY_OF, done, entry, items, put, read_all, shelf_in
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer
from tests.unit.gateway.stored.test_shelves import BOTH, opened


class CountingShelf:
    """A shelf that counts the questions it is asked."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._shelf, name)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=BOTH)
def shelf(request: pytest.FixtureRequest, clock: Clock) -> Iterator[CountingShelf]:
    made = opened(request, Limits(1 << 28, 1000.0), clock)
    yield CountingShelf(made)
    made.close()


@pytest.fixture
def objects(shelf: CountingShelf) -> Objects:
    return Objects(shelf, KEY_OF)


def put_line(objects: Objects, num: int) -> None:
    """Store responses r0, r1, ..., each of which goes on from the one before it."""
    for i in range(num):
        before = f"r{i - 1}" if i else None
        answer = [{"id": f"out-{i}"}]
        made = entry(f"r{i}", kind="response", previous_response_id=before, output=answer)
        put(objects, made, items(f"in-{i}"))


def recalled(objects: Objects, id: str) -> list[str] | None:
    line = done(objects.line("a", "response", id, lambda head: None))
    if line is None:
        return None
    turns = [done(objects.read_all("a", x)) for x in reversed(line)]
    assert None not in turns
    return [item.id for turn in turns for item in turn or ()]


def ids(num: int) -> list[str]:
    return [x for i in range(num) for x in (f"in-{i}", f"out-{i}")]


def test_of_a_line_only_what_is_new_is_read(objects: Objects, shelf: CountingShelf) -> None:
    put_line(objects, 40)
    assert recalled(objects, "r38") == ids(39)
    shelf.asked.clear()
    assert recalled(objects, "r39") == ids(40)
    assert (shelf.asked["parts"], shelf.asked["find"]) == (1, 2)
    shelf.asked.clear()
    assert recalled(objects, "r39") == ids(40)
    assert (shelf.asked["parts"], shelf.asked["find"]) == (0, 1)


def test_a_line_longer_than_a_slice(shelf: CountingShelf) -> None:
    num = SLICE_ITEMS + 20
    put_line(Objects(shelf, KEY_OF), num)
    server = Objects(shelf, KEY_OF)
    for _ in range(2):
        shelf.asked.clear()
        assert recalled(server, f"r{num - 1}") == ids(num)
    assert (shelf.asked["parts"], shelf.asked["find"]) == (0, 2)


def test_what_another_server_deleted_ends_the_line(objects: Objects, shelf: CountingShelf) -> None:
    put_line(objects, 5)
    assert recalled(objects, "r4") == ids(5)
    other = Objects(shelf, KEY_OF)
    assert done(other.delete("a", "response", "r1"))
    assert recalled(objects, "r4") is None
    assert recalled(objects, "r0") == ids(1)
    assert done(objects.line("b", "response", "r0", lambda head: None)) is None


def test_what_was_put_anew_is_read_anew(objects: Objects) -> None:
    put(objects, entry("1"), items("i", text="old"))
    assert read_all(objects, "1") == ["i"]
    put(objects, entry("1"), items("i", text="new"))
    object = done(objects.find("a", "conversation", "1"))
    assert object is not None
    assert done(objects.read_all("a", object)) == items("i", text="new")


def test_of_a_conversation_only_what_was_added_is_read(
    objects: Objects, shelf: CountingShelf
) -> None:
    put(objects, entry("1"), items(*"abc"))
    assert read_all(objects, "1") == [*"abc"]
    assert done(objects.append("a", "conversation", "1", items("d")))
    shelf.asked.clear()
    assert read_all(objects, "1") == [*"abcd"]
    assert shelf.asked["parts"] == 1
    other = Objects(shelf, KEY_OF)
    assert done(other.remove_item("a", "conversation", "1", "b"))
    assert read_all(objects, "1") == [*"acd"]
    assert done(other.remove_item("a", "conversation", "1", "d"))
    assert done(other.append("a", "conversation", "1", items("e")))
    assert read_all(objects, "1") == [*"ace"]


def test_all_of_a_line_is_used(tmp_path: Path) -> None:
    clock = Clock()
    shelf = shelf_in(tmp_path / "stored.sqlite", Limits(1 << 28, 1000.0), clock)
    objects = Objects(shelf, KEY_OF)
    put_line(objects, 3)
    put(objects, entry("aside"))
    clock.now += 900.0
    assert recalled(objects, "r2") == ids(3)
    clock.now += 200.0
    put(objects, entry("new"))  # then what is too old goes
    assert recalled(objects, "r2") == ids(3)
    assert read_all(objects, "aside") is None
    shelf.close()


def test_a_line_ends_where_there_is_no_room(objects: Objects, shelf: CountingShelf) -> None:
    put_line(objects, 20)
    taken: list[Head] = []

    def take(head: Head) -> None:
        taken.append(head)
        if len(taken) == 3:
            raise ValueError

    shelf.asked.clear()
    with pytest.raises(ValueError):
        done(objects.line("a", "response", "r19", take))
    assert shelf.asked["find"] == 3 and not shelf.asked["parts"]


def remembered(nbytes: int, used_s: float = 0.0) -> Remembered:
    return Remembered(b"", Head("s"), used_s, ReadItems(nbytes=nbytes))


def test_memory_is_bounded_and_who_has_most_forgets_first() -> None:
    memory = Memory(10_000, Clock())
    memory.put("small", "response", "s", remembered(500))
    for i in range(100):
        memory.put("large", "response", str(i), remembered(500))
        assert memory.nbytes <= 10_000
    assert memory.get("small", "response", "s") is not None
    assert memory.get("large", "response", "0") is None
    assert memory.get("large", "response", "99") is not None
    memory.put("large", "response", "100", remembered(20_000))
    assert memory.nbytes <= 10_000
    for i in range(101):
        memory.drop("large", "response", str(i))
    memory.drop("small", "response", "s")
    assert memory.nbytes == 0


def test_memory_forgets_what_is_not_used() -> None:
    clock = Clock()
    memory = Memory(10_000, clock)
    memory.put("a", "response", "old", remembered(1, clock()))
    clock.now += REMEMBERED_S - USED_EVERY_S
    memory.put("a", "response", "new", remembered(1, clock()))
    clock.now += 2 * USED_EVERY_S
    memory.drop_old()
    assert memory.get("a", "response", "old") is None
    assert memory.get("a", "response", "new") is not None


async def test_the_number_of_turns_that_are_walked_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that say nothing count, too: else a line of them would have no end."""
    monkeypatch.setattr(history, "MAX_ITEMS", 5)
    shelf = shelf_in(tmp_path / "stored.sqlite", Limits(1 << 20, 1000.0))
    stored = Stored(lambda: shelf, KEY_OF)
    app = App(RecordingEngine(chat_answer("")), stored=stored)
    before, statuses = None, []
    for _ in range(7):
        asked: dict[str, Any] = {"model": MODEL, "input": [], "previous_response_id": before}
        reply = await app.post("/v1/responses", asked)
        statuses.append(reply.status)
        before = reply.json.get("id", before)
    assert statuses == [200] * 6 + [400]
    assert reply.error["code"] == "conversation_too_large"
    await stored.close()
