"""The table of stored objects: the one interface of the places where they lie.

A row has a name, a small head and numbered pages, all opaque here (``objects`` seals them), and is
listed under terms, which are keyed hashes. A row that is not there, one that was evicted and
another tenant's are the same: None. Every method is one short piece of work: where there may be
more to do, its result says so.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
# Work in steps: between two of them others have their turn. It yields the number of bytes that
# the next step will hold besides, and returns the result.
Steps: TypeAlias = Generator[int, None, T]
# Why nothing can be read or written now.
Trouble: TypeAlias = Literal["unavailable", "busy", "full"]
# About what one piece of work reads or removes.
SLICE_BYTES = 512 << 10
SLICE_ITEMS = 512
ROW_BYTES = 200  # that a head or a page takes besides its content, about
TERM_BYTES = 16


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

    head: bytes
    was: bytes | None  # the head that it is made for; None: the row is put anew
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
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool, limit: int
    ) -> list[tuple[int, str]]:
        """List numbers and names under a term, in order, from after the number ``beyond`` on.

        Rows that are gone may still be in it.
        """

    def write(self, tenant: str, name: str, write: Write) -> bool:
        """Put or change a row; call ``tidy`` if it has grown.

        Returns False if its head is not the one that the change was made for.
        """

    def delete(self, tenant: str, name: str) -> bool:
        """Remove a row from all eyes; ``tidy`` removes what it took. False: it is not there."""

    def drop_copies(self) -> None:
        """Remove what was put aside as damaged: it may hold what is deleted."""

    def tidy(self, tenant: str) -> bool:
        """Remove a piece of the rows that were deleted, are too old or exceed a tenant's budget.

        Returns True if there may be more.
        """

    def chores(self) -> Iterator[None]:
        """Do what no tenant's request does, a piece at each step."""

    def close(self) -> None:
        """Let go of files and connections."""


def size_of(head: bytes, pages: Mapping[int, bytes]) -> int:
    """Return what a row counts in its tenant's budget."""
    return len(head) + sum(len(x) for x in pages.values()) + ROW_BYTES * (1 + len(pages))
