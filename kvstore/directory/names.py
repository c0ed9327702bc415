"""The names of the directory's keys on a Redis server, and the seals of their values.

thermocline:directory:1:{KEY}:board:SEAT             16 bytes of header | a sealed ``board.Board``
                             :deletions:LIFE         sealed ``deletions.Deletions``
                             :rows:LIFE:TENANT:PAGE  a sealed page of ``rows.Row``

KEY identifies the servers' common secret without revealing it, so servers of other secrets never
meet; its braces keep all keys in one slot of a cluster. TENANT is a keyed hash. Values are
encrypted with AES-256-GCM, with a key of the tenant or, for boards and deletions, of the servers,
and the name is bound in.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final, TypeAlias

from kvstore.directory.deletions import MARK_BYTES, TENANT_BYTES
from kvstore.tiers.seal import Seal

# Makes a key from a tenant's name and a purpose, with the servers' common secret.
KeyOf: TypeAlias = Callable[[str, bytes], bytes]

NUM_SEATS: Final = 32  # servers on one Redis that share a secret


class Names:
    """Names and seals, for all servers of one secret. Thread-safe."""

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        own = key_of("", b"directory of servers")
        self._seal = Seal(own, "directory", encrypt=True)
        self._marks = hmac.digest(own, b"marks", "sha256")
        self._prefix = f"thermocline:directory:1:{{{self._seal.key_name.hex()}}}"

    def board(self, seat: int) -> str:
        return f"{self._prefix}:board:{seat}"

    def deletions(self, life: bytes) -> str:
        return f"{self._prefix}:deletions:{life.hex()}"

    def rows(self, life: bytes, tenant: str, page: int) -> str:
        return f"{self._prefix}:rows:{life.hex()}:{self._hash(tenant)[:16].hex()}:{page}"

    def seal(self, tenant: str | None = None) -> Seal:
        """Return the seal of a tenant's pages; without a tenant the seal of all other values."""
        if tenant is None:
            return self._seal
        return Seal(self._key_of(tenant, b"directory:"), "directory", encrypt=True)

    def mark(self, tenant: str, model: str, session_id: str) -> bytes:
        """Return the hash that stands for a session; model "" is any model."""
        rest = MARK_BYTES - TENANT_BYTES
        return self._hash(tenant)[:TENANT_BYTES] + self._hash(tenant, model, session_id)[:rest]

    def engine(self, address: str) -> bytes:
        """Return the hash that stands for an engine that several servers use."""
        return self._hash("engine", address)[:8]

    def _hash(self, *words: str) -> bytes:
        said = b"".join(len(x.encode()).to_bytes(4, "big") + x.encode() for x in words)
        return hmac.digest(self._marks, said, "sha256")
