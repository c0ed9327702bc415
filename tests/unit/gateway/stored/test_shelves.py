"""One suite for every shelf: what is stored is found, bounded, and nobody else's."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from gateway.stored.redis_shelf import RedisShelf
from gateway.stored.shelf import Entry, Item, Limits, Query, Shelf, StoreFailed
from gateway.stored.sqlite_shelf import SqliteShelf
from tests.redis_server import RedisServer

LIMITS = Limits(tenant_bytes=20_000, max_age_s=1000.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def shelf(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Shelf]:
    opened: Shelf
    if request.param == "sqlite":
        opened = SqliteShelf(tmp_path / "stored" / "objects.sqlite", LIMITS, clock)
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        opened = RedisShelf(server.url, LIMITS, 5.0, clock)
    yield opened
    opened.close()


def entry(id: str, body: bytes = b"{}", session: str = "s") -> Entry:
    return Entry("response", id, session, body)


def items(*ids: str) -> list[Item]:
    return [Item(id, f'"{id}"'.encode()) for id in ids]


def ids_of(shelf: Shelf, id: str, query: Query = Query()) -> list[str]:  # noqa: B008
    page = shelf.items("a", "response", id, query)
    assert page is not None
    return [x.id for x in page.rows]


def test_what_is_put_is_found_until_it_is_deleted(shelf: Shelf, clock: Clock) -> None:
    assert shelf.put("a", entry("1", b'{"x": 1}'), items("i", "j"))
    found = shelf.get("a", "response", "1")
    assert found == Entry("response", "1", "s", b'{"x": 1}', clock.now)
    assert ids_of(shelf, "1") == ["i", "j"]
    assert shelf.change("a", "response", "1", b"2")
    found = shelf.get("a", "response", "1")
    assert found is not None and found.body == b"2"
    assert shelf.delete("a", "response", "1")
    assert not shelf.delete("a", "response", "1")
    assert shelf.get("a", "response", "1") is None
    assert shelf.items("a", "response", "1", Query()) is None
    assert shelf.find_item("a", "i") is None


def test_another_tenant_and_another_kind_find_nothing(shelf: Shelf) -> None:
    shelf.put("a", entry("1"), items("i"))
    for tenant, kind in (("b", "response"), ("a", "conversation")):
        assert shelf.get(tenant, kind, "1") is None  # type: ignore[arg-type]
        assert shelf.items(tenant, kind, "1", Query()) is None  # type: ignore[arg-type]
        assert not shelf.delete(tenant, kind, "1")  # type: ignore[arg-type]
        assert not shelf.change(tenant, kind, "1", b"x")  # type: ignore[arg-type]
        assert not shelf.append(tenant, kind, "1", items("x"))  # type: ignore[arg-type]
        assert not shelf.delete_item(tenant, kind, "1", "i")  # type: ignore[arg-type]
    assert shelf.find_item("b", "i") is None
    assert shelf.forget("b", "s") == 0
    assert shelf.find_item("a", "i", "1") == b'"i"'
    assert shelf.find_item("a", "i", "2") is None


def test_the_same_id_again_replaces_all_of_it(shelf: Shelf) -> None:
    shelf.put("a", entry("1"), items("i"))
    shelf.put("a", entry("1", b"new"), items("j"))
    assert ids_of(shelf, "1") == ["j"]
    assert shelf.find_item("a", "i") is None


def test_items_are_added_and_removed(shelf: Shelf) -> None:
    shelf.put("a", entry("1"), items("i"))
    assert shelf.append("a", "response", "1", items("j", "i", "k"))
    assert ids_of(shelf, "1") == ["i", "j", "k"]
    assert shelf.delete_item("a", "response", "1", "j")
    assert ids_of(shelf, "1") == ["i", "k"]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        (Query(), "abcde", False),
        (Query(2), "ab", True),
        (Query(2, "b"), "cd", True),
        (Query(3, "b"), "cde", False),
        (Query(2, ascending=False), "ed", True),
        (Query(9, "c", ascending=False), "ba", False),
        (Query(9, "nope"), "", False),
        (Query(0), "", True),
    ],
)
def test_pages(shelf: Shelf, query: Query, ids: str, more: bool) -> None:
    shelf.put("a", entry("1"), items(*"abcde"))
    for id in "abcde":
        shelf.put("a", entry(id, id.encode()))
    page = shelf.items("a", "response", "1", query)
    assert page is not None
    assert ("".join(x.id for x in page.rows), page.more) == (ids, more)
    page = shelf.entries("a", "response", query, lambda body: body != b"{}")
    assert (b"".join(x.body for x in page.rows).decode(), page.more) == (ids, more)


def test_a_session_is_forgotten_as_a_whole(shelf: Shelf) -> None:
    shelf.put("a", entry("1"), items("i"))
    shelf.put("a", entry("2"))
    shelf.put("a", entry("3", session="other"))
    assert shelf.latest("a", "response", "s") == "2"
    assert shelf.latest("a", "conversation", "s") is shelf.latest("b", "response", "s") is None
    assert shelf.forget("a", "s") == 2
    assert shelf.latest("a", "response", "s") is None
    assert shelf.get("a", "response", "1") is None
    assert shelf.get("a", "response", "3") is not None


def test_the_longest_unused_make_room(shelf: Shelf, clock: Clock) -> None:
    for id in "1234":
        clock.now += 100
        assert shelf.put("a", entry(id, b"x" * 2000), [Item("i", b"x" * 2000)])
    shelf.get("a", "response", "1")
    clock.now += 100
    assert shelf.put("a", entry("5", b"x" * 4000))
    assert shelf.put("b", entry("1", b"x" * 19_000))
    there = [id for id in "12345" if shelf.get("a", "response", id)]
    assert there == ["1", "3", "4", "5"]


def test_what_is_larger_than_the_budget_is_not_stored(shelf: Shelf) -> None:
    shelf.put("a", entry("1"))
    assert not shelf.put("a", entry("2", b"x" * 30_000))
    assert not shelf.put("a", entry("3"), [Item("i", b"x" * 30_000)])
    assert shelf.get("a", "response", "1") is not None


def test_the_budget_holds_over_changes(shelf: Shelf) -> None:
    """Every way to add and remove bytes is counted, or the budget would drift."""
    for round in range(30):
        shelf.put("a", entry("kept", b"x" * 100))
        shelf.append("a", "response", "kept", [Item(f"{round}", b"x" * 3000)])
        shelf.change("a", "response", "kept", b"x" * 5000)
        shelf.delete_item("a", "response", "kept", f"{round}")
    assert shelf.put("a", entry("other", b"x" * 10_000))
    assert shelf.get("a", "response", "kept") is not None


def test_old_entries_go(shelf: Shelf, clock: Clock) -> None:
    shelf.put("a", entry("1"))
    shelf.put("a", entry("2"))
    clock.now += 900
    shelf.get("a", "response", "2")
    clock.now += 200
    shelf.put("a", entry("3"))
    assert shelf.get("a", "response", "1") is None
    assert shelf.get("a", "response", "2") is not None


@pytest.mark.redis
def test_several_gateways_share_a_server(clock: Clock) -> None:
    with RedisServer() as server:
        one, other = (RedisShelf(server.url, LIMITS, 5.0, clock) for _ in range(2))
        one.put("a", entry("1"), items("i"))
        assert other.get("a", "response", "1") is not None
        assert other.delete("a", "response", "1")
        assert one.get("a", "response", "1") is None
        with redis.Redis.from_url(server.url) as client:
            left = {x.rpartition(b":")[2] for x in client.scan_iter()}
        assert left <= {b"total", b"seq"}
        server.kill()
        with pytest.raises(StoreFailed, match="redis does not answer"):
            one.get("a", "response", "1")
        one.close()
        other.close()


def test_the_file_is_its_owners_and_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "stored" / "objects.sqlite"
    first = SqliteShelf(path, LIMITS)
    first.put("a", entry("1", b"secret words"), items("i"))
    for name in path.parent.iterdir():
        assert stat.S_IMODE(name.stat().st_mode) == 0o600, name
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # Not closed, as after a kill: the log is read by whoever comes next.
    second = SqliteShelf(path, LIMITS)
    assert second.get("a", "response", "1") is not None
    second.delete("a", "response", "1")
    first.close()
    second.close()
    assert b"secret words" not in path.read_bytes()


@pytest.mark.parametrize(
    "wreck", [b"no database at all" * 400, b"SQLite format 3\0" + b"\xff" * 9000]
)
def test_a_damaged_file_is_put_aside(tmp_path: Path, wreck: bytes) -> None:
    path = tmp_path / "objects.sqlite"
    path.write_bytes(wreck)
    shelf = SqliteShelf(path, LIMITS)
    assert shelf.put("a", entry("1"))
    shelf.close()
    assert path.with_name("objects.sqlite.damaged").read_bytes() == wreck
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
