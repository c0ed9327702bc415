"""The Redis keys of rows, tombstones and messages, and the encryption of their values."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias, TypeVar

import msgspec

from kvstore.errors import Corrupt
from kvstore.tiers.seal import Seal

# Derives a key from a tenant's name and a purpose, with the servers' common secret.
KeyOf: TypeAlias = Callable[[str, bytes], bytes]
MAX_TENANTS: Final = 4096  # whose keys are remembered
_PURPOSE: Final = b"shared sessions:"
T = TypeVar("T")


class Sealed:
    """Encrypts and decrypts values, each bound to its name."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seal = Seal(key, "sessions", encrypt=True)

    def close(self, name: str, value: msgspec.Struct) -> bytes:
        return bytes(self._seal.close(name.encode(), msgspec.msgpack.encode(value)))

    def open(self, name: str, raw: object, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """Decrypt and decode a value; None if it was not sealed under that name with our key."""
        if not isinstance(raw, bytes):
            return None
        try:
            return decoder.decode(self._seal.open(name.encode(), raw))
        except (Corrupt, msgspec.DecodeError, UnicodeDecodeError):
            return None


class TenantNames(Sealed):
    """The Redis keys of one tenant, and the encryption of their values."""

    def __init__(self, prefix: str, key: bytes) -> None:
        super().__init__(key)
        tenant = hmac.digest(key, b"tenant", "sha256")[:16].hex()
        self._prefix = f"{prefix}:{{{tenant}}}"
        self.index = f"{self._prefix}:index"

    def mark(self, model: str, session_id: str) -> str:
        """Return the keyed hash by which keys name a session of a model."""
        word = f"{len(model)}:{model}{session_id}".encode("utf-8", "surrogatepass")
        return hmac.digest(self._key, word, "sha256")[:16].hex()

    def row(self, mark: str) -> str:
        return f"{self._prefix}:row:{mark}"

    def tombstone(self, session_id: str) -> str:
        return f"{self._prefix}:deleted:{self.mark('', session_id)}"


class SharedNames(Sealed):
    """The Redis keys that all servers with one secret share; ``channel`` is for deletions."""

    def __init__(self, key_of: KeyOf) -> None:
        super().__init__(key_of("", _PURPOSE))
        self.channel = f"thermocline:sessions:1:{self._seal.key_name.hex()}"
        self.models = f"{self.channel}:models"

        def of(tenant: str) -> TenantNames:
            return TenantNames(self.channel, key_of(tenant, _PURPOSE))

        self.of: Callable[[str], TenantNames] = lru_cache(MAX_TENANTS)(of)
