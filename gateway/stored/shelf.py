"""A place where entries lie under their tenants' names, and the forms that objects have there.

An entry has a small head, a body, and items; a shelf takes all three for opaque bytes (``objects``
seals them). An entry that is not there, one that was evicted and another tenant's are the same:
None. Every method is one short piece of work: where there may be more to do, its result says so.

The output items of a response are items of their own, so that they are found by id, and read
without the rest of it. ``stored_form`` also takes what an older release stored in one piece.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import msgspec

T = TypeVar("T")
# Work in steps: between two of them others have their turn. It yields the number of bytes that
# the next step will hold besides, and returns the result.
Steps: TypeAlias = Generator[int, None, T]
Kind: TypeAlias = Literal["response", "conversation", "completion"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Why nothing can be read or written now.
Trouble: TypeAlias = Literal["unavailable", "busy", "full"]
# About what one piece of work reads or removes.
SLICE_BYTES = 512 << 10
SLICE_ITEMS = 512
Labels: TypeAlias = Collection[tuple[str, str]]
Json: TypeAlias = dict[str, Any]


class StoreFailed(Exception):
    """The place cannot be read or written now; says why."""

    def __init__(self, message: str, trouble: Trouble = "unavailable") -> None:
        super().__init__(message)
        self.trouble: Trouble = trouble


class Misshapen(StoreFailed):
    """Something lies there that this code has not written."""


class Found(NamedTuple):
    """An entry without its body and items."""

    head: bytes  # b"": an older release wrote it
    session: str
    body_bytes: int


class Part(NamedTuple):
    """One of an entry's items; its id is unique within the entry."""

    id: str
    body: bytes


class Row(NamedTuple):
    """An entry as it is put on a shelf."""

    kind: Kind
    id: str
    session: str  # it goes when this session is forgotten
    head: bytes
    body: bytes
    tags: Collection[bytes] = ()  # it is listed under these; under none, in no list


class Change(NamedTuple):
    """A change of an entry, made if its head is still the one that it was made for."""

    was: bytes
    head: bytes
    body: bytes | None = None  # None: as it is
    tags: Collection[bytes] | None = None  # None: as they are
    added: Sequence[Part] = ()  # after the others
    rewritten: Sequence[Part] = ()  # other bytes for items that are there
    removed: str | None = None  # an item's id


class Span(NamedTuple):
    """The wanted part of an entry's items, in the order in which they were added."""

    limit: int
    after: str | None = None  # an item's id; one that is not there is followed by nothing
    skip: int = 0  # so many at the beginning are left out
    ascending: bool = True


class Listed(NamedTuple):
    """Some of a list's entries, and from where on there may be more; None: there are no more."""

    ids: list[str]
    beyond: int | None


@dataclass(frozen=True)
class Limits:
    """Bounds of each tenant's entries; those that were not used for longest go first."""

    tenant_bytes: int
    max_age_s: float  # since the last use


