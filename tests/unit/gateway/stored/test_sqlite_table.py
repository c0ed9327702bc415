"""The file of stored objects: its owner's, put aside when it is damaged, used to the end."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from gateway.stored.table import StoredLimits, StoreFailed
from tests.clock import Clock
from tests.stored_objects import (
    done,
    entry,
    items,
    objects_in,
    put,
    read_all,
    rows_of,
    shown,
)

LIMITS = StoredLimits(tenant_bytes=20_000, max_age_s=1000.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_file_is_its_owners_and_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "stored" / "objects.sqlite"
    first = objects_in(path, LIMITS)
    put(first, entry("1", text="secret words"), items("i"))
    for name in path.parent.iterdir():
        assert stat.S_IMODE(name.stat().st_mode) == 0o600, name
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # Not closed, as after a kill: the next process reads the log.
    second = objects_in(path, LIMITS)
    ((sealed,),) = rows_of(path, "SELECT content FROM pages LIMIT 1")
    assert shown(second, "1") is not None
    done(second.delete("conversation", "1"))
    first.table.close()
    second.table.close()
    assert sealed not in path.read_bytes()


def test_a_file_that_is_damaged_in_use_is_put_aside(tmp_path: Path) -> None:
    """A start reads few of its pages: all that was stored failed for the life of the server."""
    path = tmp_path / "objects.sqlite"
    objects = objects_in(path, LIMITS)
    for i in range(40):
        put(objects, entry(str(i)), items("i", text="x" * 2000))
    objects.table.close()
    objects = objects_in(path, LIMITS)
    with path.open("r+b") as file:
        for page in range(3, path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(os.urandom(4096))
    failed = 0
    for i in range(100, 140):
        try:
            put(objects, entry(str(i)), items("i"))
        except StoreFailed:
            failed += 1
    assert failed <= 2
    assert read_all(objects, "139") == ["i"] and read_all(objects, "1") is None
    assert path.with_name("objects.sqlite.damaged").exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    objects.table.close()
    again = objects_in(path, LIMITS)
    assert read_all(again, "139") == ["i"]
    again.table.close()


def test_a_damaged_file_that_stays_in_the_way_is_tried_again(tmp_path, monkeypatch) -> None:
    path = tmp_path / "objects.sqlite"
    objects = objects_in(path, LIMITS)
    put(objects, entry("1"))

    def wrecked() -> None:
        with objects.table.reading():
            error = sqlite3.DatabaseError("malformed")
            error.sqlite_errorname = "SQLITE_CORRUPT"
            raise error

    with monkeypatch.context() as full:
        full.setattr(Path, "replace", refused)
        with pytest.raises(StoreFailed, match="cannot be moved"):
            wrecked()
    assert shown(objects, "1") is not None
    with pytest.raises(StoreFailed):
        wrecked()
    assert shown(objects, "1") is None and put(objects, entry("2"))
    objects.table.close()


def refused(*args: object) -> None:
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize(
    "wreck", [b"no database at all" * 400, b"SQLite format 3\0" + b"\xff" * 9000]
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_damaged_file_is_put_aside(tmp_path: Path, wreck: bytes, keeps: bool) -> None:
    path = tmp_path / "objects.sqlite"
    path.write_bytes(wreck)
    objects = objects_in(path, LIMITS, keeps_damaged=keeps)
    assert put(objects, entry("1"))
    objects.table.close()
    aside = path.with_name("objects.sqlite.damaged")
    assert aside.exists() == keeps
    if keeps:
        assert aside.read_bytes() == wreck
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_use_before_the_end_is_written_down(tmp_path: Path, clock: Clock) -> None:
    objects = objects_in(tmp_path / "objects.sqlite", LIMITS, clock)
    put(objects, entry("1"))
    clock.now += 900
    assert shown(objects, "1") is not None
    objects.table.close()
    objects = objects_in(tmp_path / "objects.sqlite", LIMITS, clock)
    clock.now += 900
    objects.table.tidy("a")
    assert shown(objects, "1") is not None
    objects.table.close()
