"""Stores, reads, lists, changes and deletes responses, conversations and chat completions.

Methods run in steps, between which other tenants get their turn (see ``stored``). A step yields the
number of bytes that it will hold before it reads them. A row's head lists the row's pages. A page
never changes, so those that were read last stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby
from operator import itemgetter
from typing import Final, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from gateway.stored.recent import Recent
from gateway.stored.rows import (
    Head,
    Item,
    Json,
    KeyOf,
    Kind,
    NotOurs,
    Object,
    ObjectSeal,
    Page,
    PageDraft,
    labels_of,
    parts_of,
    slices,
)
from gateway.stored.table import Steps, StoreFailed, Table, Write

MAX_ITEMS: Final = 16 << 10  # of one object
PAGE_BYTES: Final = 4 << 20  # of one answer with a list, which may have fewer rows than its limit
_ITEM_BYTES: Final = 200  # that an item in memory takes besides its body
_LINE: Final = 32  # responses of a chain that are read at once
_MAX_TRIES: Final = 16  # of a change, if others change the object meanwhile


class Outgrown(Exception):
    """An object would have more than ``MAX_ITEMS`` items."""


class Query(NamedTuple):
    """The wanted part of a list: at most ``limit`` rows after the one with the id ``after``."""

    limit: int
    after: str | None = None  # after an unknown id the list is empty
    ascending: bool = True


class ObjectList(NamedTuple):
    """A part of a list: ids and bodies, and whether more rows follow."""

    rows: list[Item]
    more: bool


class ObjectStore:
    """The objects of all tenants in one table. Used by several threads."""

    def __init__(self, table: Table, key_of: KeyOf) -> None:
        self.table = table
        self.key_of = key_of
        # The items of pages, up to so many bytes; keys: tenant, the row's name and number, page.
        self.pages = Recent[tuple[str, str, int, Page], list[Item]](16 << 20)
        # The previous response of each of so many responses; keys: tenant, id.
        self.before = Recent[tuple[str, str], str](16 << 10)

    def of(self, tenant: str) -> Objects:
        """Return a tenant's own objects."""
        return Objects(self, tenant)


