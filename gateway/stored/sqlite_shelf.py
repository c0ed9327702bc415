"""Entries in one SQLite file: the place of a single gateway.

Triggers keep each tenant's bytes, so that a budget is never a guess. The tables of entries and
items are those of older releases, which wrote plain text into them: such an entry has no head. Once
all are sealed, a mark outside of the file says so, and no plain text in it is believed any more. A
deleted entry leaves its items, which ``tidy`` removes piece by piece.

SQLite keeps a value of any type in any column, and a process that can write the file may have put
one there. So what is read is cast to its column's type: then it is a seal that does not open.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from gateway.stored.shelf import (
    SLICE_ITEMS,
    Change,
    Found,
    Kind,
    Limits,
    Listed,
    Part,
    Row,
    Span,
    StoreFailed,
    slice_of,
)
from gateway.stored.sqlite_file import SqliteFile, make_mark
from gateway.stored.sqlite_schema import ROW_BYTES, schema

TOUCH_EVERY_S = 60.0  # a use within this of the last one is not written down
MAX_TOUCHED = 1024
_SEALED = 2  # the user_version by which releases before the mark knew that all is sealed
_ONE = "tenant = ? AND kind = ? AND id = ?"


class SqliteShelf:
    """Implements ``shelf.Shelf`` in the file at ``path``."""

    place = "sqlite"

    def __init__(
        self,
        path: Path,
        limits: Limits,
        clock: Callable[[], float] = time.time,
        *,
        mark: Path,
        keeps_damaged: bool = True,
    ) -> None:
        """
        Args:
            clock: gives seconds since 1970.
            mark: a file that is there once all is sealed; it lies where the secret does.
            keeps_damaged: see ``SqliteFile``.

        Raises:
            StoreFailed: there can be no file.
        """
        self._limits = limits
        self._clock = clock
        self._touched: dict[int, float] = {}  # uses that are not written down yet
        self._file = SqliteFile(path, schema(), keeps_damaged=keeps_damaged)
        self._mark = mark
        some = "SELECT 1 FROM entries, pragma_user_version WHERE user_version < ? LIMIT 1"
        with self._file.reading() as db:
            self._has_old = bool(db.execute(some, (_SEALED,)).fetchone()) and not mark.exists()
        if not self._has_old:
            with suppress(StoreFailed):  # ``chores`` tries again
                make_mark(mark)

    def find(
        self, tenant: str, kind: Kind, ids: Sequence[str], uses: Collection[str] = ()
    ) -> list[Found | None]:
        sql = (
            "SELECT seq, CAST(session AS TEXT), length(body), CAST(used AS REAL),"
            f" CAST(head AS BLOB) FROM entries LEFT JOIN heads ON owner = seq WHERE {_ONE}"
        )
        with self._file.reading() as db:
            rows = [db.execute(sql, (tenant, kind, x)).fetchone() for x in ids]
        now = self._clock()
        found: list[Found | None] = []
        for id, row in zip(ids, rows, strict=True):
            if row is None or (row[4] is None and not self._has_old):
                found.append(None)
                continue
            seq, session, nbytes, used, head = row
            found.append(Found(head or b"", session, nbytes))
            if id in uses and now - used > TOUCH_EVERY_S and len(self._touched) < MAX_TOUCHED:
                self._touched[seq] = now
        return found

    def body(self, tenant: str, kind: Kind, id: str) -> bytes | None:
        sql = f"SELECT CAST(body AS BLOB) FROM entries WHERE {_ONE}"
        return self._bytes(sql, (tenant, kind, id))

    def parts(self, tenant: str, kind: Kind, id: str, span: Span) -> list[Part]:
        beyond, order = (">", "ASC") if span.ascending else ("<", "DESC")
        # Of this the index of ids has all that is needed.
        wanted = "SELECT seq FROM items WHERE owner = ?"
        with self._file.reading() as db:
            owner = _seq(db, tenant, kind, id)
            args: tuple[object, ...] = (owner,)
            if span.after is not None:
                after = "SELECT seq FROM items WHERE owner = ? AND id = ?"
                found = db.execute(after, (owner, span.after)).fetchone()
                if found is None:
                    return []
                wanted, args = f"{wanted} AND seq {beyond} ?", (owner, found[0])
            wanted = f"{wanted} ORDER BY seq {order} LIMIT ? OFFSET ?"
            sql = (
                f"SELECT seq, length(body) FROM items WHERE seq IN ({wanted}) ORDER BY seq {order}"
            )
            sizes = db.execute(sql, (*args, min(span.limit, SLICE_ITEMS), span.skip)).fetchall()
            read = "SELECT CAST(id AS TEXT), CAST(body AS BLOB) FROM items WHERE seq = ?"
            return [Part(*db.execute(read, (x,)).fetchone()) for x in slice_of(sizes)]

    def part(self, tenant: str, kind: Kind, id: str, item: str) -> bytes | None:
        sql = (
            "SELECT CAST(items.body AS BLOB) FROM items JOIN entries ON entries.seq = owner"
            " WHERE items.id = ? AND entries.tenant = ? AND kind = ? AND entries.id = ?"
        )
        return self._bytes(sql, (item, tenant, kind, id))

    def known(self, tenant: str, kind: Kind, id: str, items: Collection[str]) -> set[str]:
        sql = "SELECT 1 FROM items WHERE owner = ? AND id = ?"
        with self._file.reading() as db:
            owner = _seq(db, tenant, kind, id)
            return {x for x in items if db.execute(sql, (owner, x)).fetchone()}

    def owner(self, tenant: str, item: str) -> tuple[Kind, str] | None:
        sql = (
            "SELECT kind, entries.id FROM items JOIN entries ON entries.seq = owner"
            " WHERE items.tenant = ? AND items.id = ? ORDER BY items.seq DESC LIMIT 1"
        )
        with self._file.reading() as db:
            row = db.execute(sql, (tenant, item)).fetchone()
        return (row[0], row[1]) if row else None

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        sql = (
            "SELECT id FROM entries WHERE tenant = ? AND session = ? AND kind = ?"
            " ORDER BY seq DESC LIMIT 1"
        )
        with self._file.reading() as db:
            row = db.execute(sql, (tenant, session, kind)).fetchone()
        return str(row[0]) if row else None

    def of_session(self, tenant: str, session: str) -> list[tuple[Kind, str]]:
        sql = "SELECT kind, id FROM entries WHERE tenant = ? AND session = ? LIMIT ?"
        with self._file.reading() as db:
            return db.execute(sql, (tenant, session, SLICE_ITEMS)).fetchall()

    def number(self, tenant: str, kind: Kind, id: str) -> int | None:
        with self._file.reading() as db:
            return _seq(db, tenant, kind, id)

    def listed(
        self, tenant: str, kind: Kind, tags: Sequence[bytes], beyond: int | None, ascending: bool
    ) -> Listed:
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        tagged = "SELECT owner FROM tags WHERE tenant = ? AND kind = ? AND tag = ?"
        args: tuple[object, ...] = (tenant, kind, tags[0])
        sql = tagged
        if beyond is not None:
            sql, args = f"{sql} AND owner {sign} ?", (*args, beyond)
        sql = f"{sql} ORDER BY owner {order} LIMIT ?"
        with self._file.reading() as db:
            owners = [x[0] for x in db.execute(sql, (*args, SLICE_ITEMS))]
            last = owners[-1] if len(owners) == SLICE_ITEMS else None
            for tag in tags[1:]:
                has = f"{tagged} AND owner = ?"
                owners = [x for x in owners if db.execute(has, (tenant, kind, tag, x)).fetchone()]
            named = (db.execute("SELECT id FROM entries WHERE seq = ?", (x,)) for x in owners)
            return Listed([row[0] for x in named if (row := x.fetchone())], last)

    def put(self, tenant: str, row: Row, parts: Sequence[Part]) -> bool:
        bodies = [row.body, *(x.body for x in parts)]
        if sum(len(x) + ROW_BYTES for x in bodies) > self._limits.tenant_bytes:
            return False
        now = self._clock()
        with self._file.writing() as db:
            _hide(db, _seq(db, tenant, row.kind, row.id))
            values = (tenant, row.kind, row.id, row.session, now, now, row.body)
            names = "tenant, kind, id, session, created, used, body"
            sql = f"INSERT INTO entries ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)"
            owner = db.execute(sql, values).lastrowid
            assert owner is not None
            _set_head(db, owner, row.head)
            _set_tags(db, owner, (tenant, row.kind), row.tags)
            _add_items(db, owner, tenant, parts)
            self._write_uses(db)
        return True

    def change(self, tenant: str, kind: Kind, id: str, change: Change) -> bool:
        with self._file.writing() as db:
            owner = _seq(db, tenant, kind, id)
            head = db.execute("SELECT head FROM heads WHERE owner = ?", (owner,)).fetchone()
            if owner is None or (head[0] if head else b"") != change.was:
                return False
            if change.head:
                _set_head(db, owner, change.head)
            if change.body is not None:
                db.execute("UPDATE entries SET body = ? WHERE seq = ?", (change.body, owner))
            if change.tags is not None:
                _set_tags(db, owner, (tenant, kind), change.tags)
            if change.removed is not None:
                sql = "DELETE FROM items WHERE owner = ? AND id = ?"
                db.execute(sql, (owner, change.removed))
            rows = [(x.body, owner, x.id) for x in change.rewritten]
            db.executemany("UPDATE items SET body = ? WHERE owner = ? AND id = ?", rows)
            _add_items(db, owner, tenant, change.added)
            if change.was:  # what is only sealed is not used
                self._touched[owner] = self._clock()
                self._write_uses(db)
            return True

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        return self._file.remove(lambda db: _hide(db, _seq(db, tenant, kind, id)))

    def tidy(self, tenant: str) -> bool:
        with self._file.reading() as db:
            if not self._left(db, tenant) and self._outlived(db, tenant) is None:
                return False
        return self._file.remove(lambda db: self._tidied(db, tenant))

    def old(self, tenant: str, kind: Kind, after: str) -> list[str]:
        if not self._has_old:
            return []
        sql = (
            "SELECT id FROM entries LEFT JOIN heads ON owner = seq WHERE head IS NULL"
            " AND tenant = ? AND kind = ? AND id > ? ORDER BY id LIMIT ?"
        )
        with self._file.reading() as db:
            return [x[0] for x in db.execute(sql, (tenant, kind, after, SLICE_ITEMS))]

    def drop_copies(self) -> None:
        self._file.drop_damaged()

    def in_one_go(self) -> AbstractContextManager[None]:
        return self._file.in_one_go()

    def chores(self) -> Iterator[list[tuple[str, Kind, str]]]:
        while (tenant := self._stale_tenant()) is not None and self.tidy(tenant):
            yield []
        beyond = 1 << 62
        while self._has_old and beyond:
            beyond, some = self._some_old(beyond)
            yield some
        if self._has_old:
            self._file.shorten_log()  # of plain text; what is sealed is on the disk before the mark
            self._has_old = False
        make_mark(self._mark)

    def close(self) -> None:
        self._file.close()

    def _bytes(self, sql: str, args: tuple[object, ...]) -> bytes | None:
        with self._file.reading() as db:
            row = db.execute(sql, args).fetchone()
        return bytes(row[0]) if row else None

    def _some_old(self, beyond: int) -> tuple[int, list[tuple[str, Kind, str]]]:
        """List some entries that an older release wrote, the latest first, and where to go on."""
        sql = (
            "SELECT seq, tenant, kind, id, head IS NULL FROM entries LEFT JOIN heads ON owner = seq"
            " WHERE seq < ? ORDER BY seq DESC LIMIT ?"
        )
        with self._file.reading() as db:
            rows = db.execute(sql, (beyond, SLICE_ITEMS)).fetchall()
        return rows[-1][0] if rows else 0, [x[1:4] for x in rows if x[4]]

    def _write_uses(self, db: sqlite3.Connection) -> None:
        touched, self._touched = self._touched, {}
        rows = [(used, seq) for seq, used in list(touched.items())]
        db.executemany("UPDATE entries SET used = ? WHERE seq = ?", rows)

    def _stale_tenant(self) -> str | None:
        with self._file.reading() as db:
            oldest = self._clock() - self._limits.max_age_s
            row = db.execute("SELECT tenant FROM leavings LIMIT 1").fetchone()
            sql = "SELECT tenant FROM entries WHERE used < ? LIMIT 1"
            row = row or db.execute(sql, (oldest,)).fetchone()
        return str(row[0]) if row else None

    def _left(self, db: sqlite3.Connection, tenant: str) -> int | None:
        """Return an entry of the tenant that is deleted, and whose items are there yet."""
        sql = "SELECT owner FROM leavings WHERE tenant = ? LIMIT 1"
        row = db.execute(sql, (tenant,)).fetchone()
        return int(row[0]) if row else None

    def _outlived(self, db: sqlite3.Connection, tenant: str) -> int | None:
        """Return an entry of the tenant that is to go: it is too old, or the budget's last."""
        sql = (
            "SELECT seq, CAST(used AS REAL) FROM entries WHERE tenant = ?"
            " ORDER BY used, seq LIMIT 1"
        )
        row = db.execute(sql, (tenant,)).fetchone()
        if row is None:
            return None
        sql = "SELECT nbytes FROM totals WHERE tenant = ?"
        (nbytes,) = db.execute(sql, (tenant,)).fetchone() or (0,)
        too_old = row[1] < self._clock() - self._limits.max_age_s
        return int(row[0]) if too_old or nbytes > self._limits.tenant_bytes else None

    def _tidied(self, db: sqlite3.Connection, tenant: str) -> bool:
        self._write_uses(db)
        owner = self._left(db, tenant)
        if owner is None:
            return _hide(db, self._outlived(db, tenant))
        sql = "SELECT seq, length(body) FROM items WHERE owner = ? LIMIT ?"
        if some := slice_of(db.execute(sql, (owner, SLICE_ITEMS)).fetchall()):
            db.executemany("DELETE FROM items WHERE seq = ?", [(x,) for x in some])
        else:
            db.execute("DELETE FROM leavings WHERE owner = ?", (owner,))
        return True


