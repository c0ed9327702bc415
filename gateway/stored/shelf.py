"""A place where entries lie, each with a list of items, under their tenants' names.

An entry that is not there, one that was evicted and another tenant's are the same: None. Bodies are
JSON that this room does not look into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

Kind: TypeAlias = Literal["response", "conversation", "completion"]


class StoreFailed(Exception):
    """The place cannot be read or written now; says why."""


class Entry(NamedTuple):
    """A stored object."""

    kind: Kind
    id: str
    session: str  # it goes when this session is forgotten
    body: bytes
    created: float = 0.0  # seconds since 1970


class Item(NamedTuple):
    """One of an entry's items; its id is unique within the entry."""

    id: str
    body: bytes


class Query(NamedTuple):
    """The wanted part of a list: at most ``limit`` behind the one that is called ``after``."""

    limit: int | None = None  # None: all
    after: str | None = None  # one that is not there has nothing behind it
    ascending: bool = True


class Page(NamedTuple):
    """A part of a list: ids and bodies, and whether there is more behind it."""

    rows: list[Item]
    more: bool


@dataclass(frozen=True)
class Limits:
    """Bounds of each tenant's entries; those that were not used for longest go first."""

    tenant_bytes: int
    max_age_s: float  # since the last use


class Shelf(Protocol):
    """A place for entries. Used by one thread; every method may raise ``StoreFailed``."""

    def put(self, tenant: str, entry: Entry, items: Sequence[Item] = ()) -> bool:
        """Store an entry and its items, all or nothing; one of that id is replaced.

        Returns False if it is larger than all that the tenant may store.
        """

    def get(self, tenant: str, kind: Kind, id: str) -> Entry | None:
        """Find an entry, and note that it was used."""

    def change(self, tenant: str, kind: Kind, id: str, body: bytes) -> bool:
        """Replace an entry's body; returns False if it is not there."""

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        """Remove an entry and its items; returns False if it is not there."""

    def entries(
        self, tenant: str, kind: Kind, query: Query, wanted: Callable[[bytes], bool]
    ) -> Page:
        """List entries whose body is ``wanted``, in the order in which they were stored."""

    def append(self, tenant: str, kind: Kind, id: str, items: Sequence[Item]) -> bool:
        """Add items behind the others; those whose id is there already are left out.

        Returns False if there is no such entry.
        """

    def items(self, tenant: str, kind: Kind, id: str, query: Query) -> Page | None:
        """List an entry's items; None if there is no such entry."""

    def delete_item(self, tenant: str, kind: Kind, id: str, item: str) -> bool:
        """Remove one item of an entry; returns False if there is no such entry."""

    def find_item(self, tenant: str, item: str, owner: str | None = None) -> bytes | None:
        """Find an item by its id, in the entry ``owner`` or in any."""

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        """Return the id of a session's entry that was stored last."""

    def forget(self, tenant: str, session: str) -> int:
        """Remove all entries of a session; returns how many."""

    def close(self) -> None:
        """Let go of files and connections."""
