"""Text that a client keeps for us, and that it can neither read nor make: AES-256-GCM, in base64.

    base64( 1 byte of version | 12 bytes of nonce | the text, encrypted | 16 bytes of tag )

The key is the tenant's own, made of the server's secret, so what one tenant was given opens for
nobody else, and after a change of the secret for nobody at all.
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
    """This was not sealed here for this tenant, or was changed since."""


class SealedText:
    """Seals and opens one tenant's texts; ``key``: 32 bytes, for this alone."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def close(self, text: str) -> str:
        """Return the text sealed."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode(), _VERSION)
        return b64encode(_VERSION + nonce + sealed).decode()

    def open(self, sealed: str) -> str:
        """Return the text that ``close`` was given.

        Raises:
            NotOurs: it was sealed with another key, or is damaged, or no seal at all.
        """
        try:
            packed = b64decode(sealed, validate=True)
        except (binascii.Error, ValueError):
            raise NotOurs from None
        nonce, rest = packed[1 : 1 + _NONCE_BYTES], packed[1 + _NONCE_BYTES :]
        if packed[:1] != _VERSION or len(nonce) < _NONCE_BYTES:
            raise NotOurs
        try:
            return self._cipher.decrypt(nonce, rest, _VERSION).decode()
        except InvalidTag:
            raise NotOurs from None
