"""Files of earlier releases: brought over once, sealed, and then never believed again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gateway.stored.objects import Objects, ObjectStore, Query
from gateway.stored.older import bring_over
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.table import StoredLimits, StoreFailed
from tests.old_stored import OldFile, seal_old_file
from tests.stored_objects import (
    KEY_OF,
    anew,
    content_of,
    done,
    entry,
    ids_of,
    items,
    mark_of,
    objects_in,
    put,
    read_all,
    rows_of,
    shown,
    stored_in,
)
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer

LIMITS = StoredLimits(1 << 26, 1e6)
SAID = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
ASKED = {"id": "msg_0", "type": "message", "role": "user"}
FIRST = {
    "id": "resp_1",
    "object": "response",
    "output": [SAID],
    "previous_response_id": None,
    "conversation": None,
    "metadata": {},
}
SECOND = {**FIRST, "id": "resp_2", "output": [{**SAID, "id": "msg_3"}]}
TALK = {"id": "conv_1", "object": "conversation", "metadata": {"a": "b"}}
CHAT = {"id": "chat_1", "object": "chat.completion", "model": "m", "metadata": {"a": "b"}}


SAID |= {"content": [{"type": "output_text", "text": "secret answer"}]}  # type: ignore[dict-item]
ASKED |= {"content": [{"type": "input_text", "text": "secret question"}]}  # type: ignore[dict-item]
SECOND |= {"previous_response_id": "resp_1"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "stored.sqlite"
    old = OldFile(path)
    old.put("a", "response", FIRST, [ASKED])
    old.put("a", "response", SECOND, [{**ASKED, "id": "msg_2"}])
    old.put("a", "conversation", TALK, [ASKED, SAID], session="conv_1")
    old.put("a", "completion", CHAT, [{"id": "chat_1-0", "role": "user", "content": "secret"}])
    old.put("b", "response", FIRST, [ASKED], session="of b")
    old.close()
    return path


@pytest.fixture(params=["plain", "sealed"])
def any_path(request: pytest.FixtureRequest, path: Path) -> Path:
    """A file of one of the two older releases."""
    if request.param == "sealed":
        seal_old_file(path, KEY_OF)
        mark_of(path).touch()
    return path


def reopened(path: Path) -> Objects:
    return objects_in(path, LIMITS, lambda: 2e9)


def test_all_of_it_is_there_as_it_was(any_path: Path) -> None:
    objects = reopened(any_path)
    assert b"secret" not in content_of(any_path.parent)
    assert shown(objects, "resp_1", "response") == FIRST
    assert read_all(objects, "resp_1", "response") == ["msg_0", "msg_1"]
    assert read_all(objects, "resp_2", "response") == ["msg_2", "msg_3"]
    line = done(objects.line("resp_2", lambda head: None))
    assert [x.id for x in line or ()] == ["resp_2", "resp_1"]
    assert shown(objects, "conv_1") == TALK
    assert ids_of(objects, "conv_1") == read_all(objects, "conv_1") == ["msg_0", "msg_1"]
    assert json.loads(done(objects.find_item("msg_2")) or b"")["id"] == "msg_2"
    found = done(objects.listed("completion", {"metadata": {"a": "b"}, "model": "m"}, Query(9)))
    assert [json.loads(x.body) for x in found.rows] == [CHAT]
    assert objects.latest("response", "s") == "resp_2"
    assert done(objects.append("conversation", "conv_1", items("new")))
    assert done(objects.remove_item("conversation", "conv_1", "msg_0"))
    assert read_all(objects, "conv_1") == ["msg_1", "new"]
    other = anew(objects, "b")
    assert shown(other, "resp_1", "response") == FIRST
    assert shown(other, "resp_2", "response") is None
    assert done(objects.delete("conversation", "conv_1"))
    assert done(objects.forget("s")) == 3
    assert done(other.forget("of b")) == 1
    assert rows_of(any_path, "SELECT sum(nbytes) FROM totals") == [(0,)]
    objects.table.close()


class Killed(BaseException):
    pass


def bring_some(path: Path, end: BaseException) -> None:
    """Bring over a part, until ``end``."""
    table = SqliteTable(path, LIMITS, lambda: 2e9)
    write, left = table.write, iter(range(3))

    def some(*args: object) -> bool:
        if next(left, None) is None:
            raise end
        return write(*args)  # type: ignore[arg-type]

    table.write = some  # type: ignore[method-assign, assignment]
    with pytest.raises(type(end)):
        bring_over(table, KEY_OF, mark_of(path))
    assert not mark_of(path).exists()
    table.close()


@pytest.mark.parametrize("end", [Killed(), StoreFailed("the disk is full", "full")])
def test_after_a_kill_or_a_failure_half_way_it_goes_on(path: Path, end: BaseException) -> None:
    """The start that failed serves nothing."""
    bring_some(path, end)
    again = reopened(path)
    for id, kind in (("resp_1", "response"), ("conv_1", "conversation"), ("chat_1", "completion")):
        assert shown(again, id, kind) is not None  # type: ignore[arg-type]
    assert rows_of(path, "SELECT count(*) FROM objects") == [(5,)]
    assert mark_of(path).exists()
    again.table.close()


def test_sealed_objects_that_were_changed_are_not_brought_over(path: Path) -> None:
    seal_old_file(path, KEY_OF)
    changed = json.dumps(FIRST).encode()
    rows_of(path, "UPDATE entries SET body = ? WHERE id = 'resp_1'", changed)
    rows_of(
        path,
        "DELETE FROM items WHERE id = 'msg_1' AND owner IN (SELECT seq FROM entries"
        " WHERE id = 'conv_1')",
    )
    rows_of(
        path,
        "UPDATE heads SET head = x'01' WHERE owner IN (SELECT seq FROM entries"
        " WHERE id = 'chat_1')",
    )
    objects = reopened(path)
    assert shown(objects, "resp_1", "response") is shown(objects, "conv_1") is None
    assert shown(objects, "chat_1", "completion") is None
    assert shown(objects, "resp_2", "response") == SECOND
    objects.table.close()


@pytest.mark.parametrize("replaced", [False, True], ids=["changed", "replaced"])
def test_once_all_is_sealed_a_file_that_looks_old_is_not_believed(path, replaced):
    reopened(path).table.close()
    if replaced:
        for name in path.parent.glob("stored.sqlite*"):
            name.unlink()
    old = OldFile(path)
    planted = {**FIRST, "output": [{**SAID, "id": "planted", "role": "system"}]}
    old.put("a", "response", planted)
    old.close()
    again = reopened(path)
    assert (shown(again, "resp_1", "response") is None) == replaced
    assert shown(again, "resp_1", "response") != planted
    assert done(again.find_item("planted")) is None
    put(again, entry("new"), items("i"))
    assert read_all(again, "new") == ["i"]
    again.table.close()


def test_a_mark_that_cannot_be_made_is_said_and_tried_again(path, tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    mark = in_the_way / "stored.sealed"
    table = SqliteTable(path, LIMITS, lambda: 2e9)
    bring_over(table, KEY_OF, mark)
    assert "is still trusted" in caplog.text
    assert shown(ObjectStore(table, KEY_OF).of("a"), "resp_1", "response") == FIRST
    in_the_way.unlink()
    bring_over(table, KEY_OF, mark)
    assert mark.exists()
    table.close()


def test_a_new_file_is_marked_so_that_it_outlives_a_power_cut(tmp_path: Path, monkeypatch) -> None:
    written, fsync = list[int](), os.fsync

    def noted(descriptor: int) -> None:
        written.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = tmp_path / "new" / "stored.sqlite"
    objects_in(path, LIMITS).table.close()
    assert written == [x.stat().st_ino for x in (mark_of(path), tmp_path)]


def test_a_file_of_the_release_that_marked_it_inside_is_sealed(path: Path) -> None:
    rows_of(path, "PRAGMA user_version = 2")
    objects = reopened(path)
    assert shown(objects, "resp_1", "response") is None
    objects.table.close()


def test_a_file_of_a_newer_release_is_left_as_it_is(path: Path) -> None:
    rows_of(path, "PRAGMA user_version = 3")
    before = path.read_bytes()
    with pytest.raises(StoreFailed, match="a newer release wrote it, in form 3"):
        reopened(path)
    assert path.read_bytes() == before and not mark_of(path).exists()


@pytest.mark.parametrize("sealed", ["by an older release", "by a start that was killed"])
def test_with_another_secret_all_stays_for_a_start_with_the_right_one(path, sealed) -> None:
    """Plain text, too: sealed with that secret it would be lost."""
    if sealed == "by an older release":
        seal_old_file(path, KEY_OF)
        old = OldFile(path)
        old.put("a", "conversation", {**TALK, "id": "plain"})
        old.close()
    else:
        bring_some(path, Killed())
    before = rows_of(path, "SELECT seq, body FROM entries ORDER BY seq")

    def other_key(tenant: str, purpose: bytes) -> bytes:
        return KEY_OF(f"another {tenant}", purpose)

    for _ in range(2):  # what is stored meanwhile, under that secret, changes nothing
        table = SqliteTable(path, StoredLimits(4000, 1e9), lambda: 2e9)
        bring_over(table, other_key, mark_of(path))
        if sealed == "by an older release":
            meanwhile = ObjectStore(table, other_key).of("a")
            assert done(meanwhile.put("conversation", {**TALK, "id": "new"}, "new"))
            assert meanwhile.find("conversation", "new")  # older entries count in no budget
        table.close()
    assert rows_of(path, "SELECT seq, body FROM entries ORDER BY seq") == before
    assert not mark_of(path).exists()
    objects = reopened(path)
    assert shown(objects, "resp_1", "response") == FIRST
    assert shown(objects, "chat_1", "completion") == CHAT
    assert sealed == "by a start that was killed" or shown(objects, "plain")
    objects.table.close()


def test_an_object_that_is_over_and_was_changed_is_not_replaced_by_its_older_form(path):
    objects = reopened(path)
    assert done(objects.append("conversation", "conv_1", items("new")))
    objects.table.close()
    mark_of(path).unlink()
    old = OldFile(path)  # its entry was not removed
    old.put("a", "conversation", TALK, [ASKED, SAID], session="conv_1")
    old.close()
    again = reopened(path)
    assert read_all(again, "conv_1") == ["msg_0", "msg_1", "new"]
    again.table.close()


@pytest.mark.parametrize("body", [b"nonsense", b"[1]", b'{"output": [{}]}', b"\xff"])
def test_bodies_that_are_no_json_of_ours_are_removed(path: Path, body: bytes) -> None:
    rows_of(path, "UPDATE entries SET body = ? WHERE id = 'resp_1'", body)
    objects = reopened(path)
    assert shown(objects, "resp_1", "response") is None
    assert shown(objects, "conv_1") == TALK
    assert rows_of(path, "SELECT 1 FROM sqlite_master WHERE name = 'entries'") == []
    objects.table.close()


def test_the_longest_unused_of_all_make_room(path: Path) -> None:
    old = OldFile(path)
    for i in range(3):
        old.put("c", "conversation", {**TALK, "id": f"old-{i}", "x": "x" * 4000}, used=1e9 + i)
    old.close()
    objects = anew(objects_in(path, StoredLimits(10_000, 1e10), lambda: 2e9), "c")
    assert shown(objects, "old-0")  # used now
    put(objects, entry("new"))
    there = [i for i in range(3) if shown(objects, f"old-{i}")]
    assert there == [0, 2]
    objects.table.close()


async def test_requests_that_need_what_is_old_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "stored.sqlite"
    old = OldFile(path)
    for i in range(2000):
        message = {"role": "user", "content": "said " * 40, "id": f"chat-{i}-0"}
        old.put(
            "local",
            "completion",
            {**CHAT, "id": f"chat-{i}", "metadata": {"number": str(i)}},
            [message],
        )
    old.put("local", "response", FIRST, [ASKED])
    old.close()
    stored = stored_in(path, 1 << 26)
    app = App(RecordingEngine(chat_answer()), stored=stored)
    stored.start()
    assert (await app.chat()).status == 200  # this one needs nothing
    body = {"model": MODEL, "input": "on", "previous_response_id": "resp_1"}
    assert (await app.post("/v1/responses", body)).status == 200
    listed = await app.get("/v1/chat/completions?metadata[number]=1999")
    assert [x["metadata"]["number"] for x in listed.json["data"]] == ["1999"]
    assert b"said said" not in content_of(tmp_path)
    await stored.close()
