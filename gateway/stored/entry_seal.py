"""The seal of one entry: of its head, its body, and each of its items.

Everything is sealed with the kind of shelf, tenant, kind of object, its id, and its place in it: a
body, a head, or an item by its id and number. The head says how many items there are, and has a
sum of their ids and numbers, so that it shows when some were taken out, put back or moved.

    head     session, number of the next item, items, their bytes and sum, a few words
    item     8 bytes: its number | the seal
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from gateway.stored.forms import Item, Labels
from gateway.stored.seal import NotOurs, Seal
from gateway.stored.shelf import Kind, Part

# Makes a tenant's key of its name and a purpose (``Tenants.key_of``).
KeyOf: TypeAlias = Callable[[str, bytes], bytes]

SUM_BYTES = 16
_NUMBER_BYTES = 8
_TAG_BYTES = 16
_ALL = b""  # the tag of every entry that is listed at all


class Head(msgspec.Struct, frozen=True):
    """The small part of an object that is read whenever anything of it is."""

    session: str
    next: int = 0  # number of the next item
    num: int = 0
    nbytes: int = 0  # of the items' bodies
    sum: bytes = bytes(SUM_BYTES)
    outputs: int = 0  # of the items, the last ones; such an object's items never change
    output_bytes: int = 0
    about: dict[str, str] = {}


class Seals:
    """The seals of all entries on a shelf of one kind."""

    def __init__(self, place: str, key_of: KeyOf) -> None:
        self._place = place
        self._key_of = key_of

    def entry(self, tenant: str, kind: Kind, id: str) -> EntrySeal:
        """Return the seal of one entry."""
        key, sums = (self._key_of(tenant, x) for x in (b"stored", b"sums"))
        return EntrySeal(key, sums, (self._place, tenant, kind, id))

    def tags(self, tenant: str, labels: Labels | None) -> list[bytes]:
        """Return the tags that an entry is listed under; None: in no list."""
        return [] if labels is None else [*self._hashes(tenant, labels), _ALL]

    def tags_of_all(self, tenant: str, labels: Labels) -> list[bytes]:
        """Return the tags of the entries that have all of the labels."""
        return self._hashes(tenant, labels) or [_ALL]

    def _hashes(self, tenant: str, labels: Labels) -> list[bytes]:
        key = self._key_of(tenant, b"labels")
        return [hashed(key, x)[:_TAG_BYTES] for x in sorted(set(labels))]


class EntrySeal:
    """The seal of one object, and of the parts inside it."""

    def __init__(self, key: bytes, sums: bytes, place: tuple[str, ...]) -> None:
        self._sums = sums
        self._seal = Seal(key)
        self._place = place

    def close(self, content: bytes, *what: str | int) -> bytes:
        return self._seal.close(content, msgspec.json.encode([*self._place, *what]))

    def open(self, sealed: bytes, *what: str | int) -> bytes:
        return self._seal.open(sealed, msgspec.json.encode([*self._place, *what]))

    def close_head(self, head: Head) -> bytes:
        return self.close(msgspec.msgpack.encode(head), "head")

    def open_head(self, sealed: bytes) -> Head:
        return msgspec.msgpack.decode(self.open(sealed, "head"), type=Head)

    def open_item(self, part: Part) -> tuple[int, bytes | None]:
        """Return an item's number and body; None if it was not sealed for this place."""
        number = int.from_bytes(part.body[:_NUMBER_BYTES])
        try:
            return number, self.open(part.body[_NUMBER_BYTES:], "item", part.id, number)
        except NotOurs:
            return number, None

    def with_items(self, head: Head, items: Sequence[Item]) -> tuple[Head, list[Part]]:
        """Return the head with items after the others, and these as they lie on a shelf."""
        parts, sum_ = [], head.sum
        for number, item in enumerate(items, head.next):
            sealed = self.close(item.body, "item", item.id, number)
            parts.append(Part(item.id, number.to_bytes(_NUMBER_BYTES) + sealed))
            sum_ = added(sum_, self.summand(item.id, number))
        grown = msgspec.structs.replace(
            head,
            next=head.next + len(items),
            num=head.num + len(items),
            nbytes=head.nbytes + sum(len(x.body) for x in items),
            sum=sum_,
        )
        return grown, parts

    def with_outputs(self, head: Head, outputs: Sequence[Item]) -> tuple[Head, list[Part]]:
        """Return the head with the items of an answer after the others, and these."""
        grown, parts = self.with_items(head, outputs)
        nbytes = grown.nbytes - head.nbytes
        return msgspec.structs.replace(grown, outputs=len(parts), output_bytes=nbytes), parts

    def summand(self, item: str, number: int) -> bytes:
        """Return what an item adds to the sum of a head; it takes the secret to compute it."""
        return hashed(self._sums, [*self._place, item, number])[:SUM_BYTES]


def hashed(key: bytes, what: Sequence[str | int]) -> bytes:
    return hmac.digest(key, msgspec.json.encode(what), "sha256")


def added(one: bytes, other: bytes) -> bytes:
    """Add, or take away again: the exclusive or of both."""
    return bytes(x ^ y for x, y in zip(one, other, strict=True))
