"""The names of blobs: chained hashes of token ids.

A key is a kind byte and 32 bytes of blake2b. The chain starts at the *root*, a digest of everything
that must be equal for two sessions to share KV: format version, tenant salt, model fingerprint,
chunk size. The hash of each full chunk covers the digest before it and the chunk's own token ids:

    root      = H(version, salt, fingerprint, chunk_tokens)
    chunk[0]  = H(root,       tokens of chunk 0)
    chunk[i]  = H(chunk[i-1], tokens of chunk i)

so equal keys mean equal tokens from the very first one on, and one tenant can never name another
tenant's chunk. The key does not depend on how KV is packed: the same chunk may be stored in several
codecs, distinguished by their tags (``codec_set``). The keys of the tail and the snapshots are
derived from the same chain; only the tail's key also covers its session, because the tail is
replaced each turn. A session record is found without the salt: by tenant, session id and model
name, so that a change of weights is *detected* (and reported as a miss) instead of hiding the
record. Ids of any length and with any characters are safe, since only their digest is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION: Final = 2
DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 1 + DIGEST_BYTES

CHUNK: Final = b"c"
TAIL: Final = b"t"
SNAPSHOT: Final = b"s"
PART: Final = b"p"
RECORD: Final = b"r"
KINDS: Final = frozenset((CHUNK, TAIL, SNAPSHOT, PART, RECORD))

Tokens: TypeAlias = NDArray[np.int32]

# blake2b's personalisation keeps the five uses of the hash apart.
_ROOT = b"thermocline root"
_LINK = b"thermocline link"
_TAIL = b"thermocline tail"
_SNAPSHOT = b"thermoclinestate"
_RECORD = b"thermocline sess"


def as_tokens(token_ids: Sequence[int] | Tokens) -> Tokens:
    """Return token ids as (num_tokens,) little-endian int32, the form that is hashed and stored."""
    return np.ascontiguousarray(token_ids, dtype="<i4")


def no_tokens() -> Tokens:
    return as_tokens(())


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Count the leading tokens that are equal. Both arrays: (num_tokens,) int32."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class KeySpace:
    """The keys of one store: one model, one chunk size."""

    def __init__(self, fingerprint: str, chunk_tokens: int, model: str) -> None:
        self._fingerprint = fingerprint.encode()
        (self._model,) = name_bytes(model)
        self.chunk_tokens = chunk_tokens

    def root(self, salt: bytes) -> bytes:
        """Start of every chain of a tenant: a one-way digest that does not reveal the salt."""
        version, size = struct.pack("<I", FORMAT_VERSION), struct.pack("<I", self.chunk_tokens)
        return hashed(_ROOT, version, salt, self._fingerprint, size)

    def chain(self, root: bytes, tokens: Tokens) -> Chain:
        """Hash all full chunks of ``tokens``, (num_tokens,) int32, one after the other."""
        return Chain(root, tokens, self.chunk_tokens)

    def record_key(self, tenant: str, session_id: str) -> bytes:
        return RECORD + hashed(_RECORD, *name_bytes(tenant, session_id), self._model)


class Chain:
    """Digests of the full chunks of one run of tokens, and the keys derived from them."""

    def __init__(self, root: bytes, tokens: Tokens, chunk_tokens: int) -> None:
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._digests = [root]
        step = 4 * chunk_tokens
        raw = tokens.tobytes()
        for first in range(0, len(raw) - step + 1, step):
            self._digests.append(_link(self._digests[-1], raw[first : first + step]))

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_chunks(self) -> int:
        return len(self._digests) - 1

    @property
    def chunk_keys(self) -> list[bytes]:
        return [CHUNK + x for x in self._digests[1:]]

    def tail_key(self, tenant: str, session_id: str) -> bytes:
        """Key of the tokens after the last full chunk, for this session only."""
        rest = self._tokens[self.num_chunks * self._chunk_tokens :].tobytes()
        names = name_bytes(tenant, session_id)
        return TAIL + hashed(_TAIL, self._digests[-1], rest, *names)

    def snapshot_key(self, position: int) -> bytes:
        """Key of the state after exactly ``position`` tokens, whichever session computed it."""
        if not 0 < position <= len(self._tokens):
            raise ValueError(f"no snapshot at {position} of {len(self._tokens)} tokens")
        before = position // self._chunk_tokens
        rest = self._tokens[before * self._chunk_tokens : position].tobytes()
        return SNAPSHOT + hashed(_SNAPSHOT, self._digests[before], rest)


def _link(before: bytes, raw_tokens: bytes) -> bytes:
    return blake2b(before + raw_tokens, digest_size=DIGEST_BYTES, person=_LINK).digest()


def name_bytes(*names: str) -> list[bytes]:
    """Encode names of tenants, sessions or models, with any characters."""
    return [x.encode("utf-8", "surrogatepass") for x in names]


def hashed(person: bytes, *parts: bytes) -> bytes:
    """Hash several byte strings with their lengths, so that no two lists of parts look the same."""
    state = blake2b(digest_size=DIGEST_BYTES, person=person)
    for part in parts:
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.digest()
