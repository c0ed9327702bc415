"""Entries in one SQLite file: the place of a single gateway.

Every change is one transaction in a write-ahead log, so a crash leaves it done or not done. What is
deleted is overwritten. Triggers keep each tenant's bytes, so that a budget is never a guess. A file
that cannot be read is put aside: what it held is lost, the gateway is not.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from gateway.stored.shelf import Entry, Item, Kind, Limits, Page, Query, StoreFailed

log = logging.getLogger("thermocline.gateway")

BUSY_S = 5.0
TOUCH_EVERY_S = 60.0  # a use within this of the last one is not written down
TRIM_EVERY_S = 600.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL, kind TEXT NOT NULL, id TEXT NOT NULL, session TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, body BLOB NOT NULL,
    UNIQUE (tenant, kind, id)
);
CREATE INDEX IF NOT EXISTS by_session ON entries (tenant, session);
CREATE INDEX IF NOT EXISTS by_use ON entries (tenant, used, seq);
CREATE INDEX IF NOT EXISTS by_age ON entries (used);
CREATE TABLE IF NOT EXISTS items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES entries (seq) ON DELETE CASCADE,
    tenant TEXT NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS by_item ON items (tenant, id);
CREATE TABLE IF NOT EXISTS totals (tenant TEXT PRIMARY KEY, nbytes INTEGER NOT NULL);
"""
# Bytes that SQLite takes for a row besides its body, about.
_ROW_BYTES = 200
_COUNTED = """
CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} BEGIN
    INSERT INTO totals VALUES ({row}.tenant, {sign} (length({row}.body) + {overhead}))
    ON CONFLICT (tenant) DO UPDATE SET nbytes = nbytes + excluded.nbytes;
END;
"""
_RESIZED = """
CREATE TRIGGER IF NOT EXISTS entries_body AFTER UPDATE OF body ON entries BEGIN
    UPDATE totals SET nbytes = nbytes + length(new.body) - length(old.body)
    WHERE tenant = new.tenant;
END;
"""


