"""Brings over what earlier releases stored in a SQLite file: four tables, sealed or in plain text.

Done once, when the file is first opened, object by object: after a kill it goes on with the next
one. Then the log is cut, and a mark is left: a file where the server's secret lies. From then on
plain text is not believed, nor is another file of long ago that is put in the place of this one.
What does not open, as it was sealed with another secret, stays for a start with the right one.

An older sealed object has a head with the number of its items and a sum (exclusive or) of keyed
hashes of their ids and numbers. An older item is 8 bytes of its number, and a seal.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gateway.stored.objects import Json, ObjectStore
from gateway.stored.rows import KINDS, Item, KeyOf, Kind, NotOurs, ObjectSeal, keyed_hash
from gateway.stored.sqlite_table import SqliteTable

log = logging.getLogger("thermocline.gateway")
_NUMBER_BYTES: Final = 8
_NEXT = """
SELECT seq, CAST(tenant AS TEXT), CAST(kind AS TEXT), CAST(id AS TEXT), CAST(session AS TEXT),
    CAST(used AS REAL), CAST(body AS BLOB), CAST(head AS BLOB)
FROM entries LEFT JOIN heads ON owner = seq WHERE seq > ? ORDER BY seq LIMIT 1
"""
_ITEMS = "SELECT CAST(id AS TEXT), CAST(body AS BLOB) FROM items WHERE owner = ? ORDER BY seq"
_TABLES = ("items", "heads", "tags", "leavings", "entries")
# Their triggers have changed it.
_COUNT = "INSERT INTO totals SELECT tenant, sum(nbytes) FROM objects GROUP BY tenant"


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
    head: bytes | None  # None: all of it is plain text, or some items are sealed already


def bring_over(table: SqliteTable, key_of: KeyOf, mark: Path) -> None:
    """Bring over all that is there of earlier releases. Raises ``StoreFailed``."""
    with table.reading() as db:
        there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone()
    if there:
        _bring_all(table, key_of, takes_plain=not mark.exists())
    if not mark.exists():
        table.pragma("wal_checkpoint(TRUNCATE)")  # of plain text
        try:
            mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark.touch(0o600)
        except OSError as error:
            log.warning("plain text of an earlier release would still be believed: %s", error)


def _bring_all(table: SqliteTable, key_of: KeyOf, *, takes_plain: bool) -> None:
    store, seq, brought, stay = ObjectStore(table, key_of), 0, 0, 0
    with table.writing() as db:
        db.execute("CREATE TABLE IF NOT EXISTS heads (owner INTEGER PRIMARY KEY, head BLOB)")
    while True:
        with table.reading() as db:
            if (row := db.execute(_NEXT, (seq,)).fetchone()) is None:
                break
            entry = _OlderEntry(*row)
            parts = db.execute(_ITEMS, (seq := entry.seq,)).fetchall()
        made = None
        try:
            if entry.kind in KINDS and (takes_plain or entry.head is not None):
                made = _opened(key_of, entry, parts)
        except NotOurs:
            stay += 1
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
            pass
        # It may have been put by a start that failed before it was removed, and changed since.
        objects = store.of(entry.tenant)
        if made is not None and objects.find(entry.kind, entry.id, uses=False) is None:
            for _ in objects.put(entry.kind, *made):  # and leave a budget as it is
                brought += 1
                break
        with table.writing() as db:
            sql = "UPDATE objects SET used = ? WHERE tenant = ? AND name = ?"
            db.execute(sql, (entry.used, entry.tenant, f"{entry.kind}:{entry.id}"))
            for name in ("items WHERE owner", "heads WHERE owner", "entries WHERE seq"):
                db.execute(f"DELETE FROM {name} = ?", (seq,))
    with table.writing() as db:
        db.execute("DELETE FROM totals")
        db.execute(_COUNT)
        for name in () if stay else _TABLES:
            db.execute(f"DROP TABLE IF EXISTS {name}")
    words = (
        "brought over %d stored objects of an earlier release; %d, sealed with another secret or"
        " changed, stay for a start with the right store.secret_file (and data_dir)"
    )
    log.log(logging.ERROR if stay else logging.INFO, words, brought, stay)


def _opened(
    key_of: KeyOf, entry: _OlderEntry, parts: list[tuple[str, bytes]]
) -> tuple[Json, str, list[Item]]:
    """Return object, session and items. Raises ``NotOurs``: it is not as it was written."""
    seal, place = ObjectSeal(key_of, "sqlite", entry.tenant), (entry.kind, entry.id)
    numbers = [int.from_bytes(x[:_NUMBER_BYTES]) for _, x in parts]
    items = [
        Item(id, x)
        if entry.head is None and x.startswith(b"{")
        else Item(id, seal.open(x[_NUMBER_BYTES:], *place, "item", id, number))
        for number, (id, x) in zip(numbers, parts, strict=True)
    ]
    bodies = [_json(x.body) for x in items]
    if entry.head is None:
        object = _json(entry.body)
        [x["id"] for x in object.get("output") or ()]
        return object, entry.session, items
    head = msgspec.msgpack.decode(seal.open(entry.head, *place, "head"), type=_OlderHead)
    object = _json(seal.open(entry.body, *place, "body"))
    key, sum_ = key_of(entry.tenant, b"sums"), 0
    for number, item in zip(numbers, items, strict=True):
        sum_ ^= int.from_bytes(keyed_hash(key, "sqlite", entry.tenant, *place, item.id, number))
    if (len(items), sum_) != (head.num, int.from_bytes(head.sum)) or numbers != sorted(numbers):
        raise NotOurs
    own = len(items) - head.outputs
    if entry.kind == "response":
        object["output"] = bodies[own:]
    return object, head.session, items[:own]


def _json(body: bytes) -> Json:
    return msgspec.json.decode(body, type=Json)
