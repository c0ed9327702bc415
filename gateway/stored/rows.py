"""Rows of stored objects: their parts, and how these are encrypted.

A row has a head, a body, and items in pages, each page a JSON list. The head lists the pages in
order, with the ids of their items; no number of a page is used twice. Each part is encrypted by
AES-256-GCM and bound to its place, so a part that was changed, moved or replaced counts as missing:

    1 byte of version | 12 bytes of nonce | the content, encrypted | 16 bytes of tag

The key is derived from the server's secret and the tenant's name: no other tenant, and no server
with another secret, can decrypt a part.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.stored.table import SLICE_BYTES, SLICE_ITEMS, TERM_BYTES

Kind: TypeAlias = Literal["response", "conversation", "completion"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Json: TypeAlias = dict[str, Any]
Labels: TypeAlias = tuple[tuple[str, str], ...]
# Derives a tenant's key from its name and a purpose (``Tenants.key_of``).
KeyOf: TypeAlias = Callable[[str, bytes], bytes]
_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
_KEPT_OF_ID: Final = 128  # characters of an id that is replaced
_PART_BYTES: Final = 200  # that a head, a body or a page takes besides its content


class NotOurs(Exception):
    """The data was not sealed by us for this tenant and place, or was changed since."""


class ObjectSeal:
    """Encrypts and decrypts the parts of one tenant's objects in one kind of table."""

    def __init__(self, key_of: KeyOf, place: str, tenant: str) -> None:
        self._cipher = AESGCM(key_of(tenant, b"stored"))
        self._terms_key = key_of(tenant, b"labels")
        self._place = (place, tenant)

    def close(self, content: bytes, *part: str | int) -> bytes:
        """Return the content sealed; ``open`` needs the same ``part``."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, content, self._bound(part))

    def open(self, sealed: bytes, *part: str | int) -> bytes:
        """Return the content that ``close`` was given. Raises ``NotOurs``."""
        nonce, rest = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if sealed[:1] != _VERSION or len(nonce) < _NONCE_BYTES:
            raise NotOurs
        try:
            return self._cipher.decrypt(nonce, rest, self._bound(part))
        except InvalidTag:
            raise NotOurs from None

    def term(self, *words: str) -> bytes:
        """Return the keyed hash under which the index has some words."""
        return keyed_hash(self._terms_key, *words)

    def _bound(self, part: tuple[str | int, ...]) -> bytes:
        return _VERSION + msgspec.json.encode([*self._place, *part])


def keyed_hash(key: bytes, *words: str | int) -> bytes:
    return hmac.digest(key, msgspec.json.encode(words), "sha256")[:TERM_BYTES]


class Item(NamedTuple):
    """One of an object's items; its id is unique within the object."""

    id: str
    body: bytes

    def renamed(self) -> Item:
        """Return the item under a new, random id."""
        id = f"{self.id[:_KEPT_OF_ID]}-{secrets.token_hex(8)}"
        return Item(id, msgspec.json.encode({**msgspec.json.decode(self.body), "id": id}))


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A page of an object: its number, its size, and the ids of its items in order."""

    number: int
    nbytes: int
    ids: tuple[str, ...] = ()

    def items(self, content: bytes) -> list[Item]:
        bodies = msgspec.json.decode(content, type=list[msgspec.Raw])
        return [Item(id, bytes(x)) for id, x in zip(self.ids, bodies, strict=True)]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The small part of an object that is read first, whatever else is."""

    session: str  # deleting this session deletes the object
    next: int  # the number that the next new page gets
    body: Page
    pages: tuple[Page, ...] = ()
    outputs: int = 0  # how many of the last pages have a response's output
    about: dict[str, str] = {}  # a response's "previous" response and its "conversation"
    labels: Labels | None = None  # None: it is in no list

    @property
    def num(self) -> int:
        """The number of items."""
        return sum(len(x.ids) for x in self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return sum(x.nbytes for x in self.pages)

    @property
    def taken(self) -> int:
        """An estimate of the row's bytes."""
        return self.body.nbytes + self.nbytes + _PART_BYTES * (2 + len(self.pages))

    @property
    def num_own(self) -> int:
        """The number of first pages, which have the items that the object was created with."""
        return len(self.pages) - self.outputs

    def words(self, kind: Kind, pages: Iterable[Page]) -> set[tuple[str, ...]]:
        """Return the words under which the object is indexed; of its items those on ``pages``."""
        words = {("session", self.session), ("session", self.session, kind)}
        if kind != "completion":  # requests refer to items of the others
            words |= {("item", id) for page in pages for id in page.ids}
        if self.labels is not None:
            words |= {("list", kind), *(("label", kind, *x) for x in self.labels)}
        return words


class Object(NamedTuple):
    """An object that was found in the table."""

    kind: Kind
    id: str
    head: Head
    seen: bytes  # the sealed head
    number: int  # higher for objects that were stored later

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"{self.kind}:{self.id}"


class Parts(NamedTuple):
    """The parts of an object that are stored separately; ``answer``: a response's output."""

    body: bytes
    about: dict[str, str] = {}
    labels: Labels | None = None
    answer: Iterable[Item] = ()


def parts_of(kind: Kind, object: Json) -> Parts:
    """Split an object into its parts."""
    if kind != "response":
        labels = labels_of(object) if kind == "completion" else None
        return Parts(msgspec.json.encode(object), {}, labels)
    talk = object.get("conversation")
    links = {
        "previous": object.get("previous_response_id"),
        "conversation": talk.get("id") if isinstance(talk, dict) else None,
    }
    body = msgspec.json.encode({name: x for name, x in object.items() if name != "output"})
    about = {name: x for name, x in links.items() if isinstance(x, str)}
    answer = [Item(x["id"], msgspec.json.encode(x)) for x in object.get("output") or ()]
    return Parts(body, about, None, answer)


def labels_of(object: Json) -> Labels:
    """Return the labels by which lists filter objects: metadata and model."""
    metadata, model = object.get("metadata"), object.get("model")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    labels = [(f"metadata.{name}", x) for name, x in pairs if isinstance(x, str)]
    return (*labels, ("model", model)) if isinstance(model, str) else tuple(labels)


class PageDraft:
    """Collects the new pages of an object, each with a number that was never used."""

    def __init__(self, next: int = 0) -> None:
        self.next = next
        self.contents: dict[int, bytes] = {}

    def page(self, content: bytes, ids: Iterable[str] = ()) -> Page:
        made = Page(self.next, len(content), tuple(ids))
        self.contents[made.number] = content
        self.next += 1
        return made

    def items(self, items: Iterable[Item]) -> tuple[Page, ...]:
        listed = ((b"[%b]" % b",".join(x.body for x in some), some) for some in slices(items))
        return tuple(self.page(content, (x.id for x in some)) for content, some in listed)


_Row = TypeVar("_Row", Item, Page)


def slices(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Yield the rows in slices of about ``SLICE_BYTES``; a larger row is a slice by itself."""
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
