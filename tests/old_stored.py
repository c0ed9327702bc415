"""Files of stored objects as an older release (commit 3fce1a5) wrote them: plain, in two tables."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def write_old_chats(path: Path, tenant: str, number: int) -> None:
    """Write many stored chats, each with a number in its metadata and a message."""
    file = OldFile(path)
    for i in range(number):
        message = {"role": "assistant", "content": "said " * 40, "refusal": None}
        choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}
        head = {"id": f"chatcmpl-{i}", "object": "chat.completion", "created": 1, "model": "fake-1"}
        metadata = {"number": str(i), "parity": str(i % 2)}
        body = {**head, "choices": [choice], "metadata": metadata}
        asked = {"id": f"chatcmpl-{i}-0", "role": "user", "content": "asked " * 20}
        file.put(tenant, "completion", body, [asked])
    file.close()


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
