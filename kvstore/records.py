"""Who a session is, and what the store remembers of it between its turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from kvstore.chain import DIGEST_BYTES, Tokens
from kvstore.errors import Corrupt

TierName: TypeAlias = Literal["ram", "disk", "redis"]
# Why something that was once computed has to be computed again.
MissReason: TypeAlias = Literal[
    "never-stored",  # nothing of this session was ever saved here
    "diverged",  # the new prompt leaves the stored one
    "evicted",  # a tier ran out of room
    "ttl",
    "fingerprint",  # saved by another model, dtype or layout, or by codecs not known here
    "corrupt",
    "deadline",  # a slow tier; prefill is faster
    "unavailable",  # a tier is down
    "disabled",  # this engine serves without hibernation
]


MAX_CODECS = 16  # that a session's record remembers


class SessionRef(msgspec.Struct, frozen=True):
    """One session of one tenant. ``salt`` is the tenant's; it enters every chunk key."""

    tenant: str
    id: str
    salt: bytes


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the cold store knows it; kept in the tiers beside its chunks.

    ``root`` is the one-way digest that the chain of keys starts from: with the tokens it names
    every blob of the session, so a session can be counted and forgotten without the tenant's salt.
    """

    tenant: str
    id: str
    fingerprint: str
    codecs: tuple[str, ...]  # ids that its blobs may be in, the newest first
    root: bytes
    token_ids: bytes  # little-endian int32, the whole chain
    tail_tokens: int  # tokens behind the last full chunk
    snapshots: tuple[int, ...]  # ascending token positions of stored recurrent or rotating state
    last_used_s: float  # wall clock, for display and ttl only
    # Digests of chunks that this session left behind when its history was edited. They can still
    # be found by content; ``forget`` removes them with the rest.
    left_behind: bytes = b""
    pinned: bool = False
    packed_bytes: int = 0  # of all blobs of the session but this one, headers included
    state_bytes: int = 0  # of these, snapshots

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def pinned_bytes(self) -> int:
        """What it takes of the pins' share while it is pinned."""
        return self.packed_bytes + len(self.token_ids)

    @property
    def tokens(self) -> Tokens:
        """(num_tokens,) int32, read-only view."""
        return np.frombuffer(self.token_ids, "<i4")


def codecs_of(now: Iterable[str], before: Iterable[str]) -> tuple[str, ...]:
    """What a session's blobs may be in: shared ones in whatever could be read when it was saved."""
    return tuple(dict.fromkeys([*now, *before]))[:MAX_CODECS]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SessionRecord)


def encode_record(record: SessionRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(payload: memoryview) -> SessionRecord:
    """Raises ``Corrupt`` for anything that is not a record that makes sense."""
    try:
        record = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a session record: {error}") from error
    n = record.num_tokens
    whole = len(record.token_ids) == 4 * n and 0 <= record.tail_tokens <= n
    digests = (len(record.root), len(record.left_behind) % DIGEST_BYTES) == (DIGEST_BYTES, 0)
    if (
        len(record.codecs) > MAX_CODECS
        or not whole
        or not digests
        or any(not 0 < x <= n for x in record.snapshots)
    ):
        raise Corrupt("a session record contradicts itself")
    return record