class SqliteShelf:
    """Implements ``shelf.Shelf`` in the file at ``path``. Belongs to the thread that made it."""

    def __init__(self, path: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        """Open or make the file, readable by its owner only.

        Args:
            clock: gives seconds since 1970.

        Raises:
            StoreFailed: there can be no file.
        """
        self._limits = limits
        self._clock = clock
        self._trimmed = 0.0
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = _opened(path)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"{path} cannot be used: {error}") from error

    def put(self, tenant: str, entry: Entry, items: Sequence[Item] = ()) -> bool:
        bodies = [entry.body, *(x.body for x in items)]
        if sum(len(x) + _ROW_BYTES for x in bodies) > self._limits.tenant_bytes:
            return False
        now = self._clock()
        with self._change() as db:
            self._delete(tenant, entry.kind, entry.id)
            row = (tenant, entry.kind, entry.id, entry.session, now, now, entry.body)
            names = "tenant, kind, id, session, created, used, body"
            owner = db.execute(
                f"INSERT INTO entries ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row
            ).lastrowid
            assert owner is not None
            self._add_items(tenant, owner, items)
            self._trim(tenant, now)
        return True

    def get(self, tenant: str, kind: Kind, id: str) -> Entry | None:
        with self._change() as db:
            row = db.execute(
                "SELECT seq, session, body, created, used FROM entries"
                " WHERE tenant = ? AND kind = ? AND id = ?",
                (tenant, kind, id),
            ).fetchone()
            if row is None:
                return None
            seq, session, body, created, used = row
            if (now := self._clock()) - used > TOUCH_EVERY_S:
                db.execute("UPDATE entries SET used = ? WHERE seq = ?", (now, seq))
        return Entry(kind, id, session, body, created)

    def change(self, tenant: str, kind: Kind, id: str, body: bytes) -> bool:
        with self._change() as db:
            found = db.execute(
                "UPDATE entries SET body = ?, used = ? WHERE tenant = ? AND kind = ? AND id = ?",
                (body, self._clock(), tenant, kind, id),
            )
            return found.rowcount > 0

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        with self._change():
            return self._delete(tenant, kind, id)

    def entries(
        self, tenant: str, kind: Kind, query: Query, wanted: Callable[[bytes], bool]
    ) -> Page:
        scope = "FROM entries WHERE tenant = ? AND kind = ?"
        with self._change() as db:
            return _page(db, scope, (tenant, kind), query, wanted)

    def append(self, tenant: str, kind: Kind, id: str, items: Sequence[Item]) -> bool:
        with self._change() as db:
            owner = self._seq(tenant, kind, id)
            if owner is None:
                return False
            self._add_items(tenant, owner, items)
            db.execute("UPDATE entries SET used = ? WHERE seq = ?", (self._clock(), owner))
            self._trim(tenant, self._clock())
            return self._seq(tenant, kind, id) is not None

    def items(self, tenant: str, kind: Kind, id: str, query: Query) -> Page | None:
        with self._change() as db:
            owner = self._seq(tenant, kind, id)
            if owner is None:
                return None
            return _page(db, "FROM items WHERE owner = ?", (owner,), query, lambda body: True)

    def delete_item(self, tenant: str, kind: Kind, id: str, item: str) -> bool:
        with self._change() as db:
            owner = self._seq(tenant, kind, id)
            if owner is None:
                return False
            db.execute("DELETE FROM items WHERE owner = ? AND id = ?", (owner, item))
            return True

    def find_item(self, tenant: str, item: str, owner: str | None = None) -> bytes | None:
        sql = (
            "SELECT items.body FROM items JOIN entries ON entries.seq = items.owner"
            " WHERE items.tenant = ? AND items.id = ? AND (? IS NULL OR entries.id = ?)"
            " ORDER BY items.seq DESC LIMIT 1"
        )
        with self._change() as db:
            row = db.execute(sql, (tenant, item, owner, owner)).fetchone()
        return bytes(row[0]) if row else None

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        sql = (
            "SELECT id FROM entries WHERE tenant = ? AND kind = ? AND session = ?"
            " ORDER BY seq DESC LIMIT 1"
        )
        with self._change() as db:
            row = db.execute(sql, (tenant, kind, session)).fetchone()
        return str(row[0]) if row else None

    def forget(self, tenant: str, session: str) -> int:
        with self._change() as db:
            found = db.execute(
                "DELETE FROM entries WHERE tenant = ? AND session = ?", (tenant, session)
            )
            return found.rowcount

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Run a block in one transaction. Raises ``StoreFailed``."""
        try:
            with self._db:
                yield self._db
        except sqlite3.Error as error:
            raise StoreFailed(f"the store of responses failed: {error}") from error

    def _seq(self, tenant: str, kind: Kind, id: str) -> int | None:
        sql = "SELECT seq FROM entries WHERE tenant = ? AND kind = ? AND id = ?"
        row = self._db.execute(sql, (tenant, kind, id)).fetchone()
        return int(row[0]) if row else None

    def _delete(self, tenant: str, kind: Kind, id: str) -> bool:
        sql = "DELETE FROM entries WHERE tenant = ? AND kind = ? AND id = ?"
        return self._db.execute(sql, (tenant, kind, id)).rowcount > 0

    def _add_items(self, tenant: str, owner: int, items: Sequence[Item]) -> None:
        self._db.executemany(
            "INSERT INTO items (owner, tenant, id, body) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (owner, id) DO NOTHING",
            [(owner, tenant, item.id, item.body) for item in items],
        )

    def _trim(self, tenant: str, now: float) -> None:
        """Remove what is too old, now and then, and what is over the tenant's budget."""
        if now - self._trimmed > TRIM_EVERY_S:
            self._trimmed = now
            self._db.execute("DELETE FROM entries WHERE used < ?", (now - self._limits.max_age_s,))
        total = "SELECT nbytes FROM totals WHERE tenant = ?"
        oldest = "SELECT seq FROM entries WHERE tenant = ? ORDER BY used, seq LIMIT 1"
        while self._db.execute(total, (tenant,)).fetchone()[0] > self._limits.tenant_bytes:
            (seq,) = self._db.execute(oldest, (tenant,)).fetchone()
            self._db.execute("DELETE FROM entries WHERE seq = ?", (seq,))


def _opened(path: Path) -> sqlite3.Connection:
    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # busy, or no room: the file is no wreck
            raise
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        log.error("%s is damaged (%s); it was put aside as %s", path, error, aside.name)
        return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    path.chmod(0o600)  # SQLite gives its log the same
    db = sqlite3.connect(path, timeout=BUSY_S)
    try:
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            "secure_delete = ON",
            "recursive_triggers = ON",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
        with closing(db.executescript(_SCHEMA + _triggers())):
            db.execute("SELECT count(*) FROM entries").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def _triggers() -> str:
    rows = [("INSERT", "new", "+"), ("DELETE", "old", "-")]
    return _RESIZED + "".join(
        _COUNTED.format(table=table, event=event, row=row, sign=sign, overhead=_ROW_BYTES)
        for table in ("entries", "items")
        for event, row, sign in rows
    )


def _page(
    db: sqlite3.Connection,
    scope: str,
    args: tuple[object, ...],
    query: Query,
    wanted: Callable[[bytes], bool],
) -> Page:
    """Read a page of a list of rows with ``seq``, ``id`` and ``body``."""
    beyond, order = (">", "ASC") if query.ascending else ("<", "DESC")
    sql = f"SELECT id, body {scope}"
    if query.after is not None:
        found = db.execute(f"SELECT seq {scope} AND id = ?", (*args, query.after)).fetchone()
        if found is None:
            return Page([], False)
        sql += f" AND seq {beyond} ?"
        args = (*args, found[0])
    rows: list[Item] = []
    with closing(db.execute(f"{sql} ORDER BY seq {order}", args)) as cursor:
        for id, body in cursor:
            if not wanted(body):
                continue
            if query.limit is not None and len(rows) >= query.limit:
                return Page(rows, True)
            rows.append(Item(id, body))
    return Page(rows, False)
