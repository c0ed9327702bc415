"""The seal on stored objects: AES-256-GCM by a key of the tenant, bound to the place of the data.

    1 byte of version | 12 bytes of nonce | the content, encrypted | 16 bytes of tag

The key is made of the server's secret, so data sealed for one tenant opens for no other tenant, and
after a change of the secret not at all. Bound in are the kind of table, the tenant, the kind of
object, its id, and which part of it this is: the head, or a page by its number. Numbers of pages
are never used twice and the head lists them, so it shows when one was taken out, put back or moved.

Terms, by which objects are listed, are keyed hashes of words.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.stored.table import TERM_BYTES

# Makes a tenant's key of its name and a purpose (``Tenants.key_of``).
KeyOf: TypeAlias = Callable[[str, bytes], bytes]
_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12


class NotOurs(Exception):
    """This was not sealed here for this tenant and this place, or was changed since."""


class ObjectSeal:
    """Seals and opens the parts of one object.

    Args:
        key: 32 bytes, for one purpose alone.
        place: names the object among all that are sealed with this key.
    """

    def __init__(self, key: bytes, place: tuple[str, ...]) -> None:
        self._cipher = AESGCM(key)
        self._place = place

    def close(self, content: bytes, *part: str | int) -> bytes:
        """Return the content sealed; it opens as this part only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, content, self._bound(part))

    def open(self, sealed: bytes, *part: str | int) -> bytes:
        """Return the content that ``close`` was given.

        Raises:
            NotOurs: it was sealed with another key or for another place, or is damaged, or no seal.
        """
        nonce, rest = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if sealed[:1] != _VERSION or len(nonce) < _NONCE_BYTES:
            raise NotOurs
        try:
            return self._cipher.decrypt(nonce, rest, self._bound(part))
        except InvalidTag:
            raise NotOurs from None

    def _bound(self, part: tuple[str | int, ...]) -> bytes:
        return _VERSION + msgspec.json.encode([*self._place, *part])


class Seals:
    """The seals and terms of all objects in a table of one kind."""

    def __init__(self, place: str, key_of: KeyOf) -> None:
        self._place = place
        self._key_of = key_of

    def of(self, tenant: str, kind: str, id: str) -> ObjectSeal:
        """Return the seal of one object."""
        return ObjectSeal(self._key_of(tenant, b"stored"), (self._place, tenant, kind, id))

    def terms(self, tenant: str, *words: tuple[str, ...]) -> list[bytes]:
        """Return the terms that stand for some words each."""
        key = self._key_of(tenant, b"labels")
        return [keyed_hash(key, *x)[:TERM_BYTES] for x in words]


def keyed_hash(key: bytes, *words: str | int) -> bytes:
    return hmac.digest(key, msgspec.json.encode(words), "sha256")
