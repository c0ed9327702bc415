"""Brings over what earlier releases stored in a SQLite file: four tables, sealed or in plain text.

Done once, when the file is first opened, object by object: after a kill it goes on with the next
one. In the end the older tables are dropped, the log is cut, and a mark is left: a file where the
server's secret lies. From then on plain text is not believed, nor is another file of long ago that
somebody puts in the place of this one.

An older sealed object has a head with the number of its items and a sum (exclusive or) of keyed
hashes of their ids and numbers. An older item is 8 bytes of its number, and a seal.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gateway.stored.forms import KINDS, Entry, Form, Item, Kind, row_name, stored_form
from gateway.stored.objects import Objects
from gateway.stored.seal import KeyOf, NotOurs, ObjectSeal, keyed_hash
from gateway.stored.sqlite_file import make_mark
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.table import StoreFailed

log = logging.getLogger("thermocline.gateway")
_NUMBER_BYTES = 8
_SUM_BYTES = 16
_SEALED = 2  # the user_version by which releases before the mark knew that all is sealed
_BEGIN = """
CREATE TABLE IF NOT EXISTS heads (owner INTEGER PRIMARY KEY, head BLOB NOT NULL);
DROP TRIGGER IF EXISTS entries_INSERT;
DROP TRIGGER IF EXISTS entries_DELETE;
DROP TRIGGER IF EXISTS entries_body;
DROP TRIGGER IF EXISTS items_INSERT;
DROP TRIGGER IF EXISTS items_DELETE;
DROP TRIGGER IF EXISTS items_body;
DELETE FROM totals;
INSERT INTO totals SELECT tenant, sum(nbytes) FROM objects GROUP BY tenant;
"""
_NEXT = """
SELECT seq, CAST(tenant AS TEXT), CAST(kind AS TEXT), CAST(id AS TEXT), CAST(session AS TEXT),
    CAST(used AS REAL), CAST(body AS BLOB), CAST(head AS BLOB)
FROM entries LEFT JOIN heads ON owner = seq ORDER BY seq LIMIT 1
"""
_HEADS = """
SELECT CAST(tenant AS TEXT), CAST(kind AS TEXT), CAST(id AS TEXT), CAST(head AS BLOB)
FROM entries JOIN heads ON owner = seq
"""
_ITEMS = """
SELECT CAST(id AS TEXT), CAST(body AS BLOB) FROM items WHERE owner = ? ORDER BY seq
"""


class NotMarked(StoreFailed):
    """All of it is over, but the mark that says so cannot be made."""


class _OlderHead(msgspec.Struct, frozen=True):
    session: str
    next: int = 0  # number of the next item
    num: int = 0
    nbytes: int = 0
    sum: bytes = bytes(_SUM_BYTES)
    outputs: int = 0  # of the items, the last ones
    output_bytes: int = 0
    about: dict[str, str] = {}


class _OlderEntry(NamedTuple):
    seq: int
    tenant: str
    kind: Kind
    id: str
    session: str
    used: float
    body: bytes
    head: bytes | None  # None: all of it is plain text, or some items are sealed already


def bring_over(objects: Objects, table: SqliteTable, key_of: KeyOf, mark: Path) -> None:
    """Bring over all that is there of earlier releases.

    What was sealed with another secret stays as it is, for a start with the right one.

    Raises ``StoreFailed``; ``NotMarked`` where only the mark is missing.
    """
    with table.file.reading() as db:
        there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    if there:
        takes_plain = version < _SEALED and not mark.exists()
        with table.file.writing() as db:
            for statement in _BEGIN.split(";"):
                db.execute(statement)
        if _is_foreign(table, key_of):
            log.error(
                "what an earlier release stored was sealed with another secret, and stays as it"
                " is: start with its store.secret_file (and data_dir) to have it again"
            )
            return
        number = 0
        while (entry := _next(table)) is not None:
            number += _bring(objects, table, key_of, entry, takes_plain)
        with table.file.writing() as db:
            for name in ("items", "heads", "tags", "leavings", "entries"):
                db.execute(f"DROP TABLE IF EXISTS {name}")
        log.info("brought over %d stored objects of an earlier release", number)
    if not mark.exists():
        table.file.shorten_log()  # of plain text
        try:
            make_mark(mark)
        except StoreFailed as error:
            raise NotMarked(str(error)) from error


def _is_foreign(table: SqliteTable, key_of: KeyOf) -> bool:
    """Return whether there are sealed entries, none of which can be opened with our secret."""
    with table.file.reading() as db:
        rows = db.execute(_HEADS).fetchall()
    for tenant, kind, id, head in rows:
        seal = ObjectSeal(key_of(tenant, b"stored"), ("sqlite", tenant, kind, id))
        with suppress(NotOurs):
            seal.open(head, "head")
            return False
    return bool(rows)


def _next(table: SqliteTable) -> _OlderEntry | None:
    with table.file.reading() as db:
        row = db.execute(_NEXT).fetchone()
    return None if row is None else _OlderEntry(*row)


def _bring(
    objects: Objects, table: SqliteTable, key_of: KeyOf, old: _OlderEntry, takes_plain: bool
) -> bool:
    """Put an older entry's object, unless it was changed, and remove the entry."""
    with table.file.reading() as db:
        parts: list[tuple[str, bytes]] = db.execute(_ITEMS, (old.seq,)).fetchall()
    made = None
    if old.kind in KINDS and (old.head is not None or takes_plain):
        made = _opened(key_of, old, parts)
    if made is not None:
        entry, items = made
        # It may have been put by a start that failed before it was removed, and changed since.
        (over,) = table.find_all(old.tenant, [row_name(entry.kind, entry.id)], uses=False)
        if over is None and objects.put_now(old.tenant, entry, items):
            table.set_used(old.tenant, row_name(entry.kind, entry.id), old.used)

    def removed(db: sqlite3.Connection) -> None:
        for name, column in (("items", "owner"), ("heads", "owner"), ("entries", "seq")):
            db.execute(f"DELETE FROM {name} WHERE {column} = ?", (old.seq,))

    table.file.remove(removed)
    return made is not None


