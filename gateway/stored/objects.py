"""Stored responses, conversations and chat completions: put, shown, listed, changed, deleted.

The output items of a response are items of their own, so that they are found by id, and read
without the rest of it.

Methods are made of steps: between two of them another tenant has its turn (see ``stored``). A step
that will hold bytes says how many before it reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from msgspec.structs import replace

from gateway.stored.rows import (
    Head,
    Item,
    KeyOf,
    Kind,
    NotOurs,
    Object,
    ObjectSeal,
    Page,
    PageDraft,
    slices,
)
from gateway.stored.table import Steps, StoreFailed, Table, Write

Json: TypeAlias = dict[str, Any]
MAX_ITEMS: Final = 16 << 10  # of one object
PAGE_BYTES: Final = 4 << 20  # of a list; it may end before its limit
_LINE: Final = 32  # of a line of responses so many are asked for at once
_MAX_TRIES: Final = 16  # of a change that others come between


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


class ObjectStore(NamedTuple):
    """The objects of all tenants in one table. Used by several threads."""

    table: Table
    key_of: KeyOf

    def of(self, tenant: str) -> Objects:
        """Return a tenant's own objects."""
        return Objects(self.table, ObjectSeal(self.key_of, self.table.place, tenant), tenant)


class Objects:
    """One tenant's objects."""

    def __init__(self, table: Table, seal: ObjectSeal, tenant: str) -> None:
        self.table = table
        self._seal = seal
        self._tenant = tenant

    def find(self, kind: Kind, id: str, *, uses: bool = True) -> Object | None:
        """Find an object; note that it was used, if this is a use."""
        return self._find_all(kind, [id], uses=uses)[0]

    def show(self, kind: Kind, id: str) -> Steps[bytes | None]:
        """Return an object as it is shown."""
        object = self.find(kind, id)
        if object is None:
            return None
        pages = (object.head.body, *object.head.pages[object.head.num_own :])
        yield sum(x.nbytes for x in pages)
        parts = [x for x in self._read(object, pages) if x is not None]
        if len(parts) < len(pages):
            return None
        body, *answer = parts
        if kind != "response":
            return body
        return b'%b,"output":[%b]}' % (body[:-1], b",".join(x[1:-1] for x in answer))

    def page(self, kind: Kind, id: str, query: Query) -> Steps[ObjectList | None]:
        """List items that an object was made with; those that were changed are passed over."""
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

    def read_all(self, object: Object) -> Steps[list[Item] | None]:
        """Read all items; None if one was changed, moved, put back or taken away.

        The caller has said that it will hold the ``nbytes`` of the object's head.
        """
        items: list[Item] = []
        for pages in slices(object.head.pages):
            for page, content in zip(pages, self._read(object, pages), strict=True):
                if content is None:
                    return None
                items += page.items(content)
            yield 0
        return items

    def item(self, kind: Kind, id: str, item: str) -> Steps[bytes | None]:
        """Return one item of an object."""
        object = self.find(kind, id)
        pages = () if object is None else object.head.pages
        page = next((x for x in pages if item in x.ids), None)
        if object is None or page is None:
            return None
        yield page.nbytes
        content = self._read(object, [page])[0]
        return content and page.items(content)[page.ids.index(item)].body

    def find_item(self, item: str) -> Steps[bytes | None]:
        """Find an item by its id in any object, the latest if several have it."""
        for object in self._under("item", item):
            if object is not None:
                return (yield from self.item(object.kind, object.id, item))
            yield 0
        return None

    def listed(self, kind: Kind, like: Json, query: Query) -> Steps[ObjectList]:
        """List objects with the ``model`` and ``metadata`` of ``like``, as they were stored."""
        last = None
        if query.after is not None and (last := self.find(kind, query.after, uses=False)) is None:
            return ObjectList([], False)
        labels = _labels_of(like)
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
        """Return the id of a session's object that was stored last."""
        return next((x.id for x in self._under("session", session, kind) if x), None)

    def line(self, id: str, take: Callable[[Head], None]) -> Steps[list[Object] | None]:
        """Find a response and all before it, the last one first; None if one is not there.

        Each names the one before it, and some more as they were when it was put: these are asked
        for at once. What each of them says now still counts.

        Args:
            take: called with the head of each; an error that it raises ends the line.
        """
        line: list[Object] = []
        asked: Sequence[str] = (id,)
        following: str | None = id
        while following is not None:
            for id, object in zip(asked, self._find_all("response", asked), strict=True):
                if id != following:  # it goes on from another one than it did
                    break
                if object is None:
                    return None
                take(object.head)
                line.append(object)
                following = object.head.about.get("previous")
            known = line[-1].head.line
            asked = known if following in known[:1] else (following or "",)
            yield 0
        return line

    def put(
        self, kind: Kind, object: Json, session: str, items: Iterable[Item] = ()
    ) -> Steps[bool]:
        """Store an object and its items, all or nothing; one of that id is replaced.

        Returns False if it is larger than all that the tenant may store.

        Args:
            session: it goes when this one is forgotten.
        """
        outputs, about, line = list[Item](), dict[str, str](), list[str]()
        if kind == "response":
            outputs = [Item(x["id"], msgspec.json.encode(x)) for x in object.get("output") or ()]
            object = {name: x for name, x in object.items() if name != "output"}
            talk = object.get("conversation")
            links = {
                "previous": object.get("previous_response_id"),
                "conversation": talk.get("id") if isinstance(talk, dict) else None,
            }
            about = {name: x for name, x in links.items() if isinstance(x, str)}
        if "previous" in about:
            last = self.find(kind, about["previous"], uses=False)
            line = [about["previous"], *(last.head.line if last else ())][:_LINE]
        draft, body = PageDraft(), msgspec.json.encode(object)
        page = draft.page(body)
        own, answer = draft.items(items), draft.items(outputs)
        labels = _labels_of(object) if kind == "completion" else None
        pages = own + answer
        head = Head(session, draft.next, page, pages, len(answer), about, labels, tuple(line))
        if head.taken > self.table.limits.tenant_bytes:
            return False
        self._write(kind, object["id"], head, draft, None)
        yield 0
        yield from self.tidy()
        return True

    def append(self, kind: Kind, id: str, items: Sequence[Item]) -> Steps[bool]:
        """Add items after the others; those whose id is there already are left out.

        Returns False if there is no such object, or none any more: it had outgrown the budget.

        Raises:
            Outgrown: it would have more than ``MAX_ITEMS``.
        """

        def grown(object: Object, draft: PageDraft) -> Head:
            known = {id for page in object.head.pages for id in page.ids}
            fresh = [x for x in items if x.id not in known]
            if len(known) + len(fresh) > MAX_ITEMS:
                raise Outgrown
            return replace(object.head, pages=object.head.pages + draft.items(fresh))

        yield from self._change(kind, id, grown)
        yield from self.tidy()
        return self.find(kind, id) is not None

    def remove_item(self, kind: Kind, id: str, item: str) -> Steps[bool]:
        """Remove one item, if it is there; returns False if there is no such object."""

        def shrunk(object: Object, draft: PageDraft) -> Head:
            pages: list[Page] = []
            for page in object.head.pages:
                content = self._read(object, [page])[0] if item in page.ids else None
                kept = [] if content is None else [x for x in page.items(content) if x.id != item]
                pages += [page] if content is None else draft.items(kept)
            return replace(object.head, pages=tuple(pages))

        return (yield from self._change(kind, id, shrunk))

    def relabel(self, kind: Kind, id: str, metadata: Json) -> Steps[bytes | None]:
        """Replace an object's metadata; returns the new body, None if there is no such object."""
        body: bytes | None = None

        def labelled(object: Object, draft: PageDraft) -> Head:
            nonlocal body
            body = self._read(object, [object.head.body])[0]
            if body is None:
                return object.head
            anew = {**msgspec.json.decode(body), "metadata": metadata}
            body = msgspec.json.encode(anew)
            labels = None if object.head.labels is None else _labels_of(anew)
            return replace(object.head, body=draft.page(body), labels=labels)

        object = self.find(kind, id)
        yield object.head.body.nbytes if object else 0
        return body if (yield from self._change(kind, id, labelled)) else None

    def delete(self, kind: Kind, id: str) -> Steps[bool]:
        """Remove an object and its items, for good; returns False if it is not there."""
        there = self.table.delete(self._tenant, [f"{kind}:{id}"])
        yield from self.tidy()
        return bool(there)

    def forget(self, session: str) -> Steps[int]:
        """Remove all objects of a session; returns how many."""
        number, beyond = self.table.delete(self._tenant, []), None
        term = self._seal.term("session", session)
        while some := self.table.listed(self._tenant, term, beyond, ascending=True):
            beyond = some[-1][0]
            for _, name in some:
                number += self.table.delete(self._tenant, [name])
                yield 0
        yield from self.tidy()
        return number

    def tidy(self) -> Steps[None]:
        """Free the room of objects that are deleted, too old, or beyond the budget."""
        while self.table.tidy(self._tenant):
            yield 0

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
        """Yield the objects that are found by some words; None where a step ends."""
        term = self._seal.term(*words)
        while some := self.table.listed(self._tenant, term, beyond, ascending=ascending):
            for beyond, name in some:
                kind, _, id = name.partition(":")
                object = self.find(cast(Kind, kind), id, uses=False)
                if object is not None and object.number == beyond:
                    yield object
            yield None

    def _read(self, object: Object, pages: Sequence[Page]) -> list[bytes | None]:
        """Read and open pages; None for each that is not as it was."""
        kind, id, numbers = object.kind, object.id, [x.number for x in pages]
        opened: list[bytes | None] = [None] * len(pages)
        for i, sealed in enumerate(self.table.pages(self._tenant, f"{kind}:{id}", numbers)):
            with suppress(NotOurs):
                if sealed is not None:
                    opened[i] = self._seal.open(sealed, kind, id, "page", numbers[i])
        return opened

    def _change(
        self, kind: Kind, id: str, change: Callable[[Object, PageDraft], Head]
    ) -> Steps[bool]:
        """Change an object as ``change`` says; False if there is none.

        Others may come between: then it is asked anew.
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
        raise StoreFailed("too many change the same object at once", "busy")

    def _write(self, kind: Kind, id: str, head: Head, draft: PageDraft, was: Object | None) -> bool:
        """Put an object, or change the one that there was, if it is so yet."""
        sealed = self._seal.close(msgspec.msgpack.encode(head), kind, id, "top")
        before = was.head if was else Head("", 0, head.body)
        old, new = ({x.number for x in (y.body, *y.pages)} for y in (before, head))
        words, left = head.words(kind), before.words(kind) if was else set()
        write = Write(
            was and was.seen,
            sealed,
            head.taken + len(sealed),
            {n: self._seal.close(x, kind, id, "page", n) for n, x in draft.contents.items()},
            old - new,
            [self._seal.term(*x) for x in words - left],
            [self._seal.term(*x) for x in left - words],
        )
        return self.table.write(self._tenant, f"{kind}:{id}", write)


def _labels_of(object: Json) -> tuple[tuple[str, str], ...]:
    metadata, model = object.get("metadata"), object.get("model")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    labels = [(f"metadata.{name}", x) for name, x in pairs if isinstance(x, str)]
    return (*labels, ("model", model)) if isinstance(model, str) else tuple(labels)
