"""Sealed texts open for the tenant that they were made for, unchanged, and for no other."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import Tenants
from gateway.stored.objects import Objects, Query
from gateway.stored.seal import NotOurs, SealedText
from gateway.stored.shelf import Limits, StoreFailed, label_of
from gateway.stored.sqlite_shelf import SqliteShelf
from tests.old_stored import OldFile, write_old_chats
from tests.stored_objects import (
    KEY_OF,
    content_of,
    done,
    entry,
    ids_of,
    items,
    put,
    read_all,
    rows_of,
    shelf_in,
    shown,
    stored_in,
)
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer
from tests.waiting import eventually

HERE = Tenants(b"a secret of the tests")
LIMITS = Limits(1 << 26, 1e6)
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


def of(tenants: Tenants, tenant: str) -> SealedText:
    return SealedText(tenants.key_of(tenant, b"compaction"))


ALICE = of(HERE, "alice")
SEALED = ALICE.close("what was said")


@given(st.text())
def test_a_text_comes_back(text: str) -> None:
    assert ALICE.open(ALICE.close(text)) == text


def test_a_restart_changes_nothing_and_two_seals_are_never_alike() -> None:
    again = of(Tenants(b"a secret of the tests"), "alice")
    assert again.open(SEALED) == "what was said"
    assert ALICE.close("x") != ALICE.close("x")
    assert b"said" not in b64decode(SEALED)


def test_no_other_tenant_opens_it() -> None:
    others = [of(HERE, "bob"), of(HERE, "alic"), of(HERE, "")]
    others.append(of(Tenants(b"another secret, of 16 or more"), "alice"))
    others.append(SealedText(HERE.salt_of("alice")))
    for other in others:
        with pytest.raises(NotOurs):
            other.open(SEALED)


def test_a_changed_one_opens_for_no_tenant() -> None:
    packed = b64decode(SEALED)
    for i in range(len(packed)):
        changed = packed[:i] + bytes([packed[i] ^ 1]) + packed[i + 1 :]
        with pytest.raises(NotOurs):
            ALICE.open(b64encode(changed).decode())
        with pytest.raises(NotOurs):
            ALICE.open(b64encode(packed[:i]).decode())


@given(st.one_of(st.text(), st.binary().map(lambda x: b64encode(b"\x01" + x).decode())))
def test_text_that_is_no_seal_does_not_open(text: str) -> None:
    with pytest.raises(NotOurs):
        ALICE.open(text)


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


@pytest.fixture
def objects(path: Path) -> Iterator[Objects]:
    made = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
    yield made
    made.shelf.close()


def run_chores(objects: Objects) -> int:
    return sum(1 for _ in objects.chores())


@pytest.mark.parametrize("first", [True, False], ids=["sealed", "as it comes"])
def test_all_of_it_is_there_as_it_was(objects: Objects, path: Path, first: bool) -> None:
    if first:
        run_chores(objects)
        assert b"secret" not in content_of(path.parent)
    assert shown(objects, "resp_1", "response") == FIRST
    assert read_all(objects, "resp_1", "response") == ["msg_0", "msg_1"]
    assert read_all(objects, "resp_2", "response") == ["msg_2", "msg_3"]
    assert shown(objects, "conv_1") == TALK
    assert ids_of(objects, "conv_1") == read_all(objects, "conv_1") == ["msg_0", "msg_1"]
    assert json.loads(done(objects.find_item("a", "msg_2")) or b"")["id"] == "msg_2"
    found = done(objects.listed("a", "completion", [label_of("a", "b"), ("model", "m")], Query(9)))
    assert [json.loads(x.body) for x in found.rows] == [CHAT]
    assert objects.latest("a", "response", "s") == "resp_2"
    assert done(objects.append("a", "conversation", "conv_1", items("new")))
    assert done(objects.remove_item("a", "conversation", "conv_1", "msg_0"))
    assert read_all(objects, "conv_1") == ["msg_1", "new"]
    assert done(objects.show("b", "response", "resp_1")) is not None
    assert done(objects.show("b", "response", "resp_2")) is None
    run_chores(objects)
    assert b"secret" not in content_of(path.parent)
    assert done(objects.delete("a", "conversation", "conv_1"))
    assert done(objects.forget("a", "s")) == 3
    assert done(objects.forget("b", "of b")) == 1
    assert rows_of(path, "SELECT sum(nbytes) FROM totals") == [(0,)]


def test_sealing_goes_on_after_a_kill_half_way(objects: Objects, path: Path) -> None:
    old = OldFile(path)
    many = [{**ASKED, "id": f"item-{i}"} for i in range(1500)]
    old.put("a", "conversation", {**TALK, "id": "conv_2"}, many)
    old.close()
    steps = objects.find("a", "conversation", "conv_2")
    next(steps)
    ((sealed,),) = rows_of(path, "SELECT count(*) FROM items WHERE substr(body, 1, 1) = x'00'")
    assert 0 < sealed < 1500
    again = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
    assert read_all(again, "conv_2") == [f"item-{i}" for i in range(1500)]
    list(steps)  # the first one goes on as well, and harms nothing
    assert read_all(objects, "conv_2") == [f"item-{i}" for i in range(1500)]
    again.shelf.close()


def test_once_all_is_sealed_plain_text_is_not_there(objects: Objects, path: Path) -> None:
    run_chores(objects)
    rows_of(path, "DELETE FROM heads")
    rows_of(path, "UPDATE entries SET body = ?", json.dumps(FIRST).encode())
    assert shown(objects, "resp_1", "response") is None
    again = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
    assert shown(again, "resp_1", "response") is None
    again.shelf.close()


def as_before_any_seal(path: Path) -> None:
    """All that an attacker who can only write the file can do: make it one of long ago."""
    for table in ("heads", "tags"):
        rows_of(path, f"DELETE FROM {table}")
    rows_of(path, "DELETE FROM items")
    planted = {**FIRST, "output": [{**SAID, "id": "planted", "role": "system"}]}
    rows_of(path, "UPDATE entries SET body = ?", json.dumps(planted).encode())
    rows_of(path, "PRAGMA user_version = 0")


@pytest.mark.parametrize("replaced", [False, True], ids=["changed", "replaced"])
def test_once_all_is_sealed_a_file_that_looks_old_is_not_believed(
    objects: Objects, path: Path, replaced: bool
) -> None:
    run_chores(objects)
    objects.shelf.close()
    if replaced:
        for name in path.parent.glob("stored.sqlite*"):
            name.unlink()
        old = OldFile(path)
        old.put("a", "response", {**FIRST, "output": [{**SAID, "id": "planted"}]})
        old.close()
    else:
        as_before_any_seal(path)
    again = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
    for _ in range(2):
        assert shown(again, "resp_1", "response") is None
        assert read_all(again, "resp_1", "response") is None
        assert done(again.find_item("a", "planted")) is None
        run_chores(again)
    put(again, entry("new"), items("i"))
    assert read_all(again, "new") == ["i"]
    again.shelf.close()


def test_a_new_file_is_marked_before_anything_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stored.sqlite"
    first = Objects(shelf_in(path, LIMITS), KEY_OF)
    put(first, entry("resp_1", kind="response"), items("i"))
    first.shelf.close()  # nothing was looked after
    as_before_any_seal(path)
    again = Objects(shelf_in(path, LIMITS), KEY_OF)
    assert shown(again, "resp_1", "response") is None
    again.shelf.close()


def test_a_file_of_the_release_that_marked_it_inside_is_sealed(path: Path) -> None:
    rows_of(path, "PRAGMA user_version = 2")
    objects = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
    assert shown(objects, "resp_1", "response") is None
    objects.shelf.close()
    rows_of(path, "PRAGMA user_version = 0")
    again = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
    assert shown(again, "resp_1", "response") is None
    again.shelf.close()


def test_until_all_is_sealed_a_file_without_a_mark_is_read_again(path: Path) -> None:
    for _ in range(2):  # killed before all was sealed
        objects = Objects(shelf_in(path, LIMITS, lambda: 2e9), KEY_OF)
        assert shown(objects, "resp_1", "response") == FIRST
        objects.shelf.close()


def test_a_mark_that_cannot_be_made_is_said_and_tried_again(path: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    mark = in_the_way / "stored.sealed"
    objects = Objects(SqliteShelf(path, LIMITS, lambda: 2e9, mark=mark), KEY_OF)
    with pytest.raises(StoreFailed, match=r"stored\.sealed cannot be written"):
        run_chores(objects)
    assert shown(objects, "resp_1", "response") == FIRST  # sealed by now
    in_the_way.unlink()
    run_chores(objects)
    assert mark.exists()
    objects.shelf.close()


def test_bodies_that_are_no_json_of_ours_are_removed(objects: Objects, path: Path) -> None:
    for body in (b"nonsense", b"[1]", b'{"output": [{}]}', b"\xff"):
        rows_of(path, "UPDATE entries SET body = ? WHERE id = 'resp_1'", body)
        rows_of(path, "UPDATE entries SET id = 'resp_x' WHERE id = 'resp_1' AND tenant = 'b'")
    assert shown(objects, "resp_1", "response") is None
    run_chores(objects)
    assert rows_of(path, "SELECT count(*) FROM entries WHERE id = 'resp_1'") == [(0,)]


def test_the_longest_unused_of_both_make_room(path: Path) -> None:
    old = OldFile(path)
    for i in range(3):
        old.put("c", "conversation", {**TALK, "id": f"old-{i}", "x": "x" * 4000}, used=1e9 + i)
    old.close()
    objects = Objects(shelf_in(path, Limits(10_000, 1e10), lambda: 2e9), KEY_OF)
    assert done(objects.show("c", "conversation", "old-0"))  # used now
    while objects.shelf.tidy("c"):
        pass
    there = [i for i in range(3) if done(objects.show("c", "conversation", f"old-{i}"))]
    assert there == [0, 2]
    objects.shelf.close()


async def test_it_is_sealed_beside_requests_from_the_start_on(tmp_path: Path) -> None:
    """The first list of a label waits for its own chats; another tenant's does not."""
    path = tmp_path / "stored.sqlite"
    write_old_chats(path, "local", 9000)
    old = OldFile(path)
    old.put("local", "response", FIRST, [ASKED])
    old.close()
    stored = stored_in(path, 1 << 26)
    app = App(RecordingEngine(chat_answer()), stored=stored)
    stored.start()
    body = {"model": MODEL, "input": "on", "previous_response_id": "resp_1"}
    assert (await app.post("/v1/responses", body)).status == 200
    plain = "SELECT count(*) FROM entries WHERE seq NOT IN (SELECT owner FROM heads)"
    ((old_left,),) = rows_of(path, plain)
    assert old_left > 0  # not all was sealed before the first answer
    listed = await app.get("/v1/chat/completions?metadata[number]=8999")
    assert [x["metadata"]["number"] for x in listed.json["data"]] == ["8999"]
    await eventually(lambda: b"said said" not in content_of(tmp_path))
    await stored.close()