def _opened(
    key_of: KeyOf, old: _OlderEntry, parts: list[tuple[str, bytes]]
) -> tuple[Entry, list[Item]] | None:
    """Take an older entry apart; None if it is not as it was written."""
    place = ("sqlite", old.tenant, old.kind, old.id)
    seal = ObjectSeal(key_of(old.tenant, b"stored"), place)
    try:
        if old.head is None:
            items = [Item(id, _plain(seal, id, body)) for id, body in parts]
            form = stored_form(old.kind, _json(old.body))
            return Entry(old.kind, old.id, old.session, form), items
        head = msgspec.msgpack.decode(seal.open(old.head, "head"), type=_OlderHead)
        body = seal.open(old.body, "body")
        items, sum_, last = [], bytes(_SUM_BYTES), -1
        for id, part in parts:
            number = int.from_bytes(part[:_NUMBER_BYTES])
            items.append(Item(id, _sealed(seal, id, part)))
            hashed = keyed_hash(key_of(old.tenant, b"sums"), *place, id, number)[:_SUM_BYTES]
            sum_ = bytes(x ^ y for x, y in zip(sum_, hashed, strict=True))
            if not last < number < head.next:
                return None
            last = number
        if len(items) != head.num or sum_ != head.sum:
            return None
        labels = stored_form(old.kind, _json(body)).labels
        own = len(items) - head.outputs
        form = Form(body, head.about, labels, items[own:])
        return Entry(old.kind, old.id, head.session, form), items[:own]
    except (NotOurs, msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None


def _json(body: bytes) -> dict[str, Any]:
    return msgspec.json.decode(body, type=dict[str, Any])


def _plain(seal: ObjectSeal, id: str, body: bytes) -> bytes:
    """Return an item that lies in plain text, or was sealed before its entry was."""
    try:
        body = _sealed(seal, id, body)
    except NotOurs:
        _json(body)
    return body


def _sealed(seal: ObjectSeal, id: str, part: bytes) -> bytes:
    number = int.from_bytes(part[:_NUMBER_BYTES])
    return seal.open(part[_NUMBER_BYTES:], "item", id, number)
