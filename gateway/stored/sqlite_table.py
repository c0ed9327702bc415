"""Stored objects in a SQLite file, for one gateway.

Many threads read the file at once, one writes. Every change is one short transaction in a
write-ahead log, so a crash leaves it done or not done. Deleted data are overwritten. A damaged
file, found at the start or in use, is renamed and kept for a week; its objects are lost, and the
gateway continues with a new file. A file that a newer release wrote is left as it is. A second file
reserves the room that a deletion needs on a full disk.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from gateway.stored.table import (
    SLICE_BYTES,
    SLICE_ITEMS,
    Steps,
    StoredLimits,
    StoreFailed,
    Top,
    Trouble,
    Write,
)

T = TypeVar("T")
log = logging.getLogger("thermocline.gateway")
BUSY_S: Final = 5.0
RESERVE_BYTES: Final = 8 << 20
TOUCH_EVERY_S: Final = 60.0  # a use so soon after the last one is not noted
MAX_TOUCHED: Final = 1024
KEEP_DAMAGED_S: Final = 7 * 86400.0
# The highest known ``user_version``; a release set it when all of a file was encrypted.
SEALED: Final = 2
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")  # prefixes of error names
_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"})
# A row whose name is NULL is deleted, but its pages still exist. ``totals``: each tenant's bytes.
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA secure_delete = ON;
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
_PAGE = (
    f"SELECT CAST(content AS BLOB) FROM pages WHERE page = ? AND object = (SELECT number {_ONE})"
)
_LISTED = f"""
SELECT number, name FROM terms JOIN objects ON number = object
WHERE terms.tenant = ? AND term = ? AND object %s ? ORDER BY object %s LIMIT {SLICE_ITEMS}
"""
_JOIN = "INSERT OR IGNORE INTO terms (object, term, tenant) VALUES (?, ?, ?)"
_LEAVE = "DELETE FROM terms WHERE object = ? AND term = ? AND tenant = ?"
_COUNT = """
INSERT INTO totals VALUES (?, ?)
ON CONFLICT (tenant) DO UPDATE SET nbytes = nbytes + excluded.nbytes
"""
# The row to remove next: one that is deleted, too old, or unused for longest beyond the budget.
_OUTLIVED = """
SELECT number FROM
    (SELECT number, used FROM objects WHERE tenant = ?1 ORDER BY used, number LIMIT 1)
