"""Stored objects for tests: keys, places, and work done in one go."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from gateway.keys import Tenants
from gateway.stored.objects import ObjectList, Objects, ObjectStore, Query
from gateway.stored.older import bring_over
from gateway.stored.redis_table import RedisTable
from gateway.stored.rows import Item, KeyOf, Kind
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.stored import Stored
from gateway.stored.table import Steps, StoredLimits
from tests.redis_server import RedisServer

T = TypeVar("T")
KEY_OF = Tenants(b"a secret of the tests").key_of


def done(steps: Steps[T]) -> T:
    """Do all steps, and return the result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


def hidden(tenant: str) -> str:
    """The word that stands for a tenant in the names of keys."""
    return KEY_OF(tenant, b"names of keys").hex()[:32]


def mark_of(path: Path) -> Path:
    """The mark that all of a file is sealed, in the folder above it."""
    return path.parent.parent / f"{path.parent.name}.sealed"


def store_in(
    path: Path, limits: StoredLimits, *clock: Callable[[], float], **to: Any
) -> ObjectStore:
    """Open a file, and bring over what is in it of earlier releases."""
    table = SqliteTable(path, limits, *clock, **to)
    bring_over(table, KEY_OF, mark_of(path))
    return ObjectStore(table, KEY_OF)


def objects_in(path: Path, limits: StoredLimits, *clock: Callable[[], float], **to: Any) -> Objects:
    """Do as ``store_in``; returns tenant a's objects."""
    return store_in(path, limits, *clock, **to).of("a")


def redis_objects(server: RedisServer, limits: StoredLimits, clock: Callable[[], float]) -> Objects:
    """Open a server's table; returns tenant a's objects."""
    return ObjectStore(RedisTable(server.url, limits, hidden, 5.0, clock), KEY_OF).of("a")


def anew(objects: Objects, tenant: str = "a", key_of: KeyOf = KEY_OF) -> Objects:
    """Objects in the same table that have not read anything: of another server, or tenant."""
    return ObjectStore(objects.table, key_of).of(tenant)


def stored_in(path: Path, tenant_bytes: int = 1_000_000) -> Stored:
    """Make a store in a file; nothing is opened yet."""
    limits = StoredLimits(tenant_bytes, max_age_s=1000.0)
    return Stored(lambda: store_in(path, limits))


def text(nbytes: int) -> str:
    return "x" * nbytes


class Entry(NamedTuple):
    """An object as it is put."""

    kind: Kind
    object: dict[str, Any]
    session: str


def entry(id: str, session: str = "s", kind: Kind = "conversation", **fields: Any) -> Entry:
    return Entry(kind, {"id": id, **fields}, session)


def items(*ids: str, text: str = "") -> list[Item]:
    return [Item(id, msgspec.json.encode({"id": id, "text": text or id})) for id in ids]


def put(objects: Objects, made: Entry, own: Iterable[Item] = (), tenant: str = "a") -> bool:
    of = objects if tenant == "a" else anew(objects, tenant)
    return done(of.put(*made, list(own)))


def shown(objects: Objects, id: str, kind: Kind = "conversation") -> Any:
    body = done(objects.show(kind, id))
    return None if body is None else msgspec.json.decode(body)


def page(
    objects: Objects, id: str, query: Query | None = None, kind: Kind = "conversation"
) -> ObjectList | None:
    return done(objects.page(kind, id, query or Query(1000)))


def ids_of(objects: Objects, id: str, query: Query | None = None) -> list[str]:
    found = page(objects, id, query)
    return [x.id for x in found.rows]


def read_all(objects: Objects, id: str, kind: Kind = "conversation") -> list[str] | None:
    """The ids of all items, as a prompt is made of them."""
    object = objects.find(kind, id)
    if object is None:
        return None
    rows = done(objects.read_all(object))
    return None if rows is None else [x.id for x in rows]


def content_of(folder: Path) -> bytes:
    """All bytes of the files in a folder."""
    return b"\0".join(x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file())


def rows_of(path: Path, sql: str, *args: object) -> list[tuple[Any, ...]]:
    """Query a file of SQLite, or change it, while another process may have it open."""
    with closing(sqlite3.connect(path, timeout=10)) as db, db:
        return db.execute(sql, args).fetchall()


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A file system of its own, in memory; skips the test where none may be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a small file system here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Fill a disk to its last byte; returns the file that does it."""
    filler = place / "filler"
    size = 1 << 20
    with filler.open("wb", buffering=0) as file:
        while size:
            try:
                if file.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2
    return filler
