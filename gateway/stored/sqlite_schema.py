"""The tables of stored objects in SQLite, and the triggers that count each tenant's bytes."""

from __future__ import annotations

ROW_BYTES = 200  # that SQLite takes for a row besides its body, about
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
CREATE TABLE IF NOT EXISTS heads (owner INTEGER PRIMARY KEY, head BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tags (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, tag BLOB NOT NULL, owner INTEGER NOT NULL,
    PRIMARY KEY (tenant, kind, tag, owner)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_tagged ON tags (owner);
CREATE TABLE IF NOT EXISTS leavings (owner INTEGER PRIMARY KEY, tenant TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_leaver ON leavings (tenant);
"""
_COUNTED = """
CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} BEGIN
    INSERT INTO totals VALUES ({row}.tenant, {sign} (length({row}.body) + {overhead}))
    ON CONFLICT (tenant) DO UPDATE SET nbytes = nbytes + excluded.nbytes;
END;
"""
_RESIZED = """
CREATE TRIGGER IF NOT EXISTS {table}_body AFTER UPDATE OF body ON {table} BEGIN
    UPDATE totals SET nbytes = nbytes + length(new.body) - length(old.body)
    WHERE tenant = new.tenant;
END;
"""


def schema() -> str:
    """Return the statements that make what is not there yet."""
    events = [("INSERT", "new", "+"), ("DELETE", "old", "-")]
    return _SCHEMA + "".join(
        _RESIZED.format(table=table)
        + "".join(
            _COUNTED.format(table=table, event=event, row=row, sign=sign, overhead=ROW_BYTES)
            for event, row, sign in events
        )
        for table in ("entries", "items")
    )
