"""Files of stored objects as older releases wrote them.

Those of commit 3fce1a5 are plain, in two tables. Later ones (commit 4f010d28) are sealed, with
heads and tags in two tables more.
"""

from __future__ import annotations

import hmac
import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
CREATE TRIGGER IF NOT EXISTS entries_body AFTER UPDATE OF body ON entries BEGIN
    UPDATE totals SET nbytes = nbytes + length(new.body) - length(old.body)
    WHERE tenant = new.tenant;
END;
"""
_COUNTED = """
CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} BEGIN
    INSERT INTO totals VALUES ({row}.tenant, {sign} (length({row}.body) + 200))
    ON CONFLICT (tenant) DO UPDATE SET nbytes = nbytes + excluded.nbytes;
END;
"""


class OldFile:
    """A file of that release, open to be written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(0o600)
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode = WAL").fetchall()
        triggers = [("INSERT", "new", "+"), ("DELETE", "old", "-")]
        self._db.executescript(
            _SCHEMA
            + "".join(
                _COUNTED.format(table=table, event=event, row=row, sign=sign)
                for table in ("entries", "items")
                for event, row, sign in triggers
            )
        )

    def put(
        self,
        tenant: str,
        kind: str,
        body: dict[str, Any],
        items: Iterable[dict[str, Any]] = (),
        *,
        session: str = "s",
        used: float = 2e9,
    ) -> None:
        """Write an entry under the id in its body, with its items under theirs."""
        row = (tenant, kind, body["id"], session, used, used, _encoded(body))
        names = "tenant, kind, id, session, created, used, body"
        made = self._db.execute(f"INSERT INTO entries ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        rows = [(made.lastrowid, tenant, x["id"], _encoded(x)) for x in items]
        self._db.executemany(
            "INSERT INTO items (owner, tenant, id, body) VALUES (?, ?, ?, ?)", rows
        )

    def commit(self) -> None:
        self._db.commit()

    def close(self) -> None:
        self._db.commit()
        self._db.close()


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


_SEALED = """
CREATE TABLE heads (owner INTEGER PRIMARY KEY, head BLOB NOT NULL);
CREATE TABLE tags (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, tag BLOB NOT NULL, owner INTEGER NOT NULL,
    PRIMARY KEY (tenant, kind, tag, owner)
) WITHOUT ROWID;
CREATE INDEX by_tagged ON tags (owner);
CREATE TABLE leavings (owner INTEGER PRIMARY KEY, tenant TEXT NOT NULL);
CREATE INDEX by_leaver ON leavings (tenant);
"""


def seal_old_file(path: Path, key_of: Callable[[str, bytes], bytes]) -> None:
    """Make a plain file one of the release that sealed entries where they lay."""
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(_SEALED)
        entries = "SELECT seq, tenant, kind, id, session, body FROM entries"
        for seq, tenant, kind, id, session, body in db.execute(entries).fetchall():
            place = ["sqlite", tenant, kind, id]
            cipher = AESGCM(key_of(tenant, b"stored"))

            def seal(
                content: bytes, *part: str | int, place: list[str] = place, cipher: Any = cipher
            ) -> bytes:
                nonce = secrets.token_bytes(12)
                bound = b"\x01" + json.dumps([*place, *part], separators=(",", ":")).encode()
                return b"\x01" + nonce + bytes(cipher.encrypt(nonce, content, bound))

            items = "SELECT id, body FROM items WHERE owner = ? ORDER BY seq"
            rows = db.execute(items, (seq,)).fetchall()
            outputs = []
            object = json.loads(body)
            about = {}
            if kind == "response":
                outputs = [(x["id"], _encoded(x)) for x in object.pop("output")]
                if object["previous_response_id"]:
                    about["previous"] = object["previous_response_id"]
            db.execute("DELETE FROM items WHERE owner = ?", (seq,))
            sum_ = 0
            for number, (item, content) in enumerate([*rows, *outputs]):
                part = number.to_bytes(8) + seal(content, "item", item, number)
                sql = "INSERT INTO items (owner, tenant, id, body) VALUES (?, ?, ?, ?)"
                db.execute(sql, (seq, tenant, item, part))
                name = json.dumps([*place, item, number], separators=(",", ":")).encode()
                hashed = hmac.digest(key_of(tenant, b"sums"), name, "sha256")[:16]
                sum_ ^= int.from_bytes(hashed)
            num = len(rows) + len(outputs)
            head = {"session": session, "next": num, "num": num, "sum": sum_.to_bytes(16)}
            head |= {
                "nbytes": sum(len(x) for _, x in [*rows, *outputs]),
                "outputs": len(outputs),
                "output_bytes": sum(len(x) for _, x in outputs),
                "about": about,
            }
            sealed = seal(msgspec.msgpack.encode(head), "head")
            db.execute("INSERT INTO heads VALUES (?, ?)", (seq, sealed))
            whole = seal(_encoded(object), "body")
            db.execute("UPDATE entries SET body = ? WHERE seq = ?", (whole, seq))
