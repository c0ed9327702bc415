"""The seal on data that leaves this process for one tenant: AES-256-GCM, bound to its place.

    1 byte of version | 12 bytes of nonce | the content, encrypted | 16 bytes of tag

The key is the tenant's own, made of the server's secret, so data sealed for one tenant opens for no
other tenant, and after a change of the secret not at all. A text that a client keeps for us is
sealed for no place, and goes out in base64.

An entry is sealed with the kind of shelf, tenant, kind of object, its id, and its place in it: a
body, a head, or an item by its id and number. The head says how many items there are, and has a sum
of their ids and numbers, so that it shows when some were taken out, put back or moved.

    head     session, number of the next item, items, their bytes and sum, a few words
    item     8 bytes: its number | the seal

An entry that an older release stored in plain text has no head. It is sealed when it is asked for,
and all of them are, one after the other, while the server runs.
"""

from __future__ import annotations

import binascii
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.stored.shelf import (
    SLICE_ITEMS,
    Change,
    Item,
    Kind,
    Labels,
    Part,
    Shelf,
    Span,
    Steps,
    older_form,
)

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12


# Returns what a sealed text holds; raises ``NotOurs``.
Open: TypeAlias = Callable[[str], str]
# Makes a tenant's key of its name and a purpose (``Tenants.key_of``).
KeyOf: TypeAlias = Callable[[str, bytes], bytes]
SUM_BYTES = 16
_NUMBER_BYTES = 8
_TAG_BYTES = 16
_ALL = b""  # the tag of every entry that is listed at all
_AT_ONCE = 32


class NotOurs(Exception):
    """This was not sealed here for this tenant and this place, or was changed since."""


class Seal:
    """Seals and opens what is one tenant's; ``key``: 32 bytes, for one purpose alone."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def close(self, content: bytes, place: bytes = b"") -> bytes:
        """Return the content sealed; it opens at ``place`` only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, content, _VERSION + place)

    def open(self, sealed: bytes, place: bytes = b"") -> bytes:
        """Return the content that ``close`` was given.

        Raises:
            NotOurs: it was sealed with another key or for another place, or is damaged, or no seal.
        """
        nonce, rest = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if sealed[:1] != _VERSION or len(nonce) < _NONCE_BYTES:
            raise NotOurs
        try:
            return self._cipher.decrypt(nonce, rest, _VERSION + place)
        except InvalidTag:
            raise NotOurs from None


class SealedText:
    """Seals and opens one tenant's texts; ``key``: 32 bytes, for this alone."""

    def __init__(self, key: bytes) -> None:
        self._seal = Seal(key)

    def close(self, text: str) -> str:
        """Return the text sealed."""
        return b64encode(self._seal.close(text.encode())).decode()

    def open(self, sealed: str) -> str:
        """Return the text that ``close`` was given.

        Raises:
            NotOurs: it was sealed with another key, or is damaged, or no seal at all.
        """
        try:
            packed = b64decode(sealed, validate=True)
        except (binascii.Error, ValueError):
            raise NotOurs from None
        return self._seal.open(packed).decode()


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


class Older:
    """The entries of a shelf that were written before entries were sealed."""

    def __init__(self, shelf: Shelf, seals: Seals) -> None:
        self._shelf = shelf
        self._seals = seals

    def seal_all(self, tenant: str, kind: Kind) -> Steps[None]:
        """Seal and label all of one kind, so that lists are whole."""
        after = ""
        while (ids := self._shelf.old(tenant, kind, after)) and ids[-1] > after:
            yield from self.seal_some([(tenant, kind, id) for id in ids])
            after = ids[-1]

    def seal_some(self, entries: Sequence[tuple[str, Kind, str]]) -> Steps[None]:
        """Seal entries: small ones in one go, since each transaction takes its time."""
        for i in range(0, len(entries), _AT_ONCE):
            large: list[Steps[None]] = []
            with self._shelf.in_one_go():
                for entry in entries[i : i + _AT_ONCE]:
                    steps = self.seal(*entry)
                    if next(steps, None) is not None:
                        large.append(steps)
            yield 0
            for steps in large:
                yield from steps

    def seal(self, tenant: str, kind: Kind, id: str) -> Steps[None]:
        """Seal an entry that an older release wrote, item by item, its head last.

        It may have been begun before. Until there is a head nothing else changes the entry.
        """
        seal = self._seals.entry(tenant, kind, id)
        (found,), body = self._shelf.find(tenant, kind, [id]), self._shelf.body(tenant, kind, id)
        if found is None or found.head or body is None:
            return  # another one has done it meanwhile
        form = older_form(kind, body)
        if form is None:
            self._shelf.delete(tenant, kind, id)
            return
        head, after = Head(found.session, about=form.about), None
        sealed: list[Part] = []
        while parts := self._shelf.parts(tenant, kind, id, Span(SLICE_ITEMS, after)):
            if sealed:
                some = Change(b"", b"", rewritten=sealed)
                if not self._shelf.change(tenant, kind, id, some):
                    return
                yield 0
            sealed = []
            for part in parts:
                _, own = seal.open_item(part)
                item = Item(part.id, part.body if own is None else own)
                head, rewritten = seal.with_items(head, [item])
                if own is None:
                    sealed += rewritten
                after = part.id
        head, outputs = seal.with_outputs(head, form.outputs)
        tags = self._seals.tags(tenant, form.labels)
        body = seal.close(form.body, "body")
        last = Change(b"", seal.close_head(head), body, tags, outputs, sealed)
        self._shelf.change(tenant, kind, id, last)