class Objects:
    """One tenant's objects."""

    def __init__(self, store: ObjectStore, tenant: str) -> None:
        self.table = store.table
        self._pages = store.pages
        self._before = store.before
        self._seal = ObjectSeal(store.key_of, store.table.place, tenant)
        self._tenant = tenant

    def find(self, kind: Kind, id: str, *, uses: bool = True) -> Object | None:
        """Find an object; None if it does not exist. ``uses``: note the time of use."""
        return self._find_all(kind, [id], uses=uses)[0]

    def show(self, kind: Kind, id: str) -> Steps[bytes | None]:
        """Return an object's JSON, with a response's output; None if it does not exist."""
        object = self.find(kind, id)
        if object is None:
            return None
        answer = object.head.pages[object.head.num_own :]
        yield object.head.body.nbytes + sum(x.nbytes for x in answer)
        body = self._read(object, [object.head.body])[0]
        items = yield from self.read_all(object, answer)
        if body is None or items is None:
            return None
        if kind != "response":
            return body
        return b'%b,"output":[%b]}' % (body[:-1], b",".join(x.body for x in items))

    def page(self, kind: Kind, id: str, query: Query) -> Steps[ObjectList | None]:
        """List an object's own items, without damaged ones; None if the object does not exist."""
        object = self.find(kind, id)
        if object is None:
            return None
        own = object.head.pages[: object.head.num_own]
        places = [(page, item) for page in own for item in page.ids]
        if not query.ascending:
            places.reverse()
        if query.after is not None:
            ids = [item for _, item in places]
            places = places[ids.index(query.after) + 1 :] if query.after in ids else []
        rows: list[Item] = []
        held = 0
        for page, some in groupby(places[: query.limit], key=itemgetter(0)):
            if held > PAGE_BYTES - page.nbytes // 2 and rows:
                return ObjectList(rows, True)
            yield page.nbytes
            held += page.nbytes
            content = self._read(object, [page])[0]
            there = {} if content is None else {x.id: x for x in page.items(content)}
            rows += [there[item] for _, item in some if item in there]
        return ObjectList(rows, len(places) > query.limit)

    def read_all(
        self, object: Object, pages: Sequence[Page] | None = None
    ) -> Steps[list[Item] | None]:
        """Read all items, or those of some pages, in slices; the caller has yielded their bytes.

        Returns None if a page is missing or was tampered with.
        """
        items: list[Item] = []
        row = (self._tenant, object.name, object.number)
        for some in slices(object.head.pages if pages is None else pages):
            found = {x: self._pages.get((*row, x)) for x in some}
            unread = [x for x in some if found[x] is None]
            for page, content in zip(unread, self._read(object, unread), strict=True):
                if content is None:
                    return None
                found[page] = read = page.items(content)
                self._pages.put((*row, page), read, page.nbytes + _ITEM_BYTES * len(read))
            items += chain.from_iterable(found[x] or () for x in some)
            yield 0
        return items

    def item(self, kind: Kind, id: str, item: str) -> Steps[bytes | None]:
        """Return the JSON of one item; None if it, or the object, does not exist."""
        object = self.find(kind, id)
        pages = () if object is None else object.head.pages
        page = next((x for x in pages if item in x.ids), None)
        if object is None or page is None:
            return None
        yield page.nbytes
        content = self._read(object, [page])[0]
        return content and page.items(content)[page.ids.index(item)].body

    def find_item(self, item: str) -> Steps[bytes | None]:
        """Return an item of any object by its id, of several the latest; None if there is none."""
        for object in self._under("item", item):
            if object is not None:
                return (yield from self.item(object.kind, object.id, item))
            yield 0
        return None

    def listed(self, kind: Kind, like: Json, query: Query) -> Steps[ObjectList]:
        """List the objects whose ``model`` and ``metadata`` match those of ``like``."""
        last = None
        if query.after is not None and (last := self.find(kind, query.after, uses=False)) is None:
            return ObjectList([], False)
        labels = labels_of(like)
        words = ("label", kind, *labels[0]) if labels else ("list", kind)
        rows: list[Item] = []
        held = 0
        for object in self._under(*words, beyond=last and last.number, ascending=query.ascending):
            if object is None:
                yield 0
            elif set(labels) <= set(object.head.labels or ()):
                if len(rows) >= query.limit or held >= PAGE_BYTES:
                    return ObjectList(rows, True)
                yield object.head.body.nbytes
                if (body := self._read(object, [object.head.body])[0]) is not None:
                    rows.append(Item(object.id, body))
                    held += len(body)
        return ObjectList(rows, False)

    def latest(self, kind: Kind, session: str) -> str | None:
        """Return the id of the session's object that was stored last; None if there is none."""
        last = next(self._under("session", session, kind), None)
        return last and last.id

    def line(self, id: str, take: Callable[[Head], None]) -> Steps[list[Object] | None]:
        """Find a response and all before it, the last one first; None if one does not exist.

        Each response names the one before it. A chain that was followed before is read in batches,
        by the remembered ids; if an object now names another predecessor, that one counts.

        Args:
            take: called with the head of each; may raise to stop.
        """
        line: list[Object] = []
        following: str | None = id
        while following is not None:
            asked = [following]
            while len(asked) < _LINE and (before := self._before.get((self._tenant, asked[-1]))):
                asked.append(before)
            for id, object in zip(asked, self._find_all("response", asked), strict=True):
                if id != following:  # the remembered predecessor is outdated
                    break
                if object is None:
                    return None
                take(object.head)
                line.append(object)
                following = object.head.about.get("previous")
                if following is not None:
                    self._before.put((self._tenant, id), following)
            yield 0
        return line

    def put(
        self, kind: Kind, object: Json, session: str, items: Iterable[Item] = ()
    ) -> Steps[bool]:
        """Store an object and its items in one transaction; it replaces one with the same id.

        Returns False if it is larger than the tenant's budget.
        """
        parts, draft = parts_of(kind, object), PageDraft()
        body, own, answer = draft.page(parts.body), draft.items(items), draft.items(parts.answer)
        pages = own + answer
        head = Head(session, draft.next, body, pages, len(answer), parts.about, parts.labels)
        if not self._write(kind, object["id"], head, draft, None):
            return False
        yield 0
        yield from self.tidy()
        return True

    def append(self, kind: Kind, id: str, items: Sequence[Item]) -> Steps[list[Item] | None]:
        """Append items to an object; an item whose id is in use gets a new one.

        Returns the items as they were stored; None if the object does not exist, or was removed
        since it exceeded the budget. Raises ``Outgrown`` if it would have too many items.
        """
        added: list[Item] = []

        def grown(object: Object, draft: PageDraft) -> Head:
            known = {id for page in object.head.pages for id in page.ids}
            added[:] = [x.renamed() if x.id in known else x for x in items]
            if object.head.num + len(added) > MAX_ITEMS:
                raise Outgrown
            return replace(object.head, pages=object.head.pages + draft.items(added))

        yield from self._change(kind, id, grown)
        yield from self.tidy()
        return added if self.find(kind, id) is not None else None

    def remove_item(self, kind: Kind, id: str, item: str) -> Steps[bool]:
        """Remove an item if it exists; return False if the object does not exist."""

        def shrunk(object: Object, draft: PageDraft) -> Head:
            pages: list[Page] = []
            for page in object.head.pages:
                content = self._read(object, [page])[0] if item in page.ids else None
                kept = [] if content is None else [x for x in page.items(content) if x.id != item]
                pages += [page] if content is None else draft.items(kept)
            return replace(object.head, pages=tuple(pages))

        return (yield from self._change(kind, id, shrunk))

    def relabel(self, kind: Kind, id: str, metadata: Json) -> Steps[bytes | None]:
        """Replace an object's metadata; return the new body, None if it does not exist."""
        body: bytes | None = None

        def labelled(object: Object, draft: PageDraft) -> Head:
            nonlocal body
            body = self._read(object, [object.head.body])[0]
            if body is None:
                return object.head
            anew = {**msgspec.json.decode(body), "metadata": metadata}
            body = msgspec.json.encode(anew)
            labels = None if object.head.labels is None else labels_of(anew)
            return replace(object.head, body=draft.page(body), labels=labels)

        object = self.find(kind, id)
        yield object.head.body.nbytes if object else 0
        return body if (yield from self._change(kind, id, labelled)) else None

    def delete(self, kind: Kind, id: str) -> Steps[bool]:
        """Remove an object and its items; return False if it does not exist."""
        there = self._remove(f"{kind}:{id}")
        yield from self.tidy()
        return bool(there)

    def forget(self, session: str) -> Steps[int]:
        """Remove all objects of a session; return how many."""
        number, beyond = self._remove(), None
        term = self._seal.term("session", session)
        while some := self.table.listed(self._tenant, term, beyond, ascending=True):
            beyond = some[-1][0]
            for _, name in some:
                number += self._remove(name)
                yield 0
        yield from self.tidy()
        return number

    def tidy(self) -> Steps[None]:
        """Free the room of objects that are deleted, too old or exceed the budget."""
        while self.table.tidy(self._tenant):
            yield 0

    def _remove(self, *names: str) -> int:
        number = self.table.delete(self._tenant, names)
        self._pages.forget(lambda x: x[0] == self._tenant and x[1] in names)
        return number

    def _find_all(
        self, kind: Kind, ids: Sequence[str], *, uses: bool = True
    ) -> list[Object | None]:
        tops = self.table.find_all(self._tenant, [f"{kind}:{x}" for x in ids], uses=uses)
        found: list[Object | None] = [None] * len(ids)
        for i, top in enumerate(tops):
            with suppress(NotOurs):
                if top is not None:
                    packed = self._seal.open(top.head, kind, ids[i], "top")
                    head = msgspec.msgpack.decode(packed, type=Head)
                    found[i] = Object(kind, ids[i], head, top.head, top.number)
        return found

    def _under(
        self, *words: str, beyond: int | None = None, ascending: bool = False
    ) -> Iterator[Object | None]:
        """Yield the objects that are indexed under some words; None at the end of each step."""
        term = self._seal.term(*words)
        while some := self.table.listed(self._tenant, term, beyond, ascending=ascending):
            for beyond, name in some:
                kind, _, id = name.partition(":")
                object = self.find(cast(Kind, kind), id, uses=False)
                if object is not None and object.number == beyond:
                    yield object
            yield None

    def _read(self, object: Object, pages: Sequence[Page]) -> list[bytes | None]:
        """Read and decrypt pages; None for each that is missing or was tampered with."""
        if not pages:
            return []
        kind, id, numbers = object.kind, object.id, [x.number for x in pages]
        opened: list[bytes | None] = [None] * len(pages)
        for i, sealed in enumerate(self.table.pages(self._tenant, object.name, numbers)):
            with suppress(NotOurs):
                if sealed is not None:
                    opened[i] = self._seal.open(sealed, kind, id, "page", numbers[i])
        return opened

    def _change(
        self, kind: Kind, id: str, change: Callable[[Object, PageDraft], Head]
    ) -> Steps[bool]:
        """Replace an object's head by the result of ``change``; False if there is no object.

        If another thread has changed the object meanwhile, ``change`` is called again.
        """
        for _ in range(_MAX_TRIES):
            object = self.find(kind, id)
            if object is None:
                return False
            draft = PageDraft(object.head.next)
            head = change(object, draft)
            if head == object.head:
                return True
            if self._write(kind, id, replace(head, next=draft.next), draft, object):
                return True
            yield 0
        raise StoreFailed("too many requests change the same object at once", "busy")

    def _write(self, kind: Kind, id: str, head: Head, draft: PageDraft, was: Object | None) -> bool:
        """Store a new object, or replace ``was``; False if it has no room, or ``was`` changed."""
        sealed = self._seal.close(msgspec.msgpack.encode(head), kind, id, "top")
        nbytes = head.taken + len(sealed)
        if was is None and nbytes > self.table.limits.tenant_bytes:
            return False
        old = {was.head.body, *was.head.pages} if was else set()
        new = {head.body, *head.pages}
        words = head.words(kind, new - old)
        left = was.head.words(kind, old - new) if was else set()
        write = Write(
            was and was.seen,
            sealed,
            nbytes,
            {n: self._seal.close(x, kind, id, "page", n) for n, x in draft.contents.items()},
            [x.number for x in old - new],
            [self._seal.term(*x) for x in words - left],
            [self._seal.term(*x) for x in left - words],
        )
        return self.table.write(self._tenant, f"{kind}:{id}", write)
