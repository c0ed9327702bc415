"""The seal on data that leaves this process for one tenant: AES-256-GCM, bound to its place.

A text that a client keeps for us is sealed for no place, and goes out in base64.

    1 byte of version | 12 bytes of nonce | the content, encrypted | 16 bytes of tag

The key is the tenant's own, made of the server's secret, so data sealed for one tenant opens for
no other tenant, and after a change of the secret not at all.
"""

from __future__ import annotations

import binascii
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12


# Returns what a sealed text holds; raises ``NotOurs``.
Open: TypeAlias = Callable[[str], str]


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
