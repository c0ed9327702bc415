"""Stored objects: heads, bodies and items, sealed for their tenant before they lie in a table.

What was changed there, or moved to another place, is not there (``seal``). ``head`` has the forms
in which objects lie.

Methods are made of steps: between two of them another tenant has its turn (see ``stored``). A step
that will hold bytes says how many before it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple, cast

import msgspec

from gateway.stored.forms import Entry, Form, Item, Kind, Label, row_name, shown_form
from gateway.stored.head import Head, Object, Page, PageDraft, slices
from gateway.stored.line_finder import LineFinder
from gateway.stored.recent_pages import PageKey, RecentPages
from gateway.stored.seal import KeyOf, NotOurs, Seals
from gateway.stored.table import SLICE_ITEMS, Steps, StoreFailed, Table, Top, Write, size_of

MAX_TRIES = 16  # of a change that others come between
MAX_ITEMS = 16 << 10  # of one object
PAGE_BYTES = 4 << 20  # of a list; it may end before its limit


class Outgrown(Exception):
    """An object would have more items than one may have."""


class Query(NamedTuple):
    """The wanted part of a list: at most ``limit`` after the one that is called ``after``."""

    limit: int
    after: str | None = None  # one that is not there is followed by nothing
    ascending: bool = True


class ObjectList(NamedTuple):
    """A part of a list: ids and bodies, and whether more follows it."""

    rows: list[Item]
    more: bool


class Objects:
    """The objects of all tenants in one table. Used by several threads."""

    def __init__(self, table: Table, key_of: KeyOf) -> None:
        self.table = table
        self._seals = Seals(table.place, key_of)
        self._recent = RecentPages()
        self._lines = LineFinder()

    def find(self, tenant: str, kind: Kind, id: str, *, uses: bool = True) -> Object | None:
        """Find an object; note that it was used, if this is a use."""
        return self.find_all(tenant, kind, [id], uses=uses)[0]

    def find_all(
        self, tenant: str, kind: Kind, ids: Sequence[str], *, uses: bool = True
    ) -> list[Object | None]:
        """Find objects, as ``find`` does."""
        found = self.table.find_all(tenant, [row_name(kind, x) for x in ids], uses=uses)
        return [x and self._object(tenant, kind, id, x) for id, x in zip(ids, found, strict=True)]

    def _object(self, tenant: str, kind: Kind, id: str, found: Top) -> Object | None:
        try:
            packed = self._seals.of(tenant, kind, id).open(found.head, "top")
        except NotOurs:
            return None
        head = msgspec.msgpack.decode(packed, type=Head)
        return Object(kind, id, head, found.head, found.number)

    def body(self, tenant: str, object: Object) -> bytes | None:
        """Read an object's body; the caller has said that it will hold it."""
        return self._read(tenant, object, [object.head.body])[0]

    def show(self, tenant: str, kind: Kind, id: str) -> Steps[bytes | None]:
        """Return an object as it is shown."""
        object = self.find(tenant, kind, id)
        if object is None:
            return None
        outputs = object.head.pages[len(object.head.own) :]
        yield object.head.body.nbytes + sum(x.nbytes for x in outputs)
        body = self.body(tenant, object)
        items = yield from self._items(tenant, object, outputs)
        return None if body is None or items is None else shown_form(kind, body, items)

    def page(self, tenant: str, object: Object, query: Query) -> Steps[ObjectList]:
        """List items that an object was made with; those that were changed are passed over."""
        places = [(x, i) for x in object.head.own for i in range(len(x.ids))]
        if not query.ascending:
            places.reverse()
        if query.after is not None:
            ids = [page.ids[i] for page, i in places]
            places = places[ids.index(query.after) + 1 :] if query.after in ids else []
        rows: list[Item] = []
        held = 0
        for page, some in groupby(places[: query.limit], key=lambda x: x[0]):
            if held > PAGE_BYTES - page.nbytes // 2 and rows:
                return ObjectList(rows, True)
            yield page.nbytes
            held += page.nbytes
            items = self._opened(page, self._read(tenant, object, [page])[0])
            rows += [items[i] for _, i in some if items is not None]
        return ObjectList(rows, len(places) > query.limit)

    def line(
        self, tenant: str, kind: Kind, id: str, take: Callable[[Head], None]
    ) -> Steps[list[Object] | None]:
        """Find an object and all before it; see ``LineFinder.line``."""
        return self._lines.line((tenant, kind), id, partial(self.find_all, tenant, kind), take)

    def read_all(self, tenant: str, object: Object) -> Steps[list[Item] | None]:
        """Read all items; None if one was changed, moved, put back or taken away.

        The caller has said that it will hold the ``nbytes`` of the object's head.
        """
        return self._items(tenant, object, object.head.pages)

    def item(self, tenant: str, object: Object, item: str) -> Steps[bytes | None]:
        """Return one item of an object."""
        page = _page_of(object.head, item)
        if page is None:
            return None
        yield page.nbytes
        items = self._opened(page, self._read(tenant, object, [page])[0])
        return None if items is None else items[page.ids.index(item)].body

    def find_item(self, tenant: str, item: str) -> Steps[bytes | None]:
        """Find an item by its id in any object of the tenant, the latest if several have it."""
        for object in self._under(tenant, "item", item):
            return (yield from self.item(tenant, object, item))
        return None

    def listed(
        self, tenant: str, kind: Kind, labels: Sequence[Label], query: Query
    ) -> Steps[ObjectList]:
        """List objects that have all of the labels, in the order in which they were stored."""
        beyond = None
        if query.after is not None:
            last = self.find(tenant, kind, query.after, uses=False)
            if last is None:
                return ObjectList([], False)
            beyond = last.number
        words = ("label", kind, *labels[0]) if labels else ("list", kind)
        (term,) = self._seals.terms(tenant, words)
        rows: list[Item] = []
        held = 0
        while some := self._slice(tenant, term, beyond, ascending=query.ascending):
            for beyond, name in some:
                object = self._named(tenant, beyond, name)
                if object is None or not set(labels) <= set(object.head.labels or ()):
                    continue
                if len(rows) >= query.limit or held >= PAGE_BYTES:
                    return ObjectList(rows, True)
                yield object.head.body.nbytes
                body = self.body(tenant, object)
                if body is not None:
                    rows.append(Item(object.id, body))
                    held += len(body)
            yield 0
        return ObjectList(rows, False)

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        """Return the id of a session's object that was stored last."""
        return next((x.id for x in self._under(tenant, "session", session, kind)), None)

    def put(self, tenant: str, entry: Entry, items: Sequence[Item] = ()) -> Steps[bool]:
        """Store an object and its items, all or nothing; one of that id is replaced.

        Returns False if it is larger than all that the tenant may store.
        """
        stored = self.put_now(tenant, entry, items)
        yield from self._tidy(tenant)
        return stored

    def put_now(self, tenant: str, entry: Entry, items: Sequence[Item] = ()) -> bool:
        """Do as ``put``, and leave a budget that is exceeded by it as it is."""
        form = entry.form
        draft = PageDraft(self._seals.of(tenant, entry.kind, entry.id), 0)
        body = draft.page(form.body, len(form.body))
        own, outputs = draft.items(items), draft.items(form.outputs)
        head = Head(
            entry.session, draft.next, body, own + outputs, len(outputs), form.about, form.labels
        )
        words = [("session", entry.session), ("session", entry.session, entry.kind)]
        words += _listed_under(entry.kind, form.labels)
        terms = self._seals.terms(tenant, *words)
        terms += self._item_terms(tenant, entry.kind, [*items, *form.outputs])
        write = draft.write(head, None, terms=terms)
        if size_of(write.head, write.pages) > self.table.limits.tenant_bytes:
            return False
        return self.table.write(tenant, row_name(entry.kind, entry.id), write)

    def append(self, tenant: str, kind: Kind, id: str, items: Sequence[Item]) -> Steps[bool]:
        """Add items after the others; those whose id is there already are left out.

        Returns False if there is no such object, or none any more: it had outgrown the budget.

        Raises:
            Outgrown: it would have more than ``MAX_ITEMS``.
        """

        def grown(object: Object, draft: PageDraft) -> Write | None:
            known = {id for page in object.head.pages for id in page.ids}
            fresh = [x for x in items if x.id not in known]
            if object.head.num + len(fresh) > MAX_ITEMS:
                raise Outgrown
            if not fresh:
                return None
            pages = object.head.pages + draft.items(fresh)
            head = msgspec.structs.replace(object.head, pages=pages, next=draft.next)
            return draft.write(head, object.seen, terms=self._item_terms(tenant, kind, fresh))

        if not (yield from self._change(tenant, kind, id, grown)):
            return False
        yield from self._tidy(tenant)
        return self.find(tenant, kind, id) is not None

    def remove_item(self, tenant: str, kind: Kind, id: str, item: str) -> Steps[bool]:
        """Remove one item, if it is there; returns False if there is no such object."""

        def shrunk(object: Object, draft: PageDraft) -> Write | None:
            page = _page_of(object.head, item)
            if page is None:
                return None
            items = self._opened(page, self._read(tenant, object, [page])[0])
            if items is None:
                return None
            rest = draft.items(x for x in items if x.id != item)
            at = object.head.pages.index(page)
            pages = (*object.head.pages[:at], *rest, *object.head.pages[at + 1 :])
            head = msgspec.structs.replace(object.head, pages=pages, next=draft.next)
            left = self._item_terms(tenant, kind, [Item(item, b"")])
            return draft.write(head, object.seen, dropped=[page.number], left=left)

        return (yield from self._change(tenant, kind, id, shrunk))

    def relabel(
        self, tenant: str, kind: Kind, id: str, anew: Callable[[bytes], Form]
    ) -> Steps[bytes | None]:
        """Replace an object's body and labels by those that ``anew`` makes of the body.

        Returns the new body; None if there is no such object.
        """
        made = b""

        def changed(object: Object, draft: PageDraft) -> Write | None:
            nonlocal made
            body = self.body(tenant, object)
            if body is None:
                return None
            form = anew(body)
            made = form.body
            terms, before = (
                self._seals.terms(tenant, *_listed_under(kind, x))
                for x in (form.labels, object.head.labels)
            )
            page = draft.page(made, len(made))
            head = msgspec.structs.replace(
                object.head, body=page, labels=form.labels, next=draft.next
            )
            left = [x for x in before if x not in terms]
            dropped = [object.head.body.number]
            return draft.write(head, object.seen, dropped=dropped, terms=terms, left=left)

        object = self.find(tenant, kind, id)
        if object is None:
            return None
        yield object.head.body.nbytes
        there = yield from self._change(tenant, kind, id, changed)
        return made if there and made else None

    def delete(self, tenant: str, kind: Kind, id: str) -> Steps[bool]:
        """Remove an object and its items, for good; returns False if it is not there."""
        self.table.drop_copies()
        there = self.table.delete(tenant, name := row_name(kind, id))
        self._recent.forget(tenant, name)
        yield from self._tidy(tenant)
        return there

    def forget(self, tenant: str, session: str) -> Steps[int]:
        """Remove all objects of a session; returns how many."""
        self.table.drop_copies()
        (term,) = self._seals.terms(tenant, ("session", session))
        number, beyond = 0, None
        while some := self._slice(tenant, term, beyond):
            beyond = some[-1][0]
            for _, name in some:
                number += self.table.delete(tenant, name)
                self._recent.forget(tenant, name)
                yield 0
        yield from self._tidy(tenant)
        return number

    def chores(self) -> Steps[None]:
        """Do what no tenant's request does, a piece at each step."""
        for _ in self.table.chores():
            yield 0

    def _change(
        self, tenant: str, kind: Kind, id: str, change: Callable[[Object, PageDraft], Write | None]
    ) -> Steps[bool]:
        """Change an object as ``change`` says; None: it stays as it is.

        Others may come between: then it is said anew. Returns False if there is no such object.
        """
        seal = self._seals.of(tenant, kind, id)
        for _ in range(MAX_TRIES):
            object = self.find(tenant, kind, id)
            if object is None:
                return False
            wanted = change(object, PageDraft(seal, object.head.next))
            if wanted is None or self.table.write(tenant, object.name, wanted):
                return True
            yield 0
        raise StoreFailed("too many change the same object at once", "busy")

    def _tidy(self, tenant: str) -> Steps[None]:
        while self.table.tidy(tenant):
            yield 0

    def _slice(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool = True
    ) -> list[tuple[int, str]]:
        return self.table.listed(tenant, term, beyond, ascending=ascending, limit=SLICE_ITEMS)

    def _under(self, tenant: str, *words: str) -> Iterator[Object]:
        """Yield the objects under a term that are there, the latest first."""
        (term,) = self._seals.terms(tenant, words)
        for number, name in self._slice(tenant, term, None, ascending=False):
            if (object := self._named(tenant, number, name)) is not None:
                yield object

    def _named(self, tenant: str, number: int, name: str) -> Object | None:
        kind, _, id = name.partition(":")
        object = self.find(tenant, cast(Kind, kind), id, uses=False)
        return object if object is not None and object.number == number else None

    def _item_terms(self, tenant: str, kind: Kind, items: Sequence[Item]) -> list[bytes]:
        """Return the terms of items that requests may refer to by their ids."""
        words = [("item", x.id) for x in items] if kind != "completion" else []
        return self._seals.terms(tenant, *words)

    def _read(self, tenant: str, object: Object, pages: Sequence[Page]) -> list[bytes | None]:
        """Read and open pages; None for each that is not as it was."""
        seal = self._seals.of(tenant, object.kind, object.id)
        opened: list[bytes | None] = []
        if not pages:
            return []
        sealed = self.table.pages(tenant, object.name, [x.number for x in pages])
        for page, content in zip(pages, sealed, strict=True):
            try:
                opened.append(None if content is None else seal.open(content, "page", page.number))
            except NotOurs:
                opened.append(None)
        return opened

    def _items(
        self, tenant: str, object: Object, pages: Sequence[Page]
    ) -> Steps[list[Item] | None]:
        """Read items of whole pages; None if one of these is not as it was."""
        items: list[Item] = []
        row = (tenant, object.name, object.number)
        for some in slices(pages):
            known = {x: self._recent.get(PageKey(*row, x)) for x in some}
            unread = [x for x, found in known.items() if found is None]
            for page, content in zip(unread, self._read(tenant, object, unread), strict=True):
                known[page] = opened = self._opened(page, content)
                if opened is None:
                    return None
                self._recent.put(PageKey(*row, page), opened)
            items += chain.from_iterable(known[x] or () for x in some)
            yield 0
        return items

    def _opened(self, page: Page, content: bytes | None) -> list[Item] | None:
        if content is None:
            return None
        bodies = msgspec.json.decode(content, type=list[msgspec.Raw])
        return [Item(id, bytes(x)) for id, x in zip(page.ids, bodies, strict=True)]


def _listed_under(kind: Kind, labels: Sequence[Label] | None) -> list[tuple[str, ...]]:
    if labels is None:
        return []
    return [("list", kind), *(("label", kind, *x) for x in sorted(set(labels)))]


def _page_of(head: Head, item: str) -> Page | None:
    return next((x for x in head.pages if item in x.ids), None)
