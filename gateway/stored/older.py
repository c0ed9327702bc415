"""Converts the SQLite file of earlier releases: four tables, encrypted or in plain text.

Runs once, when the file is first opened, object by object, so that after a kill it continues with
the next one. At the end the older tables are dropped, the write-ahead log is truncated, and a mark
is left: an empty file in the folder of the server's secret. From then on plain text is not trusted,
so an old file that is put in the place of this one is not read.

An older encrypted object has a head with the number of its items and the exclusive or of keyed
hashes of their ids and numbers. An older item is its number in 8 bytes, and the encrypted content.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gateway.stored.objects import ObjectStore
from gateway.stored.rows import KINDS, Item, Json, KeyOf, Kind, NotOurs, ObjectSeal, keyed_hash
from gateway.stored.sqlite_table import SEALED, SqliteTable

log = logging.getLogger("thermocline.gateway")
_NUMBER_BYTES: Final = 8
_NEXT = """
SELECT seq, CAST(tenant AS TEXT), CAST(kind AS TEXT), CAST(id AS TEXT), CAST(session AS TEXT),
    CAST(used AS REAL), CAST(body AS BLOB), CAST(head AS BLOB)
FROM entries LEFT JOIN heads ON owner = seq ORDER BY seq LIMIT 1
"""
_ITEMS = "SELECT CAST(id AS TEXT), CAST(body AS BLOB) FROM items WHERE owner = ? ORDER BY seq"
# Encrypted heads: of older entries, and of present objects.
_HEADS = (
    "SELECT CAST(tenant AS TEXT), kind || ':' || id, 'head', CAST(head AS BLOB)"
    " FROM entries JOIN heads ON owner = seq",
    "SELECT CAST(tenant AS TEXT), CAST(name AS TEXT), 'top', CAST(head AS BLOB)"
    " FROM objects WHERE name IS NOT NULL",
)
# Triggers have counted older entries in the totals, so these are computed again.
_BEGIN = """
CREATE TABLE IF NOT EXISTS heads (owner INTEGER PRIMARY KEY, head BLOB);
DROP TRIGGER IF EXISTS entries_INSERT;
DROP TRIGGER IF EXISTS entries_DELETE;
DROP TRIGGER IF EXISTS entries_body;
DROP TRIGGER IF EXISTS items_INSERT;
DROP TRIGGER IF EXISTS items_DELETE;
DROP TRIGGER IF EXISTS items_body;
DELETE FROM totals;
INSERT INTO totals SELECT tenant, sum(nbytes) FROM objects GROUP BY tenant
"""
_END = """
DROP TABLE IF EXISTS items;
DROP TABLE IF EXISTS heads;
DROP TABLE IF EXISTS tags;
DROP TABLE IF EXISTS leavings;
DROP TABLE entries
"""
# Errors that show that an entry was tampered with or is damaged.
_CHANGED = (NotOurs, msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError)


class _OlderHead(msgspec.Struct, frozen=True):
    session: str
    num: int = 0
    sum: bytes = b""
    outputs: int = 0  # of the items, the last ones


class _OlderEntry(NamedTuple):
    seq: int
    tenant: str
    kind: Kind
    id: str
    session: str
    used: float
    body: bytes
    head: bytes | None  # None: it is plain text, perhaps with some items encrypted already


def bring_over(table: SqliteTable, key_of: KeyOf, mark: Path) -> None:
    """Convert all entries of earlier releases into objects.

    If the entries were encrypted with another secret, all of them are left as they are, for a start
    with the right one. Raises ``StoreFailed``.

    Args:
        mark: the path of the file that is left at the end.
    """
    with table.reading() as db:
        there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone()
    if there:
        with table.writing() as db:
            for statement in _BEGIN.split(";"):
                db.execute(statement)
        if _is_foreign(table, key_of):
            log.error(
                "objects that an earlier release stored were encrypted with another secret, and are"
                " kept unread: start with its store.secret_file (and data_dir) to use them"
            )
            return
        (version,) = table.pragma("user_version")
        _bring_all(table, key_of, takes_plain=version < SEALED and not mark.exists())
    if not mark.exists():
        table.pragma("wal_checkpoint(TRUNCATE)")  # the log may have plain text
        try:
            _make(mark)
        except OSError as error:
            log.warning("plain text of an earlier release is still trusted: %s", error)


def _is_foreign(table: SqliteTable, key_of: KeyOf) -> bool:
    """Return whether there are encrypted entries, none of which our secret can decrypt.

    If no older entry is encrypted, the present objects decide.
    """
    for heads in _HEADS:
        row = None
        with table.reading() as db:
            for row in db.execute(heads):
                tenant, name, part, head = row
                with suppress(NotOurs):
                    kind, _, id = name.partition(":")
                    ObjectSeal(key_of, table.place, tenant).open(head, kind, id, part)
                    return False
        if row is not None:
            return True
    return False


def _bring_all(table: SqliteTable, key_of: KeyOf, *, takes_plain: bool) -> None:
    store, brought = ObjectStore(table, key_of), 0
    while True:
        with table.reading() as db:
            if (row := db.execute(_NEXT).fetchone()) is None:
                break
            entry = _OlderEntry(*row)
            parts = db.execute(_ITEMS, (entry.seq,)).fetchall()
        used = None
        with suppress(*_CHANGED):
            if entry.kind in KINDS and (takes_plain or entry.head is not None):
                object, session, items = _opened(key_of, entry, parts)
                objects, brought = store.of(entry.tenant), brought + 1
                # If it exists, an earlier start has stored it, and failed to remove the entry.
                if objects.find(entry.kind, entry.id, uses=False) is None:
                    # Only the first step: what exceeds the budget is not removed here.
                    next(objects.put(entry.kind, object, session, items), None)
                    used = entry.used
        table.remove(partial(_remove, entry=entry, used=used))
    with table.writing() as db:
        for statement in _END.split(";"):
            db.execute(statement)
    log.info("converted %d stored objects of an earlier release", brought)


def _remove(db: sqlite3.Connection, *, entry: _OlderEntry, used: float | None) -> None:
    """Remove an entry; ``used`` becomes the time of last use of its object."""
    if used is not None:
        sql = "UPDATE objects SET used = ? WHERE tenant = ? AND name = ?"
        db.execute(sql, (used, entry.tenant, f"{entry.kind}:{entry.id}"))
    for rows in ("items WHERE owner", "heads WHERE owner", "entries WHERE seq"):
        db.execute(f"DELETE FROM {rows} = ?", (entry.seq,))


def _opened(
    key_of: KeyOf, entry: _OlderEntry, parts: list[tuple[str, bytes]]
) -> tuple[Json, str, list[Item]]:
    """Return the object, its session and its items. Raises one of ``_CHANGED``."""
    seal, place = ObjectSeal(key_of, "sqlite", entry.tenant), (entry.kind, entry.id)
    numbers = [int.from_bytes(x[:_NUMBER_BYTES]) for _, x in parts]
    items = []
    for number, (id, body) in zip(numbers, parts, strict=True):
        try:
            items.append(Item(id, seal.open(body[_NUMBER_BYTES:], *place, "item", id, number)))
        except NotOurs:
            if entry.head is not None:
                raise
            _json(body)
            items.append(Item(id, body))
    if entry.head is None:
        return _json(entry.body), entry.session, items
    head = msgspec.msgpack.decode(seal.open(entry.head, *place, "head"), type=_OlderHead)
    object = _json(seal.open(entry.body, *place, "body"))
    key, sum_ = key_of(entry.tenant, b"sums"), 0
    for number, item in zip(numbers, items, strict=True):
        sum_ ^= int.from_bytes(keyed_hash(key, "sqlite", entry.tenant, *place, item.id, number))
    if (len(items), sum_, sorted(set(numbers))) != (head.num, int.from_bytes(head.sum), numbers):
        raise NotOurs
    own = len(items) - head.outputs
    if entry.kind == "response":
        object["output"] = [_json(x.body) for x in items[own:]]
    return object, head.session, items[:own]


def _json(body: bytes) -> Json:
    return msgspec.json.decode(body, type=Json)


def _make(path: Path) -> None:
    """Create an empty file, durably. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, flags in ((path, os.O_CREAT), (path.parent, os.O_DIRECTORY)):
        descriptor = os.open(name, os.O_RDONLY | flags, 0o600)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
