"""The SQLite file of stored objects: opened, read by many threads at once, written by one.

Every change is one short transaction in a write-ahead log, so a crash leaves it done or not done.
What is deleted is overwritten. A file that cannot be read is put aside for a week: what it held is
lost, the gateway is not.

On a full disk a deletion needs room itself, for its log. A file beside keeps that room.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.stored.table import StoreFailed, Trouble

log = logging.getLogger("thermocline.gateway")

T = TypeVar("T")
BUSY_S = 5.0
RESERVE_BYTES = 8 << 20
KEEP_DAMAGED_S = 7 * 86400.0
_FULL = frozenset({"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"})


class SqliteFile:
    """One file, with a connection for each thread that uses it."""

    def __init__(self, path: Path, schema: str, *, keeps_damaged: bool) -> None:
        """Open or make the file, readable by its owner only.

        Args:
            schema: makes what is not there yet, in little time however large the file is.
            keeps_damaged: a damaged file may stay beside, though it may hold plain text.

        Raises:
            StoreFailed: there can be no file.
        """
        self._path = path
        self._damaged = path.with_name(f"{path.name}.damaged")
        self._keeps_damaged = keeps_damaged
        self._reserve = path.with_name(f"{path.name}.reserve")
        self._writes = threading.Lock()
        self._mine = threading.local()
        self._all: list[sqlite3.Connection] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._drop_old_damaged()
            self._open(schema)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"{path} cannot be used: {error}") from error
        self._take_reserve()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """See one state of the file. Raises ``StoreFailed``."""
        with _failing():
            db = self._connection()
            db.execute("BEGIN")
            try:
                yield db
            finally:
                if db.in_transaction:  # SQLite ends one itself that fails
                    db.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a block in one transaction, after those of other threads. Raises ``StoreFailed``."""
        if not self._writes.acquire(timeout=BUSY_S):
            raise StoreFailed("others write for too long", "busy")
        try:
            with _failing(), _transaction(self._connection()) as db:
                yield db
        finally:
            self._writes.release()

    def remove(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do ``work``, which removes something, in one transaction, on a full disk too.

        There what is removed is not overwritten at once. It is sealed.

        Raises:
            StoreFailed: it cannot be done.
        """
        try:
            with self.writing() as db:
                return work(db)
        except StoreFailed as error:
            if error.trouble != "full":
                raise
        self._reserve.unlink(missing_ok=True)
        try:
            with _failing():
                self._connection().execute("PRAGMA secure_delete = FAST").fetchall()
            with self.writing() as db:
                return work(db)
        finally:
            with suppress(StoreFailed):
                self.shorten_log()
                with _failing():
                    self._connection().execute("PRAGMA secure_delete = ON").fetchall()
            self._take_reserve()

    def shorten_log(self) -> None:
        """Bring the log's content into the file, and cut the log to nothing."""
        with _failing():
            self._connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def drop_damaged(self) -> None:
        """Remove the damaged file that was put aside, if there is one. Raises ``StoreFailed``."""
        try:
            self._damaged.unlink(missing_ok=True)
        except OSError as error:
            raise StoreFailed(f"{self._damaged} cannot be removed: {error.strerror}") from error

    def close(self) -> None:
        for db in self._all:
            db.close()
        self._all.clear()

    def _connection(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._mine, "db", None)
        if db is None:
            db = self._mine.db = self._connect()
        return db

    def _connect(self) -> sqlite3.Connection:
        # The last one is closed by another thread than its own.
        db = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        # Bytes that are no text become a text that nothing has, not an error of the whole file.
        db.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            for pragma in ("synchronous = NORMAL", "secure_delete = ON", "foreign_keys = OFF"):
                db.execute(f"PRAGMA {pragma}").fetchall()
        except sqlite3.Error:
            db.close()
            raise
        self._all.append(db)
        return db

    def _open(self, schema: str) -> None:
        try:
            self._prepare(schema)
        except sqlite3.OperationalError:  # busy, or no room: the file is no wreck
            if not self._reserve.exists():
                raise
            self._reserve.unlink()
            self._prepare(schema)
        except sqlite3.DatabaseError as error:
            self._put_aside(error)
            self._prepare(schema)

    def _prepare(self, schema: str) -> None:
        self._path.touch(mode=0o600)
        self._path.chmod(0o600)  # SQLite gives its log the same
        try:
            db = self._connection()
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            with closing(db.executescript(schema)):
                db.execute("SELECT number FROM objects ORDER BY number DESC LIMIT 1").fetchone()
        except sqlite3.Error:
            self.close()
            self._mine = threading.local()
            raise

    def _put_aside(self, error: sqlite3.Error) -> None:
        if self._keeps_damaged:
            self._path.replace(self._damaged)
            os.utime(self._damaged)  # kept from now on
        else:
            self._path.unlink()
        for name in ("-wal", "-shm"):
            self._path.with_name(self._path.name + name).unlink(missing_ok=True)
        kept = f"put aside as {self._damaged.name}" if self._keeps_damaged else "removed"
        log.error("%s is damaged (%s); it was %s", self._path, error, kept)

    def _drop_old_damaged(self) -> None:
        with suppress(FileNotFoundError):
            age_s = time.time() - self._damaged.stat().st_mtime
            if age_s > KEEP_DAMAGED_S or not self._keeps_damaged:
                self._damaged.unlink()

    def _take_reserve(self) -> None:
        """Keep room for deletions; where there is none now, it is tried again after the next."""
        try:
            with self._reserve.open("ab") as file:
                self._reserve.chmod(0o600)
                missing = RESERVE_BYTES - file.tell()
                if missing > 0:  # random: a file system that packs must not save the room
                    file.write(os.urandom(missing))
        except OSError as error:
            log.warning("no room is kept for deletions on a full disk: %s", error.strerror)
            with suppress(OSError):
                self._reserve.unlink()


def make_mark(path: Path) -> None:
    """Make an empty file, if it is not there, that outlives a power cut. Raises ``StoreFailed``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, flags in ((path, os.O_CREAT), (path.parent, os.O_DIRECTORY)):
            descriptor = os.open(name, os.O_RDONLY | flags, 0o600)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        trouble: Trouble = "full" if name in _FULL else "busy" if "BUSY" in name else "unavailable"
        raise StoreFailed(f"the store of responses failed: {error}", trouble) from error


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
