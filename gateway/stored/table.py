"""The table in which stored objects lie: one interface of a SQLite file and a Redis server.

A row has a name, a small head and numbered pages, all sealed, and is listed under terms, which are
keyed hashes. A row that is not there, one that was evicted and another tenant's are the same: None.
Every method is one short piece of work.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
# Work in steps: between two of them others have their turn. It yields the number of bytes that
# the next step will hold besides, and returns the result.
Steps: TypeAlias = Generator[int, None, T]
# Why nothing can be read or written now.
Trouble: TypeAlias = Literal["unavailable", "busy", "full"]
# About what one step reads or removes.
SLICE_BYTES: Final = 512 << 10
SLICE_ITEMS: Final = 512
TERM_BYTES: Final = 16


class StoreFailed(Exception):
    """The place cannot be read or written now; says why."""

    def __init__(self, message: str, trouble: Trouble = "unavailable") -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class Misshapen(StoreFailed):
    """Something lies there that this code has not written."""


class Top(NamedTuple):
    """A row without its pages."""

    number: int  # one that was put later has a higher one
    head: bytes


class Write(NamedTuple):
    """A change of a row, all or nothing."""

    was: bytes | None  # the head that it is made for; None: the row is put anew
    head: bytes
    nbytes: int  # that the whole row counts from then on
    pages: Mapping[int, bytes] = {}  # put besides those that are there
    dropped: Collection[int] = ()  # pages
    terms: Collection[bytes] = ()  # it is listed under these besides
    left: Collection[bytes] = ()  # and no more under these


@dataclass(frozen=True)
class StoredLimits:
    """Bounds of each tenant's rows; those that were not used for longest go first."""

    tenant_bytes: int
    max_age_s: float  # since the last use


class Table(Protocol):
    """A place for rows. Used by several threads; every method may raise ``StoreFailed``."""

    limits: StoredLimits

    @property
    def place(self) -> str:
        """A word for the kind of place, which no other kind has."""

    def find_all(self, tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        """Find rows; note that they were used, if this is a use."""

    def pages(self, tenant: str, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """Read pages of a row."""

    def listed(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool
    ) -> list[tuple[int, str]]:
        """List some numbers and names under a term, after ``beyond``; rows may be gone by now."""

    def write(self, tenant: str, name: str, write: Write) -> bool:
        """Put or change a row; False: its head is not the one that the change was made for."""

    def delete(self, tenant: str, names: Sequence[str]) -> int:
        """Remove rows from all eyes, and damaged files that were put aside; returns how many."""

    def tidy(self, tenant: str) -> bool:
        """Free a piece of the room of rows that are deleted, too old, or beyond the budget.

        Returns True if there may be more.
        """

    def chores(self) -> Steps[None]:
        """Do what no tenant's request does."""

    def close(self) -> None:
        """Let go of files and connections."""
