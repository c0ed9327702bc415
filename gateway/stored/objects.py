"""Stored objects: entries and items, sealed for their tenant before they lie on a shelf.

What was changed there, or moved to another place, is not there (``seal``). Labels, by which
objects are listed, lie on the shelf as keyed hashes.

Methods are made of steps: between two of them another tenant has its turn (see ``stored``). A step
that will hold bytes says how many before it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gateway.stored.recall import Object, Recall
from gateway.stored.seal import EntrySeal, Head, KeyOf, NotOurs, Older, Seals, added
from gateway.stored.shelf import (
    SLICE_ITEMS,
    Change,
    Entry,
    Form,
    Found,
    Item,
    Kind,
    Labels,
    Misshapen,
    Part,
    Row,
    Shelf,
    Span,
    Steps,
    StoreFailed,
    shown_form,
)

MAX_TRIES = 16  # of a change that others come between
MAX_ITEMS = 16 << 10  # of one object
PAGE_BYTES = 4 << 20  # of a list; a page may end before its limit


class Outgrown(Exception):
    """An object would have more items than one may have."""


class Query(NamedTuple):
    """The wanted part of a list: at most ``limit`` after the one that is called ``after``."""

    limit: int
    after: str | None = None  # one that is not there is followed by nothing
    ascending: bool = True


class Page(NamedTuple):
    """A part of a list: ids and bodies, and whether more follows it."""

    rows: list[Item]
    more: bool


class Objects:
    """The objects of all tenants on one shelf. Used by several threads."""

    def __init__(self, shelf: Shelf, key_of: KeyOf) -> None:
        self.shelf = shelf
        self._seals = Seals(shelf.place, key_of)
        self._older = Older(shelf, self._seals)
        self._recall = Recall(shelf, self._seals, self.find)

    def find(self, tenant: str, kind: Kind, id: str, *, uses: bool = True) -> Steps[Object | None]:
        """Find an object; note that it was used, if this is a use."""
        found = self._found(tenant, kind, id, uses)
        if found is not None and not found.head:
            yield from self._older.seal(tenant, kind, id)
            found = self._found(tenant, kind, id, uses)
        if found is None or not found.head:
            return None
        seal = self._seals.entry(tenant, kind, id)
        try:
            return Object(kind, id, seal.open_head(found.head), found.head, found.body_bytes)
        except NotOurs:
            return None

    def body(self, tenant: str, object: Object) -> bytes | None:
        """Read an object's body; the caller has said that it will hold ``body_bytes``."""
        try:
            sealed = self.shelf.body(tenant, object.kind, object.id)
            seal = self._seals.entry(tenant, object.kind, object.id)
            return None if sealed is None else seal.open(sealed, "body")
        except (NotOurs, Misshapen):
            return None

    def show(self, tenant: str, kind: Kind, id: str) -> Steps[bytes | None]:
        """Return an object as it is shown."""
        object = yield from self.find(tenant, kind, id)
        if object is None:
            return None
        yield object.body_bytes + object.head.output_bytes
        body = self.body(tenant, object)
        outputs = yield from self._outputs(tenant, object)
        return None if body is None or outputs is None else shown_form(kind, body, outputs)

    def page(self, tenant: str, object: Object, query: Query) -> Steps[Page]:
        """List items that an object was made with; one that was changed is passed over.

        A page holds ``PAGE_BYTES``, about, and may end before its limit.
        """
        seal = self._seals.entry(tenant, object.kind, object.id)
        rows: list[Item] = []
        held, after = 0, query.after
        num_outputs = object.head.outputs
        while held < PAGE_BYTES:
            limit = query.limit - len(rows) + 1  # one more says whether there is more
            skip = num_outputs if after is None and not query.ascending else 0
            parts = self._parts(tenant, object, Span(limit, after, skip, query.ascending))
            nbytes = sum(len(x.body) for x in parts)
            held += nbytes
            yield nbytes
            for part in parts:
                number, body = seal.open_item(part)
                if body is not None and number >= object.head.next - num_outputs:
                    return Page(rows, False)
                if len(rows) >= query.limit:
                    return Page(rows, True)
                after = part.id
                if body is not None:
                    rows.append(Item(part.id, body))
            if not parts:
                return Page(rows, False)
        return Page(rows, True)

    def line(
        self, tenant: str, kind: Kind, id: str, take: Callable[[Head], None]
    ) -> Steps[list[Object] | None]:
        """Find an object and all before it. See ``Recall``."""
        return self._recall.line(tenant, kind, id, take)

    def read_all(self, tenant: str, object: Object) -> Steps[list[Item] | None]:
        """Read all items of an object. See ``Recall``."""
        return self._recall.read_all(tenant, object)

    def item(self, tenant: str, object: Object, item: str) -> Steps[bytes | None]:
        """Return one item of an object."""
        try:
            sealed = self.shelf.part(tenant, object.kind, object.id, item)
        except Misshapen:
            return None
        if sealed is None:
            return None
        yield len(sealed)
        return self._seals.entry(tenant, object.kind, object.id).open_item(Part(item, sealed))[1]

    def find_item(self, tenant: str, item: str) -> Steps[bytes | None]:
        """Find an item by its id in any object of the tenant, the latest if several have it."""
        try:
            owner = self.shelf.owner(tenant, item)
        except Misshapen:
            return None
        if owner is None:
            return None
        object = yield from self.find(tenant, *owner)
        return None if object is None else (yield from self.item(tenant, object, item))

    def listed(self, tenant: str, kind: Kind, labels: Labels, query: Query) -> Steps[Page]:
        """List objects that have all of the labels, in the order in which they were stored."""
        yield from self._older.seal_all(tenant, kind)
        beyond = None
        if query.after is not None:
            beyond = self.shelf.number(tenant, kind, query.after)
            if beyond is None:
                return Page([], False)
        tags = self._seals.tags_of_all(tenant, labels)
        rows: list[Item] = []
        held = 0
        while True:
            some = self.shelf.listed(tenant, kind, tags, beyond, query.ascending)
            for id in some.ids:
                if len(rows) >= query.limit or held >= PAGE_BYTES:
                    return Page(rows, True)
                object = yield from self.find(tenant, kind, id, uses=False)
                if object is None:
                    continue
                yield object.body_bytes
                body = self.body(tenant, object)
                if body is not None:
                    rows.append(Item(id, body))
                    held += len(body)
            if some.beyond is None:
                return Page(rows, False)
            beyond = some.beyond
            yield 0

    def last_item(self, tenant: str, object: Object) -> str | None:
        """Return the id of an object's last item."""
        last = self._parts(tenant, object, Span(1, ascending=False))
        return last[0].id if last else None

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        """Return the id of a session's object that was stored last."""
        try:
            return self.shelf.latest(tenant, kind, session)
        except Misshapen:
            return None

    def put(self, tenant: str, entry: Entry, items: Sequence[Item] = ()) -> Steps[bool]:
        """Store an object and its items, all or nothing; one of that id is replaced.

        Returns False if it is larger than all that the tenant may store.
        """
        seal = self._seals.entry(tenant, entry.kind, entry.id)
        form = entry.form
        head, parts = seal.with_items(Head(entry.session, about=form.about), items)
        head, outputs = seal.with_outputs(head, form.outputs)
        row = Row(
            entry.kind,
            entry.id,
            entry.session,
            seal.close_head(head),
            seal.close(form.body, "body"),
            self._seals.tags(tenant, form.labels),
        )
        self._recall.memory.drop(tenant, entry.kind, entry.id)
        stored = self.shelf.put(tenant, row, parts + outputs)
        yield from self._tidy(tenant)
        return stored

    def append(self, tenant: str, kind: Kind, id: str, items: Sequence[Item]) -> Steps[bool]:
        """Add items after the others; those whose id is there already are left out.

        Returns False if there is no such object, or none any more: it had outgrown the budget.

        Raises:
            Outgrown: it would have more than ``MAX_ITEMS``.
        """

        def grown(object: Object, seal: EntrySeal) -> Change | None:
            known = self.shelf.known(tenant, kind, id, [x.id for x in items])
            fresh = [x for x in items if x.id not in known]
            if object.head.num + len(fresh) > MAX_ITEMS:
                raise Outgrown
            head, parts = seal.with_items(object.head, fresh)
            return Change(object.seen, seal.close_head(head), added=parts) if fresh else None

        if not (yield from self._change(tenant, kind, id, grown)):
            return False
        yield from self._tidy(tenant)
        return self._found(tenant, kind, id) is not None

    def remove_item(self, tenant: str, kind: Kind, id: str, item: str) -> Steps[bool]:
        """Remove one item of an object; returns False if there is no such object."""

        def shrunk(object: Object, seal: EntrySeal) -> Change | None:
            sealed = self.shelf.part(tenant, kind, id, item)
            if sealed is None:
                return None
            number, body = seal.open_item(Part(item, sealed))
            if body is None:
                return None
            head = msgspec.structs.replace(
                object.head,
                num=object.head.num - 1,
                nbytes=object.head.nbytes - len(body),
                sum=added(object.head.sum, seal.summand(item, number)),
            )
            return Change(object.seen, seal.close_head(head), removed=item)

        return (yield from self._change(tenant, kind, id, shrunk))

    def relabel(
        self, tenant: str, kind: Kind, id: str, anew: Callable[[bytes], Form]
    ) -> Steps[bytes | None]:
        """Replace an object's body and labels by those that ``anew`` makes of the body.

        Returns the new body; None if there is no such object.
        """
        made = b""

        def changed(object: Object, seal: EntrySeal) -> Change | None:
            nonlocal made
            body = self.body(tenant, object)
            if body is None:
                return None
            form = anew(body)
            made, tags = form.body, self._seals.tags(tenant, form.labels)
            head = seal.close_head(object.head)
            return Change(object.seen, head, seal.close(made, "body"), tags)

        object = yield from self.find(tenant, kind, id)
        if object is None:
            return None
        yield object.body_bytes
        there = yield from self._change(tenant, kind, id, changed)
        return made if there and made else None

    def delete(self, tenant: str, kind: Kind, id: str) -> Steps[bool]:
        """Remove an object and its items, for good; returns False if it is not there."""
        self.shelf.drop_copies()
        self._recall.memory.drop(tenant, kind, id)
        try:
            there = self.shelf.delete(tenant, kind, id)
        except Misshapen:
            return False
        yield from self._tidy(tenant)
        return there

    def forget(self, tenant: str, session: str) -> Steps[int]:
        """Remove all objects of a session; returns how many."""
        number = 0
        self.shelf.drop_copies()
        while some := self.shelf.of_session(tenant, session):
            for kind, id in some:
                self._recall.memory.drop(tenant, kind, id)
                number += self.shelf.delete(tenant, kind, id)
                yield 0
        yield from self._tidy(tenant)
        return number

    def chores(self) -> Steps[None]:
        """Do what no tenant's request does, a piece at each step."""
        self._recall.memory.drop_old()
        for old in self.shelf.chores():
            yield from self._older.seal_some(old)
            yield 0

    def _change(
        self,
        tenant: str,
        kind: Kind,
        id: str,
        change: Callable[[Object, EntrySeal], Change | None],
    ) -> Steps[bool]:
        """Change an object as ``change`` says; None: it stays as it is.

        Others may come between: then it is said anew. Returns False if there is no such object.
        """
        seal = self._seals.entry(tenant, kind, id)
        for _ in range(MAX_TRIES):
            object = yield from self.find(tenant, kind, id)
            if object is None:
                return False
            wanted = change(object, seal)
            if wanted is None or self.shelf.change(tenant, kind, id, wanted):
                return True
            yield 0
        raise StoreFailed("too many change the same object at once", "busy")

    def _tidy(self, tenant: str) -> Steps[None]:
        while self.shelf.tidy(tenant):
            yield 0

    def _found(self, tenant: str, kind: Kind, id: str, uses: bool = False) -> Found | None:
        try:
            return self.shelf.find(tenant, kind, [id], [id] if uses else ())[0]
        except Misshapen:
            return None

    def _parts(self, tenant: str, object: Object, span: Span) -> list[Part]:
        try:
            return self.shelf.parts(tenant, object.kind, object.id, span)
        except Misshapen:
            return []

    def _outputs(self, tenant: str, object: Object) -> Steps[list[Item] | None]:
        """Read the items that an object was answered with; None if one is not as it was."""
        seal = self._seals.entry(tenant, object.kind, object.id)
        first, after = object.head.next - object.head.outputs, None
        items: list[Item] = []
        while len(items) < object.head.outputs:
            skip = first if after is None else 0
            parts = self._parts(tenant, object, Span(SLICE_ITEMS, after, skip))
            for part in parts:
                number, body = seal.open_item(part)
                if body is None or number != first + len(items):
                    return None
                items.append(Item(part.id, body))
                after = part.id
            if not parts:
                return None
            yield 0
        return items
