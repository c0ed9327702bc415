"""The seal on cold data: proves that a holder of the server's secret wrote a blob.

    ram          the blob
    elsewhere    the blob, plain or encrypted | 16 bytes of tag | 12 bytes of nonce

The tag is AES-256-GCM's, over the blob, the kind of tier, and the blob's key. A blob that was
forged, changed, or moved to another key or tier has a wrong tag. An older blob of the same key has
a valid tag and does no harm: every key except a record's determines the content, and a record is
compared with the names of the prompt's chunks.

All tenants have the same sealing key, since records are read before any tenant has made a request.
A tenant's salt is in every blob's key already.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.errors import Corrupt
from kvstore.session import TenantLimits, TierName
from kvstore.tiers.base import Blob, EvictionCause, Tier, TierStats

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
SEAL_BYTES: Final = NONCE_BYTES + TAG_BYTES
KEY_NAME_BYTES: Final = 4
LEAST_SECRET_BYTES: Final = 16
log = logging.getLogger(__name__)
NOT_OURS = b""  # in place of a blob with a wrong seal; the store removes it as damaged


class _Opened(np.ndarray):
    """Marks the memory of a blob whose seal was verified."""


def marked(blob: Blob) -> memoryview:
    """Return a view that marks a blob as verified. Only for code that has verified its seal."""
    return np.frombuffer(blob, np.uint8).view(_Opened).data


def is_authentic(blob: Blob) -> bool:
    """Return whether a seal has proved every byte of a blob, so that no checksum is needed.

    The mark belongs to this memory; a copy of the blob is not marked.
    """
    return isinstance(blob, memoryview) and isinstance(blob.obj, _Opened)


class Seal:
    """Seals and opens the blobs of one tier. Thread-safe.

    Args:
        secret: the server's; at least ``LEAST_SECRET_BYTES`` random bytes.
        place: the kind of tier.
        encrypt: also encrypt the blob.

    Raises:
        ValueError: the secret is too short.
    """

    def __init__(self, secret: bytes, place: str, *, encrypt: bool) -> None:
        if len(secret) < LEAST_SECRET_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes, {LEAST_SECRET_BYTES} are needed")
        purpose = f"thermocline {'sealed' if encrypt else 'signed'} {place}".encode()
        self._key = _derived(secret, purpose, 32)
        self._place = place.encode() + b"\0"
        self._cipher = AESGCM(self._key) if encrypt else None
        # Identifies the sealing key without revealing it; enters names in tiers, see SealedTier.
        self.key_name = _derived(secret, purpose + b" name", KEY_NAME_BYTES)

    def close(self, name: bytes, blob: Blob) -> bytearray:
        """Return the blob of the key ``name``, sealed. It is copied once, without the GIL."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = bytearray(len(blob) + SEAL_BYTES)
        sealed[-NONCE_BYTES:] = nonce
        if self._cipher is not None:
            target = memoryview(sealed)[:-NONCE_BYTES]
            self._cipher.encrypt_into(nonce, blob, self._place + name, target)
        else:
            np.frombuffer(sealed, np.uint8)[: len(blob)] = np.frombuffer(blob, np.uint8)
            sealed[len(blob) : -NONCE_BYTES] = self._tag(nonce, name, blob)
        return sealed

    def open(self, name: bytes, sealed: Blob) -> memoryview:
        """Return the blob in the result of ``close``, as a view that ``is_authentic``.

        Raises:
            Corrupt: it was not sealed with this secret, for this ``name`` and this place.
        """
        view = memoryview(sealed).cast("B")
        if len(view) < SEAL_BYTES:
            raise Corrupt("shorter than a seal")
        nonce = bytes(view[-NONCE_BYTES:])
        if self._cipher is not None:
            try:
                return marked(self._cipher.decrypt(nonce, view[:-NONCE_BYTES], self._place + name))
            except InvalidTag:
                raise Corrupt("not sealed by this server") from None
        blob, tag = view[:-SEAL_BYTES], bytes(view[-SEAL_BYTES:-NONCE_BYTES])
        if not secrets.compare_digest(self._tag(nonce, name, blob), tag):
            raise Corrupt("not sealed by this server")
        return marked(blob)

    def _tag(self, nonce: bytes, name: bytes, blob: Blob) -> bytes:
        """Return the tag of a blob that is not encrypted.

        It is GCM of no content with the blob as associated data, so that the blob is not copied.
        """
        gcm = Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor()
        gcm.authenticate_additional_data(self._place + name)
        gcm.authenticate_additional_data(blob)
        gcm.finalize()
        return gcm.tag