class Shelf(Protocol):
    """A place for entries. Used by several threads; every method may raise ``StoreFailed``."""

    @property
    def place(self) -> str:
        """A word for the kind of place, which no other kind has."""

    def find(
        self, tenant: str, kind: Kind, ids: Sequence[str], uses: Collection[str] = ()
    ) -> list[Found | None]:
        """Find entries, one for each id; note that those in ``uses`` were used."""

    def body(self, tenant: str, kind: Kind, id: str) -> bytes | None:
        """Read an entry's body."""

    def parts(self, tenant: str, kind: Kind, id: str, span: Span) -> list[Part]:
        """Read items: the first that the span wants, ``SLICE_BYTES`` of them, about.

        None are returned only if there are none.
        """

    def part(self, tenant: str, kind: Kind, id: str, item: str) -> bytes | None:
        """Read one item of an entry."""

    def known(self, tenant: str, kind: Kind, id: str, items: Collection[str]) -> set[str]:
        """Return those of the ids that items of an entry have."""

    def owner(self, tenant: str, item: str) -> tuple[Kind, str] | None:
        """Find the entry that has an item of this id, the latest if several have."""

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        """Return the id of a session's entry that was stored last."""

    def of_session(self, tenant: str, session: str) -> list[tuple[Kind, str]]:
        """List entries of a session: some of them, if there are many."""

    def number(self, tenant: str, kind: Kind, id: str) -> int | None:
        """Return the number of an entry: one that was stored later has a higher one."""

    def listed(
        self, tenant: str, kind: Kind, tags: Sequence[bytes], beyond: int | None, ascending: bool
    ) -> Listed:
        """List entries that have all of ``tags``, at least one, in the order of their numbers.

        It looks at some of those beyond the number ``beyond``; None: from the list's beginning.
        """

    def put(self, tenant: str, row: Row, parts: Sequence[Part]) -> bool:
        """Store an entry and its items, all or nothing; one of that id is replaced.

        Returns False if it is larger than all that the tenant may store. Else call ``tidy``.
        """

    def change(self, tenant: str, kind: Kind, id: str, change: Change) -> bool:
        """Change an entry, all or nothing; if it has grown, call ``tidy``.

        Returns False if it is not there, or its head is another one.
        """

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        """Remove an entry from all eyes; ``tidy`` removes what it took. False: it is not there."""

    def tidy(self, tenant: str) -> bool:
        """Remove a piece of the entries that were deleted, are too old or exceed a tenant's budget.

        Returns True if there may be more.
        """

    def old(self, tenant: str, kind: Kind, after: str) -> list[str]:
        """List ids above ``after`` of entries that an older release wrote, in order of ids."""

    def drop_copies(self) -> None:
        """Remove what was put aside as damaged: it may hold what is deleted."""

    def in_one_go(self) -> AbstractContextManager[None]:
        """Have all changes of a block of this thread done at once, or none of them."""

    def chores(self) -> Iterator[list[tuple[str, Kind, str]]]:
        """Do what no tenant's request does, a piece at each step.

        Yields entries that an older release wrote, to be brought up to date before the next step.
        """

    def close(self) -> None:
        """Let go of files and connections."""


def slice_of(sizes: Iterable[tuple[T, int]]) -> list[T]:
    """Return the first of some rows, as many as make a slice by their bytes; one at least."""
    nbytes = 0
    rows: list[T] = []
    for row, size in sizes:
        nbytes += size
        if rows and nbytes > SLICE_BYTES:
            break
        rows.append(row)
    return rows


class Item(NamedTuple):
    """One of an object's items; its id is unique within the object."""

    id: str
    body: bytes


class Form(NamedTuple):
    """An object's parts."""

    body: bytes
    about: dict[str, str] = {}  # a few words that are read without the body
    labels: Labels | None = None  # None: it is in no list
    outputs: Sequence[Item] = ()


class Entry(NamedTuple):
    """An object as a caller stores it."""

    kind: Kind
    id: str
    session: str  # it goes when this session is forgotten
    form: Form


def stored_form(kind: Kind, object: Json) -> Form:
    """Take an object apart."""
    if kind == "completion":
        return Form(msgspec.json.encode(object), labels=_labels(object))
    if kind == "conversation":
        return Form(msgspec.json.encode(object))
    body = {name: x for name, x in object.items() if name != "output"}
    before = object.get("conversation")
    links = {
        "previous": object.get("previous_response_id"),
        "conversation": before.get("id") if isinstance(before, dict) else None,
    }
    about = {name: x for name, x in links.items() if isinstance(x, str)}
    outputs = [Item(x["id"], msgspec.json.encode(x)) for x in object.get("output") or ()]
    return Form(msgspec.json.encode(body), about, None, outputs)


def older_form(kind: Kind, body: bytes) -> Form | None:
    """Take an object apart that was stored in one piece; None if it is none of ours."""
    try:
        return stored_form(kind, msgspec.json.decode(body, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return None


def shown_form(kind: Kind, body: bytes, outputs: Sequence[Item]) -> bytes:
    """Put an object's parts together again."""
    if kind != "response":
        return body
    return b'%b,"output":[%b]}' % (body[:-1], b",".join(x.body for x in outputs))


def label_of(name: str, value: str) -> tuple[str, str]:
    """Return the label of the objects that have a value in their metadata."""
    return f"metadata.{name}", value


def _labels(object: Json) -> Labels:
    metadata = object.get("metadata")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    labels = [label_of(name, x) for name, x in pairs if isinstance(x, str)]
    model = object.get("model")
    return [*labels, ("model", model)] if isinstance(model, str) else labels
