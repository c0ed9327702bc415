"""Lines of stored responses: followed to their beginning, within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gateway.openai.responses import history
from gateway.stored.objects import Objects
from gateway.stored.rows import Head
from gateway.stored.table import StoredLimits, Top
from tests.clock import Clock
from tests.stored_objects import anew, done, entry, items, put, read_all, stored_in
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer
from tests.unit.gateway.stored.test_tables import BOTH, opened


@pytest.fixture(params=BOTH)
def objects(request: pytest.FixtureRequest) -> Iterator[Objects]:
    made = opened(request, StoredLimits(1 << 28, 1000.0), Clock())
    yield made
    made.table.close()


def put_line(objects: Objects, num: int) -> None:
    """Store responses r0, r1, ..., each of which goes on from the one before it."""
    for i in range(num):
        before = f"r{i - 1}" if i else None
        answer = [{"id": f"out-{i}"}]
        made = entry(f"r{i}", kind="response", previous_response_id=before, output=answer)
        put(objects, made, items(f"in-{i}"))


def recalled(objects: Objects, id: str) -> list[str] | None:
    line = done(objects.line(id, lambda head: None))
    if line is None:
        return None
    turns = [done(objects.read_all(x)) for x in reversed(line)]
    assert None not in turns
    return [item.id for turn in turns for item in turn or ()]


def ids(num: int) -> list[str]:
    return [x for i in range(num) for x in (f"in-{i}", f"out-{i}")]


def test_a_line_that_was_found_before_is_found_in_few_questions(objects, monkeypatch):
    """A Redis may be milliseconds away; three hundred questions to it took seconds."""
    put_line(objects, 70)
    assert recalled(objects, "r68") == ids(69)
    asked, find_all = list[int](), objects.table.find_all

    def counted(tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        asked.append(len(names))
        return find_all(tenant, names, uses=uses)

    monkeypatch.setattr(objects.table, "find_all", counted)
    assert recalled(objects, "r69") == ids(70)
    assert asked == [1, 32, 32, 5]


def test_a_line_that_was_turned_elsewhere_is_followed_there(objects: Objects) -> None:
    put_line(objects, 40)
    assert recalled(objects, "r39") == ids(40)
    anew = entry("r30", kind="response", previous_response_id="r4", output=[{"id": "out-30"}])
    put(objects, anew, items("in-30"))
    assert recalled(objects, "r39") == [*ids(5), *ids(40)[60:]]
    assert recalled(objects, "r39") == [*ids(5), *ids(40)[60:]]


def test_what_another_server_deleted_ends_the_line(objects: Objects) -> None:
    put_line(objects, 5)
    assert recalled(objects, "r4") == ids(5)
    other = anew(objects)
    assert done(other.delete("response", "r1"))
    assert recalled(objects, "r4") is None
    assert recalled(objects, "r0") == ids(1)
    assert done(anew(objects, "b").line("r0", lambda head: None)) is None


def test_what_was_put_anew_is_read_anew(objects: Objects) -> None:
    put(objects, entry("1"), items("i", text="old"))
    assert read_all(objects, "1") == ["i"]
    put(objects, entry("1"), items("i", text="new"))
    object = objects.find("conversation", "1")
    assert object is not None
    assert done(objects.read_all(object)) == items("i", text="new")


def test_a_conversation_is_read_as_two_servers_have_changed_it(objects: Objects) -> None:
    put(objects, entry("1"), items(*"abc"))
    assert read_all(objects, "1") == [*"abc"]
    other = anew(objects)
    assert done(other.remove_item("conversation", "1", "b"))
    assert read_all(objects, "1") == [*"ac"]
    assert done(other.remove_item("conversation", "1", "c"))
    assert done(objects.append("conversation", "1", items("e")))
    assert read_all(other, "1") == [*"ae"]


def test_a_line_ends_where_there_is_no_room(objects: Objects) -> None:
    put_line(objects, 20)
    taken: list[Head] = []

    def take(head: Head) -> None:
        taken.append(head)
        if len(taken) == 3:
            raise ValueError

    with pytest.raises(ValueError):
        done(objects.line("r19", take))
    assert len(taken) == 3


async def test_the_number_of_turns_that_are_walked_is_bounded(tmp_path, monkeypatch):
    """Turns that say nothing count, too: else a line of them would have no end."""
    monkeypatch.setattr(history, "MAX_ITEMS", 5)
    stored = stored_in(tmp_path / "stored.sqlite")
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
