"""Heads of stored objects, and the pages that items lie in.

Items lie in pages, as JSON lists. The head says which pages there are, in order, and which items
they hold; no number of a page is used twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from gateway.stored.forms import Item, Kind, Label, row_name
from gateway.stored.seal import ObjectSeal
from gateway.stored.table import SLICE_BYTES, SLICE_ITEMS, Write


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A page of an object: its number, the bytes in it, and the ids of its items in order."""

    number: int
    nbytes: int
    ids: tuple[str, ...] = ()


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The small part of an object that is read whenever anything of it is."""

    session: str
    next: int  # number of the next page
    body: Page
    pages: tuple[Page, ...] = ()
    outputs: int = 0  # how many of the last pages the answer added
    about: dict[str, str] = {}
    labels: tuple[Label, ...] | None = None

    @property
    def num(self) -> int:
        """The number of items."""
        return sum(len(x.ids) for x in self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return sum(x.nbytes for x in self.pages)

    @property
    def last_item(self) -> str | None:
        """The id of the last item."""
        return self.pages[-1].ids[-1] if self.pages else None

    @property
    def own(self) -> tuple[Page, ...]:
        """The pages of the items that the object was made with."""
        return self.pages[: len(self.pages) - self.outputs]


_Row = TypeVar("_Row", Item, Page)


class Object(NamedTuple):
    """An object that is there."""

    kind: Kind
    id: str
    head: Head
    seen: bytes  # the head as it lies
    number: int

    @property
    def name(self) -> str:
        return row_name(self.kind, self.id)


class PageDraft:
    """Collects the pages of a write, each under a number that was never used."""

    def __init__(self, seal: ObjectSeal, next: int) -> None:
        self._seal = seal
        self.next = next
        self.pages: dict[int, bytes] = {}

    def page(self, content: bytes, nbytes: int, ids: Iterable[str] = ()) -> Page:
        made = Page(self.next, nbytes, tuple(ids))
        self.pages[made.number] = self._seal.close(content, "page", made.number)
        self.next += 1
        return made

    def items(self, items: Iterable[Item]) -> tuple[Page, ...]:
        return tuple(self._page(x) for x in slices(items))

    def _page(self, items: Sequence[Item]) -> Page:
        bodies = [x.body for x in items]
        content = b"[%b]" % b",".join(bodies)
        return self.page(content, sum(map(len, bodies)), (x.id for x in items))

    def write(
        self,
        head: Head,
        was: bytes | None,
        *,
        dropped: Collection[int] = (),
        terms: Collection[bytes] = (),
        left: Collection[bytes] = (),
    ) -> Write:
        """Return the write of all this; see its fields."""
        sealed = self._seal.close(msgspec.msgpack.encode(head), "top")
        return Write(sealed, was, self.pages, dropped, terms, left)


def slices(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Yield the rows in slices of few bytes; one that is larger is a slice by itself."""
    some: list[_Row] = []
    held = 0
    for row in rows:
        nbytes = row.nbytes if isinstance(row, Page) else len(row.body)
        if some and (held + nbytes > SLICE_BYTES or len(some) >= SLICE_ITEMS):
            yield some
            some, held = [], 0
        some.append(row)
        held += nbytes
    if some:
        yield some