WHERE CAST(used AS REAL) < ? OR ? < (SELECT nbytes FROM totals WHERE tenant = ?1)
"""
# Drops a slice of a row's pages, at least one.
_DROP_PAGES = f"""
DELETE FROM pages WHERE object = ?1 AND page IN (
    SELECT page FROM (
        SELECT page, nbytes, sum(nbytes) OVER (ORDER BY page) AS so_far FROM
        (SELECT page, length(content) AS nbytes FROM pages WHERE object = ?1
            ORDER BY page LIMIT {SLICE_ITEMS})
    ) WHERE so_far <= {SLICE_BYTES} OR so_far = nbytes
)
"""
_DROP = """
DELETE FROM objects WHERE number = ?1 AND NOT EXISTS (SELECT 1 FROM pages WHERE object = ?1)
RETURNING tenant, -CAST(nbytes AS INTEGER)
"""


class SqliteTable:
    """Implements ``table.Table`` in a file, which is created if it does not exist.

    Raises:
        StoreFailed: the file cannot be created or opened.
    """

    place = "sqlite"

    def __init__(
        self,
        path: Path,
        limits: StoredLimits,
        clock: Callable[[], float] = time.time,  # Unix time
        *,
        keeps_damaged: bool = True,  # rename a damaged file, though it may have plain text
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._path = path
        self._damaged = path.with_name(f"{path.name}.damaged")
        self._reserve = path.with_name(f"{path.name}.reserve")
        self._keeps_damaged = keeps_damaged
        self._touched: dict[int, float] = {}  # times of use that are not written yet, by row
        self._writes = threading.Lock()
        self._mine = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._file = 0  # the number of the present file: earlier ones were found damaged
        self._replacing = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"{path} cannot be used: {error}") from error
        self._take_reserve()

    # ---- rows

    def find_all(self, tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        sql = f"SELECT number, CAST(head AS BLOB), CAST(used AS REAL) {_ONE}"
        with self.reading() as db:
            rows = [db.execute(sql, (tenant, x)).fetchone() for x in names]
        now = self._clock()
        for number, _, used in filter(None, rows):
            if uses and now - used > TOUCH_EVERY_S and len(self._touched) < MAX_TOUCHED:
                self._touched[number] = now
        return [x and Top(*x[:2]) for x in rows]

    def pages(self, tenant: str, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        with self.reading() as db:
            rows = [db.execute(_PAGE, (x, tenant, name)).fetchone() for x in numbers]
        return [x and x[0] for x in rows]

    def listed(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool
    ) -> list[tuple[int, str]]:
        sql = _LISTED % ((">", "ASC") if ascending else ("<", "DESC"))
        if beyond is None:
            beyond = 0 if ascending else 1 << 62
        with self.reading() as db:
            return db.execute(sql, (tenant, term, beyond)).fetchall()

    def write(self, tenant: str, name: str, write: Write) -> bool:
        sql = f"SELECT number, head, CAST(nbytes AS INTEGER) {_ONE}"
        with self.writing() as db:
            number, head, nbytes = db.execute(sql, (tenant, name)).fetchone() or (0, None, 0)
            if write.was is None:
                _hide(db, number)
                sql = "INSERT INTO objects VALUES (NULL, ?, ?, '', 0, 0)"
                number, nbytes = db.execute(sql, (tenant, name)).lastrowid, 0
            elif head != write.was:
                return False
            sql = "UPDATE objects SET head = ?, used = ?, nbytes = ? WHERE number = ?"
            db.execute(sql, (write.head, self._clock(), write.nbytes, number))
            db.execute(_COUNT, (tenant, write.nbytes - nbytes))
            sql = "DELETE FROM pages WHERE object = ? AND page = ?"
            db.executemany(sql, [(number, x) for x in write.dropped])
            pages = [(number, *x) for x in write.pages.items()]
            db.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", pages)
            db.executemany(_LEAVE, [(number, x, tenant) for x in write.left])
            db.executemany(_JOIN, [(number, x, tenant) for x in write.terms])
            self._write_uses(db)
        return True

    def delete(self, tenant: str, names: Sequence[str]) -> int:
        def hidden(db: sqlite3.Connection) -> int:
            found = [db.execute(f"SELECT number {_ONE}", (tenant, x)).fetchone() for x in names]
            return sum(_hide(db, *x) for x in found if x)

        removed = self.remove(hidden) if names else 0
        try:
            self._damaged.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFailed(f"{self._damaged} cannot be removed: {error.strerror}") from error
        return removed

    def tidy(self, tenant: str) -> bool:
        def outlived(db: sqlite3.Connection) -> Any:
            of = (tenant, self._oldest(), self.limits.tenant_bytes)
            return db.execute(_OUTLIVED, of).fetchone()

        def tidied(db: sqlite3.Connection) -> bool:
            self._write_uses(db)
            if (found := outlived(db)) is None:
                return False
            _hide(db, *found)
            db.execute(_DROP_PAGES, found)
            db.executemany(_COUNT, db.execute(_DROP, found).fetchall())
            return True

        with self.reading() as db:
            if outlived(db) is None:
                return False
        return self.remove(tidied)

    def chores(self) -> Steps[None]:
        while True:
            with self.reading() as db:
                sql = "SELECT tenant FROM objects WHERE used < ? LIMIT 1"
                row = db.execute(sql, (self._oldest(),)).fetchone()
            if row is None or not self.tidy(*row):
                return
            yield 0

    def close(self) -> None:
        if self._touched:
            with suppress(StoreFailed), self.writing() as db:
                self._write_uses(db)
        for db in reversed(self._all):  # an older file's, closed last, would remove the present log
            db.close()

    def _oldest(self) -> float:
        """Return the time of last use before which rows are removed; deleted rows have -1."""
        return max(0.0, self._clock() - self.limits.max_age_s)

    def _write_uses(self, db: sqlite3.Connection) -> None:
        touched, self._touched = self._touched, {}
        sql = "UPDATE objects SET used = ? WHERE number = ? AND name IS NOT NULL"
        db.executemany(sql, [(used, number) for number, used in list(touched.items())])

    # ---- the file

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Use this thread's connection inside the context. Raises ``StoreFailed``.

        A file that is found damaged is put aside; the next use creates a new one.
        """
        file = self._file
        try:
            yield self._connection()
        except (sqlite3.Error, OSError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(_DAMAGED):
                self._replace(file, error)
            trouble: Trouble = "busy" if "BUSY" in name else "unavailable"
            if name in _FULL:
                trouble = "full"
            raise StoreFailed(f"the store of responses failed: {error}", trouble) from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run the context in one transaction, one thread at a time. Raises ``StoreFailed``."""
        if not self._writes.acquire(timeout=BUSY_S):
            raise StoreFailed("other writers take too long", "busy")
        try:
            file = self._file
            with self.reading() as db:
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
            if file != self._file:
                raise StoreFailed("the file was found damaged meanwhile, and put aside")
        finally:
            self._writes.release()

    def remove(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work``, which removes data, in one transaction; on a full disk, use the reserve.

        In that case the removed data, which are encrypted, are not overwritten at once. Raises
        ``StoreFailed``.
        """
        try:
            with self.writing() as db:
                return work(db)
        except StoreFailed as error:
            if error.trouble != "full":
                raise
        self._reserve.unlink(missing_ok=True)
        try:
            self.pragma("secure_delete = FAST")
            with self.writing() as db:
                return work(db)
        finally:
            with suppress(StoreFailed):
                self.pragma("wal_checkpoint(TRUNCATE)")
                self.pragma("secure_delete = ON")
            self._take_reserve()

    def pragma(self, words: str) -> Any:
        with self.reading() as db:
            return db.execute(f"PRAGMA {words}").fetchone()

    def _connection(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._mine, "db", None)
        if db is None or self._mine.file != self._file:
            file = self._file
            self._path.touch(mode=0o600)
            # ``check_same_thread``: another thread closes the connection.
            db = sqlite3.connect(
                self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            # Bytes that are no UTF-8 become a text that matches nothing, instead of an error.
            db.text_factory = partial(str, encoding="utf-8", errors="replace")
            try:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version > SEALED:
                    why = f"a newer release wrote it, in form {version}"
                    raise StoreFailed(f"{self._path} cannot be used: {why}")
                db.executescript(_SCHEMA)
                db.execute("SELECT number FROM objects ORDER BY number DESC LIMIT 1").fetchone()
            except (sqlite3.Error, StoreFailed):
                db.close()
                raise
            self._all.append(db)
            self._mine.db, self._mine.file = db, file
        return db

    def _open(self, *, again: bool = True) -> None:
        with suppress(FileNotFoundError):
            age_s = time.time() - self._damaged.stat().st_mtime
            if age_s > KEEP_DAMAGED_S or not self._keeps_damaged:
                self._damaged.unlink()
        self._path.touch(mode=0o600)
        self._path.chmod(0o600)  # SQLite creates its log with the same mode
        try:
            self._connection()
        except sqlite3.DatabaseError as error:
            is_wreck = not isinstance(error, sqlite3.OperationalError)  # that is busy, or no room
            if not again or not (is_wreck or self._reserve.exists()):
                raise
            if is_wreck:
                self._put_aside(error)
            else:
                self._reserve.unlink()
            self._open(again=False)

    def _replace(self, file: int, error: Exception) -> None:
        """Put aside a file that a thread has found damaged; only once if several threads do."""
        with self._replacing:
            if file != self._file:
                return
            try:
                self._put_aside(error)
            except OSError as failed:
                why = f"{self._path} is damaged, and cannot be moved: {failed}"
                raise StoreFailed(why) from error
            finally:
                if not self._path.exists():
                    self._touched = {}
                    self._file += 1

    def _put_aside(self, error: Exception) -> None:
        if self._keeps_damaged:
            self._path.replace(self._damaged)
            os.utime(self._damaged)  # the week begins now
        for name in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + name).unlink(missing_ok=True)
        kept = f"put aside as {self._damaged.name}" if self._keeps_damaged else "removed"
        log.error("%s is damaged (%s); it was %s", self._path, error, kept)

    def _take_reserve(self) -> None:
        """Reserve room for deletions; if there is none now, try again after the next deletion."""
        try:
            with self._reserve.open("ab") as file:
                self._reserve.chmod(0o600)
                # Random bytes, which a compressing file system cannot shrink.
                file.write(os.urandom(max(0, RESERVE_BYTES - file.tell())))
        except OSError as error:
            log.warning("no room is reserved for deletions on a full disk: %s", error.strerror)
            with suppress(OSError):
                self._reserve.unlink()


def _hide(db: sqlite3.Connection, number: int) -> int:
    """Delete a row, except for its pages, which nothing can find then; return 1."""
    sql = "UPDATE objects SET name = NULL, head = x'', used = -1 WHERE number = ?"
    db.execute(sql, (number,))
    db.execute("DELETE FROM terms WHERE object = ?", (number,))
    return 1
