"""Stored objects in a SQLite file: the place for one gateway."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gateway.stored.sqlite_file import SqliteFile
from gateway.stored.table import (
    ROW_BYTES,
    SLICE_BYTES,
    SLICE_ITEMS,
    StoredLimits,
    StoreFailed,
    Top,
    Write,
    size_of,
)

TOUCH_EVERY_S = 60.0  # a use within this of the last one is not written down
MAX_TOUCHED = 1024
# A row without a name is deleted; its pages are there yet. ``totals`` has each tenant's bytes.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL, name TEXT, head BLOB NOT NULL, used REAL NOT NULL,
    nbytes INTEGER NOT NULL, UNIQUE (tenant, name)
);
CREATE INDEX IF NOT EXISTS by_tenants_use ON objects (tenant, used, number);
CREATE INDEX IF NOT EXISTS by_last_use ON objects (used);
CREATE TABLE IF NOT EXISTS pages (
    object INTEGER NOT NULL, page INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (object, page)
);
CREATE TABLE IF NOT EXISTS terms (
    tenant TEXT NOT NULL, term BLOB NOT NULL, object INTEGER NOT NULL,
    PRIMARY KEY (tenant, term, object)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_listed ON terms (object);
CREATE TABLE IF NOT EXISTS totals (tenant TEXT PRIMARY KEY, nbytes INTEGER NOT NULL);
"""
_ONE = "FROM objects WHERE tenant = ? AND name = ?"


