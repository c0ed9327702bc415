"""The protocol of the tables in which stored objects are kept: a SQLite file or a Redis server.

A row has a name, a sealed head and numbered sealed pages, and is indexed under terms, which are
keyed hashes. A row that does not exist, one that was evicted and another tenant's are all None.
Every method is one short operation.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
# An operation in steps, between which others get their turn. It yields the number of additional
# bytes that the next step will hold, and returns the result.
Steps: TypeAlias = Generator[int, None, T]
# The reason why a table cannot be read or written now.
Trouble: TypeAlias = Literal["unavailable", "busy", "full"]
# About how much one step reads or removes.
SLICE_BYTES: Final = 512 << 10
SLICE_ITEMS: Final = 512
TERM_BYTES: Final = 16


class StoreFailed(Exception):
    """A table cannot be read or written now; the message gives the reason."""

    def __init__(self, message: str, trouble: Trouble = "unavailable") -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class Misshapen(StoreFailed):
    """A table has data that this code has not written."""


class Top(NamedTuple):
    """A row without its pages."""

    number: int  # higher for rows that were put later
    head: bytes


class Write(NamedTuple):
    """A change of a row, written in one transaction."""

    was: bytes | None  # the present head; None: the row is new, or replaces one of its name
    head: bytes
    nbytes: int  # the new size of the whole row
    pages: Mapping[int, bytes] = {}  # new pages
    dropped: Collection[int] = ()  # numbers of pages to remove
    terms: Collection[bytes] = ()  # terms to add to the index
    left: Collection[bytes] = ()  # terms to remove from the index


@dataclass(frozen=True)
class StoredLimits:
    """The limits of each tenant's rows; those unused for longest are removed first."""

    tenant_bytes: int
    max_age_s: float  # since the last use


class Table(Protocol):
    """A table of rows. Used by several threads; every method may raise ``StoreFailed``."""

    limits: StoredLimits

    @property
    def place(self) -> str:
        """The kind of table in a word, to which seals are bound."""

    def find_all(self, tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        """Return rows without their pages, None for each that does not exist.

        ``uses``: note the time of use.
        """

    def pages(self, tenant: str, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        """Return pages of a row, None for each that does not exist."""

    def listed(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool
    ) -> list[tuple[int, str]]:
        """Return numbers and names of some rows under a term, after the number ``beyond``.

        Rows may have been removed since.
        """

    def write(self, tenant: str, name: str, write: Write) -> bool:
        """Put or change a row; return False if its head is not ``write.was``."""

    def delete(self, tenant: str, names: Sequence[str]) -> int:
        """Make rows impossible to find, and remove a damaged file; return the number of rows."""

    def tidy(self, tenant: str) -> bool:
        """Free some room of rows that are deleted, too old or exceed the budget.

        Returns True if there may be more.
        """

    def chores(self) -> Steps[None]:
        """Run the maintenance that no request does, such as removing old rows of all tenants."""

    def close(self) -> None:
        """Close files and connections."""