def read_secret(path: Path) -> bytes:
    """Return the secret in a file; ``launch`` makes one in the data folder.

    Raises:
        ValueError: the file cannot be read, or is too short.
    """
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise ValueError(f"store.secret_file {path} cannot be read: {error.strerror}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"store.secret_file {path} has less than {LEAST_SECRET_BYTES} bytes")
    return secret


def _derived(secret: bytes, purpose: bytes, nbytes: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=nbytes, salt=None, info=purpose).derive(secret)


class SealedTier:
    """Implements ``base.Tier`` around another tier, and seals what goes there.

    A blob with a wrong seal is returned as ``NOT_OURS``. The inner tier's keys have ``key_name`` of
    the seal appended: with a new secret the tier appears empty, and two servers with different
    secrets share a Redis without seeing each other's blobs.
    """

    def __init__(self, inner: Tier, seal: Seal) -> None:
        self._inner = inner
        self._seal = seal
        self._ending = seal.key_name
        self._counting = threading.Lock()
        self._num_refused = 0

    def __repr__(self) -> str:
        return f"SealedTier({self._inner!r})"

    @property
    def name(self) -> TierName:
        return self._inner.name

    @property
    def owed_file(self) -> Path | None:
        return self._inner.owed_file

    # Reading

    def get_many(self, keys: Sequence[bytes]) -> list[Blob | None]:
        found = self._inner.get_many(self._names(keys))
        return [
            None if blob is None else self._opened(key, blob)
            for key, blob in zip(keys, found, strict=True)
        ]

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, Blob]]:
        for name, blob in self._inner.scan(prefix):
            if name.endswith(self._ending):
                key = name[: -len(self._ending)]
                yield key, self._opened(key, blob)

    def _opened(self, key: bytes, blob: Blob) -> Blob:
        try:
            return self._seal.open(key, blob)
        except Corrupt as error:
            with self._counting:
                self._num_refused += 1
                first = self._num_refused == 1
            if first:
                log.warning(
                    "%s tier: a blob is %s (further ones are only counted)", self.name, error
                )
            return NOT_OURS

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.contains_many(self._names(keys))

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        found = self._inner.lengths(self._names(keys))
        return [None if x is None else max(0, x - SEAL_BYTES) for x in found]

    # Writing

    def put_many(
        self, items: Sequence[tuple[bytes, Blob]], owner: str = "", after: bytes = b""
    ) -> int:
        sealed = [(key + self._ending, self._seal.close(key, blob)) for key, blob in items]
        return self._inner.put_many(sealed, owner, self._name(after))

    def replace(self, key: bytes, blob: Blob, owner: str = "", after: bytes = b"") -> bool:
        sealed = self._seal.close(key, blob)
        return self._inner.replace(key + self._ending, sealed, owner, self._name(after))

    def delete_many(self, keys: Iterable[bytes]) -> int:
        return self._inner.delete_many(self._names(keys))

    # Recency

    def own(self, owner: str, keys: Sequence[bytes]) -> None:
        self._inner.own(owner, self._names(keys))

    def limit_tenants(self, limits: TenantLimits) -> dict[str, int] | None:
        return self._inner.limit_tenants(limits)

    def touch(self, keys: Sequence[bytes], *, restored: bool = True) -> None:
        self._inner.touch(self._names(keys), restored=restored)

    def pin(self, key: bytes, pinned: bool) -> None:
        self._inner.pin(key + self._ending, pinned)

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key + self._ending for key in keys]

    def _name(self, key: bytes) -> bytes:
        return key + self._ending if key else b""

    # Life

    def why_evicted(self, keys: Sequence[bytes]) -> list[EvictionCause | None]:
        return self._inner.why_evicted(self._names(keys))

    def stats(self) -> TierStats:
        inner = self._inner.stats()
        return msgspec.structs.replace(inner, errors=inner.errors + self._num_refused)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()