class SqliteTable:
    """Implements ``table.Table`` in the file at ``path``."""

    place = "sqlite"

    def __init__(
        self,
        path: Path,
        limits: StoredLimits,
        clock: Callable[[], float] = time.time,
        *,
        keeps_damaged: bool = True,
    ) -> None:
        """
        Args:
            clock: gives seconds since 1970.
            keeps_damaged: see ``SqliteFile``.

        Raises:
            StoreFailed: there can be no file.
        """
        self.limits = limits
        self._clock = clock
        self._touched: dict[int, float] = {}  # uses that are not written down yet
        self.file = SqliteFile(path, _SCHEMA, keeps_damaged=keeps_damaged)

    def find_all(self, tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        sql = f"SELECT number, CAST(head AS BLOB), CAST(used AS REAL) {_ONE}"
        with self.file.reading() as db:
            rows = [db.execute(sql, (tenant, x)).fetchone() for x in names]
        now = self._clock()
        for number, _, used in filter(None, rows):
            if uses and now - used > TOUCH_EVERY_S and len(self._touched) < MAX_TOUCHED:
                self._touched[number] = now
        return [x and Top(*x[:2]) for x in rows]

    def pages(self, tenant: str, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        sql = "SELECT CAST(content AS BLOB) FROM pages WHERE object = ? AND page = ?"
        with self.file.reading() as db:
            object = db.execute(f"SELECT number {_ONE}", (tenant, name)).fetchone() or (None,)
            rows = [db.execute(sql, (*object, x)).fetchone() for x in numbers]
        return [x and x[0] for x in rows]

    def listed(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool, limit: int
    ) -> list[tuple[int, str]]:
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        if beyond is None:
            beyond = 0 if ascending else 1 << 62
        sql = (
            "SELECT number, name FROM terms JOIN objects ON number = object"
            f" WHERE terms.tenant = ? AND term = ? AND object {sign} ?"
            f" ORDER BY object {order} LIMIT ?"
        )
        with self.file.reading() as db:
            return db.execute(sql, (tenant, term, beyond, limit)).fetchall()

    def write(self, tenant: str, name: str, write: Write) -> bool:
        with self.file.writing() as db:
            row = db.execute(f"SELECT number, head, nbytes {_ONE}", (tenant, name)).fetchone()
            if write.was is not None and (row is None or row[1] != write.was):
                return False
            now = self._clock()
            if write.was is None:
                if row is not None:
                    _hide(db, row[0])
                sql = (
                    "INSERT INTO objects (tenant, name, head, used, nbytes) VALUES (?, ?, ?, ?, ?)"
                )
                nbytes = size_of(write.head, write.pages)
                made = db.execute(sql, (tenant, name, write.head, now, nbytes))
                assert made.lastrowid is not None
                number, grown = made.lastrowid, nbytes
            else:
                number, head, nbytes = row
                sql = "SELECT length(content) FROM pages WHERE object = ? AND page = ?"
                gone = [db.execute(sql, (number, x)).fetchone() or (0,) for x in write.dropped]
                grown = size_of(write.head, write.pages) - len(head) - ROW_BYTES
                grown -= sum(x + ROW_BYTES for (x,) in gone)
                sql = "UPDATE objects SET head = ?, used = ?, nbytes = nbytes + ? WHERE number = ?"
                db.execute(sql, (write.head, now, grown, number))
                sql = "DELETE FROM pages WHERE object = ? AND page = ?"
                db.executemany(sql, [(number, x) for x in write.dropped])
                sql = "DELETE FROM terms WHERE tenant = ? AND term = ? AND object = ?"
                db.executemany(sql, [(tenant, x, number) for x in write.left])
            pages = [(number, x, content) for x, content in write.pages.items()]
            db.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", pages)
            terms = [(tenant, x, number) for x in write.terms]
            db.executemany("INSERT OR IGNORE INTO terms VALUES (?, ?, ?)", terms)
            _count(db, tenant, grown)
            self._write_uses(db)
        return True

    def delete(self, tenant: str, name: str) -> bool:
        def hidden(db: sqlite3.Connection) -> bool:
            row = db.execute(f"SELECT number {_ONE}", (tenant, name)).fetchone()
            if row is not None:
                _hide(db, row[0])
            return row is not None

        return self.file.remove(hidden)

    def drop_copies(self) -> None:
        self.file.drop_damaged()

    def tidy(self, tenant: str) -> bool:
        with self.file.reading() as db:
            if self._outlived(db, tenant) is None:
                return False
        return self.file.remove(lambda db: self._tidied(db, tenant))

    def chores(self) -> Iterator[None]:
        oldest = self._clock() - self.limits.max_age_s
        stale = "SELECT tenant FROM objects WHERE used < ? LIMIT 1"
        while True:
            with self.file.reading() as db:
                row = db.execute(stale, (oldest,)).fetchone()
            if row is None or not self.tidy(row[0]):
                return
            yield

    def close(self) -> None:
        if self._touched:
            with suppress(StoreFailed), self.file.writing() as db:
                self._write_uses(db)
        self.file.close()

    def set_used(self, tenant: str, name: str, used: float) -> None:
        """Note that a row was used last then."""
        with self.file.writing() as db:
            sql = "UPDATE objects SET used = ? WHERE tenant = ? AND name = ?"
            db.execute(sql, (used, tenant, name))

    def _write_uses(self, db: sqlite3.Connection) -> None:
        touched, self._touched = self._touched, {}
        rows = [(used, number) for number, used in list(touched.items())]
        db.executemany("UPDATE objects SET used = ? WHERE number = ? AND name IS NOT NULL", rows)

    def _outlived(self, db: sqlite3.Connection, tenant: str) -> tuple[int, bool] | None:
        """Return the number of a row that is to go, and whether it is hidden already.

        It is deleted, too old, or the budget's last.
        """
        sql = (
            "SELECT number, name IS NULL, CAST(used AS REAL) FROM objects WHERE tenant = ?"
            " ORDER BY used, number LIMIT 1"
        )
        row = db.execute(sql, (tenant,)).fetchone()
        if row is None:
            return None
        sql = "SELECT nbytes FROM totals WHERE tenant = ?"
        (nbytes,) = db.execute(sql, (tenant,)).fetchone() or (0,)
        too_old = row[2] < self._clock() - self.limits.max_age_s
        goes = row[1] or too_old or nbytes > self.limits.tenant_bytes
        return (row[0], bool(row[1])) if goes else None

    def _tidied(self, db: sqlite3.Connection, tenant: str) -> bool:
        self._write_uses(db)
        row = self._outlived(db, tenant)
        if row is None:
            return False
        number, is_hidden = row
        if not is_hidden:
            _hide(db, number)
        sql = "SELECT page, length(content) FROM pages WHERE object = ? LIMIT ?"
        gone: list[tuple[int, int]] = []
        held = 0
        for page, nbytes in db.execute(sql, (number, SLICE_ITEMS)).fetchall():
            if gone and held + nbytes > SLICE_BYTES:
                break
            gone.append((number, page))
            held += nbytes
        if gone:
            db.executemany("DELETE FROM pages WHERE object = ? AND page = ?", gone)
        left = db.execute("SELECT 1 FROM pages WHERE object = ? LIMIT 1", (number,)).fetchone()
        if left is None:
            sql = "DELETE FROM objects WHERE number = ? RETURNING CAST(nbytes AS INTEGER)"
            ((nbytes,),) = db.execute(sql, (number,)).fetchall()
            _count(db, tenant, -nbytes)
        return True


def _hide(db: sqlite3.Connection, number: int) -> None:
    """Delete a row but for its pages, which cannot be found without it."""
    sql = "UPDATE objects SET name = NULL, head = x'', used = -1 WHERE number = ?"
    db.execute(sql, (number,))
    db.execute("DELETE FROM terms WHERE object = ?", (number,))


def _count(db: sqlite3.Connection, tenant: str, nbytes: int) -> None:
    sql = (
        "INSERT INTO totals VALUES (?, ?)"
        " ON CONFLICT (tenant) DO UPDATE SET nbytes = nbytes + excluded.nbytes"
    )
    db.execute(sql, (tenant, nbytes))
