"""The record of a session: everything that a store remembers of it between its turns.

A session is a chain of tokens, or a chain of an engine's own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from kvstore.blobs.chain import CHUNK, DIGEST_BYTES, Tokens
from kvstore.errors import Corrupt
from kvstore.ledger.record import MAX_CODECS, StoredSession

HASH_BYTES = 32
MAX_TOKEN = (1 << 32) - 1
ID_BYTES = 4  # of a token's id, little-endian


class SessionRecord(StoredSession, frozen=True, kw_only=True):
    """A session as the cold store knows it; kept in the tiers beside its chunks.

    ``root`` is the one-way digest that the chain of keys starts from. With the tokens it determines
    the name of every blob of the session, so a session can be counted and forgotten without the
    tenant's salt.
    """

    fingerprint: str
    root: bytes
    token_ids: bytes  # little-endian int32, the whole chain
    tail_tokens: int  # tokens after the last full chunk
    snapshots: tuple[int, ...]  # ascending token positions of stored recurrent or rotating state
    # Digests of chunks that this session no longer uses since its history was edited. They can
    # still be found by content; ``forget`` removes them with the rest.
    left_behind: bytes = b""
    state_bytes: int = 0  # of ``packed_bytes``, snapshots

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def nbytes(self) -> int:
        return len(self.token_ids) + len(self.left_behind)

    @property
    def pinned_bytes(self) -> int:
        return self.packed_bytes + len(self.token_ids)

    @property
    def tokens(self) -> Tokens:
        """(num_tokens,) int32, read-only view."""
        return np.frombuffer(self.token_ids, "<i4")

    @property
    def state_positions(self) -> Sequence[int]:
        return self.snapshots

    @property
    def states_bytes(self) -> int:
        return self.state_bytes

    @property
    def abandoned(self) -> Sequence[bytes]:
        digests = self.left_behind
        return [CHUNK + digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]

    def abandoning(self, keys: Sequence[bytes]) -> Self:
        return replace(self, left_behind=b"".join(x[len(CHUNK) :] for x in keys))

    def resized(self, run_bytes: int, tail_bytes: int, states_bytes: int) -> Self:
        resized = super().resized(run_bytes, tail_bytes, states_bytes)
        return replace(resized, state_bytes=states_bytes)

    def makes_sense(self) -> bool:
        """False if the record contradicts itself."""
        n = self.num_tokens
        return (
            len(self.token_ids) == 4 * n
            and 0 <= self.tail_tokens <= n
            and (len(self.root), len(self.left_behind) % DIGEST_BYTES) == (DIGEST_BYTES, 0)
            and all(0 < x <= n for x in self.snapshots)
        )


class BlockRecord(StoredSession, frozen=True, kw_only=True):
    """A session of an engine that hashes its blocks; kept in the tiers beside its blobs.

    ``hashes`` are those of all its full blocks, so that a returning prompt is matched block by
    block, although blobs are larger than a block.
    """

    hashes: bytes  # HASH_BYTES each
    block_tokens: int
    # Keys of blobs that an edited history no longer uses: ``forget`` removes them with the rest.
    left_behind: tuple[bytes, ...] = ()
    # The numbers of blocks after which a state is stored, and the size of one state; none: the
    # model has no state.
    states: tuple[int, ...] = ()
    state_bytes: int = 0
    # Ids of the tokens after the last full block, if their KV is stored, too.
    part: tuple[int, ...] = ()
    # Ids of the tokens of the first full blocks, if an engine that reports KV events saved them.
    ids: bytes = b""

    @property
    def block_hashes(self) -> list[bytes]:
        return split_hashes(self.hashes)

    @property
    def nbytes(self) -> int:
        ids = 36 * len(self.part) + len(self.ids)
        return len(self.hashes) + 33 * len(self.left_behind) + ids

    @property
    def pinned_bytes(self) -> int:
        return self.packed_bytes + len(self.hashes) + len(self.ids)

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) // HASH_BYTES * self.block_tokens + len(self.part)

    @property
    def comparable_tokens(self) -> int:
        return self.num_tokens - len(self.part)

    @property
    def state_positions(self) -> Sequence[int]:
        return [x * self.block_tokens for x in self.states]

    @property
    def states_bytes(self) -> int:
        return self.state_bytes * len(self.states)

    @property
    def abandoned(self) -> Sequence[bytes]:
        return self.left_behind

    def abandoning(self, keys: Sequence[bytes]) -> Self:
        return replace(self, left_behind=tuple(keys))

    def resized(self, run_bytes: int, tail_bytes: int, states_bytes: int) -> Self:
        resized = super().resized(run_bytes, tail_bytes, states_bytes)
        return replace(resized, state_bytes=states_bytes // max(len(self.states), 1))

    def makes_sense(self) -> bool:
        """False if the record contradicts itself."""
        num_blocks, odd_hash = divmod(len(self.hashes), HASH_BYTES)
        if odd_hash or self.block_tokens <= 0:
            return False
        num_known, odd_ids = divmod(len(self.ids), ID_BYTES * self.block_tokens)
        part_fits = not self.part or 0 < len(self.part) < self.block_tokens and num_blocks > 0
        return (
            (part_fits and not odd_ids and num_known <= num_blocks)
            and all(0 < x <= num_blocks for x in self.states)
            and all(0 <= x <= MAX_TOKEN for x in self.part)
        )


def split_hashes(joined: bytes) -> list[bytes]:
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def common_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Count the leading blocks that are the same."""
    n = min(len(a), len(b))
    # A hash covers everything before it: if two are equal, so are all blocks up to there.
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low


Session = TypeVar("Session", SessionRecord, BlockRecord)


def encode_record(record: SessionRecord | BlockRecord) -> bytes:
    """Write the payload of the record's blob."""
    return msgspec.msgpack.encode(record)


def decode_record(payload: memoryview, kind: type[Session]) -> Session:
    """Read the record in a payload. Raises ``Corrupt``: not a record, or it contradicts itself."""
    try:
        record = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a session record: {error}") from error
    if len(record.codecs) > MAX_CODECS or not record.makes_sense():
        raise Corrupt("a session record contradicts itself")
    return record
