"""The state that the events of a server add up to (docs/events.md): a snapshot, and changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

Row = Mapping[str, Any]
_MOST_MOVES: Final = 60
_PARTS: Final = ("server", "now", "memory", "quality", "num_sessions", "hour", "moves")


class Unreadable(ValueError):
    """An event is not as docs/events.md says."""


class View:
    """Everything that is known of one server. Unknown fields stay; missing ones are None."""

    def __init__(self) -> None:
        self.whole: dict[str, Any] = {}
        self.rows: dict[tuple[str, str], Row] = {}
        self.last_id = ""

    @property
    def known(self) -> bool:
        return bool(self.whole)

    def part(self, name: str) -> Mapping[str, Any]:
        """One of ``server``, ``now``, ``memory`` and ``quality``; empty while it is not known."""
        found = self.whole.get(name)
        return found if isinstance(found, dict) else {}

    def apply(self, name: str, data: bytes, number: str = "") -> None:
        """Take one event in. Raises ``Unreadable``."""
        if name not in ("snapshot", "change"):
            return
        try:
            received = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise Unreadable(str(error)) from error
        if not isinstance(received, dict):
            raise Unreadable("it is no object")
        if name == "snapshot":
            self.whole, self.rows = {}, {}
        earlier = objects(self.whole.get("moves"))
        self.whole |= {x: received[x] for x in _PARTS if x in received}
        if "moves" in received:
            self.whole["moves"] = (earlier + objects(received["moves"]))[-_MOST_MOVES:]
        for row in objects(received.get("sessions")):
            self.rows[_key(row)] = row
        for row in objects(received.get("gone")):
            self.rows.pop(_key(row), None)
        self.last_id = number or self.last_id

    def as_json(self) -> dict[str, Any]:
        """All that is known, in the shape of a snapshot."""
        return {**self.whole, "sessions": list(self.rows.values())}


def objects(rows: object) -> list[dict[str, Any]]:
    """The rows of a field that should be a list of them."""
    return [x for x in rows if isinstance(x, dict)] if isinstance(rows, list) else []


def _key(row: Row) -> tuple[str, str]:
    return str(row.get("tenant") or ""), str(row.get("id"))


def number(value: object) -> float:
    """A field as a number; 0 for null and for anything else that is none."""
    return float(value) if isinstance(value, int | float) else 0.0


def _recent(row: Row) -> float:
    """Served ones first, then those that were used last."""
    idle = row.get("idle_since")
    return float("-inf") if idle is None else -number(idle)


ORDERS: Final[Mapping[str, Callable[[Row], Any]]] = {
    "recent": _recent,
    "tokens": lambda row: -number(row.get("tokens")),
    "bytes": lambda row: -number(row.get("bytes")),
    "saved": lambda row: -number(row.get("saved_s")),
    "turns": lambda row: -number(row.get("turns")),
    "id": lambda row: str(row.get("id")),
}
FILTERS: Final[Mapping[str, Callable[[Row], bool]]] = {
    "all": lambda row: True,
    "awake": lambda row: row.get("state") in ("active", "idle", "waking"),
    "asleep": lambda row: row.get("state") in ("cold", "hibernating"),
    "pinned": lambda row: bool(row.get("pinned")),
}


def chosen(view: View, order: str, kept: str) -> list[Row]:
    """The rows that are to be seen, in their order."""
    return sorted(filter(FILTERS[kept], view.rows.values()), key=ORDERS[order])