def _seq(db: sqlite3.Connection, tenant: str, kind: str, id: str) -> int | None:
    row = db.execute(f"SELECT seq FROM entries WHERE {_ONE}", (tenant, kind, id)).fetchone()
    return int(row[0]) if row else None


def _hide(db: sqlite3.Connection, owner: int | None) -> bool:
    """Delete an entry but for its items, which cannot be found without it."""
    if owner is None:
        return False
    db.execute("INSERT INTO leavings SELECT seq, tenant FROM entries WHERE seq = ?", (owner,))
    db.execute("DELETE FROM heads WHERE owner = ?", (owner,))
    db.execute("DELETE FROM tags WHERE owner = ?", (owner,))
    db.execute("DELETE FROM entries WHERE seq = ?", (owner,))
    return True


def _set_head(db: sqlite3.Connection, owner: int, head: bytes) -> None:
    db.execute("INSERT OR REPLACE INTO heads VALUES (?, ?)", (owner, head))


def _set_tags(
    db: sqlite3.Connection, owner: int, scope: tuple[str, str], tags: Collection[bytes]
) -> None:
    db.execute("DELETE FROM tags WHERE owner = ?", (owner,))
    rows = [(*scope, tag, owner) for tag in set(tags)]
    db.executemany("INSERT INTO tags VALUES (?, ?, ?, ?)", rows)


def _add_items(db: sqlite3.Connection, owner: int, tenant: str, parts: Sequence[Part]) -> None:
    sql = "INSERT INTO items (owner, tenant, id, body) VALUES (?, ?, ?, ?)"
    db.executemany(sql, [(owner, tenant, x.id, x.body) for x in parts])
