"""Objects and their items as a request goes on from them: all found anew, each read once.

A client that goes on from a response has us recall all before it. Whether each is there, and is as
it was, is asked of the shelf every time, for a whole line in a few questions. Items that were read
are remembered for a while, so that only those that are new are read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from gateway.stored.seal import SUM_BYTES, Head, NotOurs, Seals, added
from gateway.stored.shelf import SLICE_ITEMS, Found, Item, Kind, Misshapen, Shelf, Span, Steps

REMEMBERED_BYTES: Final = 32 << 20  # of all tenants together
REMEMBERED_S: Final = 600.0  # without use; another gateway may have deleted it meanwhile
USED_EVERY_S: Final = 60.0  # a use within this of the last one is not noted on the shelf
_ROW_BYTES: Final = 300  # what an object or an item takes besides its bytes, about
_Name: TypeAlias = tuple[Kind, str]


class Object(NamedTuple):
    """An object that is there."""

    kind: Kind
    id: str
    head: Head
    seen: bytes  # the head as it lies
    body_bytes: int


class ReadItems(NamedTuple):
    """The items of an object that were read, from its first one on."""

    items: tuple[Item, ...] = ()
    last: int = -1  # number of the last one
    sum: bytes = bytes(SUM_BYTES)
    nbytes: int = 0


class Remembered(NamedTuple):
    """An object as it was found, and its items as far as they were read."""

    seen: bytes  # its head as it lay
    head: Head
    used_s: float  # when its use was noted
    read: ReadItems = ReadItems()

    @property
    def nbytes(self) -> int:
        return len(self.seen) + self.read.nbytes + _ROW_BYTES * (1 + len(self.read.items))


class Memory:
    """Remembers objects; the tenant with most bytes first forgets what it used least recently.

    Used by several threads.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, OrderedDict[_Name, Remembered]] = {}
        self._sizes: dict[str, int] = {}
        self.nbytes = 0

    def get(self, tenant: str, kind: Kind, id: str) -> Remembered | None:
        with self._lock:
            objects = self._objects.get(tenant, OrderedDict())
            if (kind, id) in objects:
                objects.move_to_end((kind, id))
            return objects.get((kind, id))

    def put(self, tenant: str, kind: Kind, id: str, object: Remembered) -> None:
        """Remember this of an object, and nothing else."""
        with self._lock:
            self._remove(tenant, (kind, id))
            self._objects.setdefault(tenant, OrderedDict())[kind, id] = object
            self._count(tenant, object.nbytes)
            while self.nbytes > self._max_bytes:
                most = max(self._sizes, key=self._sizes.__getitem__)
                self._remove(most, next(iter(self._objects[most])))

    def drop(self, tenant: str, kind: Kind, id: str) -> None:
        with self._lock:
            self._remove(tenant, (kind, id))

    def drop_old(self) -> None:
        """Forget what was not used for ``REMEMBERED_S``."""
        oldest = self._clock() - REMEMBERED_S
        with self._lock:
            old = [(t, x) for t, of in self._objects.items() for x in of if of[x].used_s < oldest]
            for tenant, name in old:
                self._remove(tenant, name)

    def _remove(self, tenant: str, name: _Name) -> None:
        object = self._objects.get(tenant, OrderedDict()).pop(name, None)
        if object is not None:
            self._count(tenant, -object.nbytes)

    def _count(self, tenant: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._sizes[tenant] = self._sizes.get(tenant, 0) + nbytes
        if not self._objects[tenant]:
            del self._objects[tenant], self._sizes[tenant]


class Recall:
    """Finds and reads what requests go on from. Used by several threads."""

    def __init__(
        self,
        shelf: Shelf,
        seals: Seals,
        find: Callable[[str, Kind, str], Steps[Object | None]],
        max_bytes: int = REMEMBERED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``find`` finds one object that may be of an older release."""
        self._shelf = shelf
        self._seals = seals
        self._find = find
        self._clock = clock
        self.memory = Memory(max_bytes, clock)

    def line(
        self, tenant: str, kind: Kind, id: str, take: Callable[[Head], None]
    ) -> Steps[list[Object] | None]:
        """Find an object and all before it, the last one first; None if one is not there.

        Args:
            take: called with the head of each; an error that it raises ends the line.
        """
        line: list[Object] = []
        following: str | None = id
        while following is not None:
            ids = list(self._ids_before(tenant, kind, following))
            due = {x for x in ids if self._is_due(tenant, kind, x)}
            try:
                found = self._shelf.find(tenant, kind, ids, due)
            except Misshapen:
                return None
            for x, of in zip(ids, found, strict=True):
                object = self._object(tenant, kind, x, of, x in due)
                object = object or (yield from self._find(tenant, kind, x))
                if object is None:
                    self.memory.drop(tenant, kind, x)
                    return None
                take(object.head)
                line.append(object)
                following = object.head.about.get("previous")
                if following is None:
                    break
            yield 0
        return line

    def read_all(self, tenant: str, object: Object) -> Steps[list[Item] | None]:
        """Read all items; None if one was changed, moved, put back or taken away.

        The caller has said that it will hold the ``nbytes`` of the object's head.
        """
        known = self.memory.get(tenant, object.kind, object.id)
        before = known.read if known is not None else ReadItems()
        if (len(before.items), before.sum) == (object.head.num, object.head.sum):
            return list(before.items)
        read = yield from self._read_on(tenant, object, before)
        if read is None and before.items:  # some of them are there no more
            read = yield from self._read_on(tenant, object, ReadItems())
        if read is None:
            return None
        used_s = self._clock() if known is None else known.used_s
        now = Remembered(object.seen, object.head, used_s, read)
        self.memory.put(tenant, object.kind, object.id, now)
        return list(read.items)

    def _ids_before(self, tenant: str, kind: Kind, id: str) -> Iterator[str]:
        """Yield the id, and those of the objects before it as far as is known: a slice of them."""
        for _ in range(SLICE_ITEMS):
            yield id
            known = self.memory.get(tenant, kind, id)
            if known is None or "previous" not in known.head.about:
                return
            id = known.head.about["previous"]

    def _is_due(self, tenant: str, kind: Kind, id: str) -> bool:
        known = self.memory.get(tenant, kind, id)
        return known is None or self._clock() - known.used_s > USED_EVERY_S

    def _object(
        self, tenant: str, kind: Kind, id: str, found: Found | None, used: bool
    ) -> Object | None:
        """Open what was found; None if it is nothing that could be opened here."""
        if found is None or not found.head:
            return None
        known = self.memory.get(tenant, kind, id)
        if known is None or known.seen != found.head:
            try:
                head = self._seals.entry(tenant, kind, id).open_head(found.head)
            except NotOurs:
                return None
            read = known.read if known is not None else ReadItems()
            known, used = Remembered(found.head, head, self._clock(), read), True
        if used:
            self.memory.put(tenant, kind, id, known._replace(used_s=self._clock()))
        return Object(kind, id, known.head, found.head, found.body_bytes)

    def _read_on(self, tenant: str, object: Object, read: ReadItems) -> Steps[ReadItems | None]:
        """Read the items after those that were read; None if not all come to the head's sum."""
        seal = self._seals.entry(tenant, object.kind, object.id)
        items, last, sum_ = list(read.items), read.last, read.sum
        head = object.head
        while len(items) < head.num:
            after = items[-1].id if items else None
            try:
                span = Span(head.num - len(items), after)
                parts = self._shelf.parts(tenant, object.kind, object.id, span)
            except Misshapen:
                return None
            if not parts:
                return None
            for part in parts:
                number, body = seal.open_item(part)
                if body is None or not last < number < head.next:
                    return None
                last, sum_ = number, added(sum_, seal.summand(part.id, number))
                items.append(Item(part.id, body))
            yield 0
        if len(items) != head.num or sum_ != head.sum:
            return None
        return ReadItems(tuple(items), last, sum_, sum(len(x.body) for x in items))
