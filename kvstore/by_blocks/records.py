"""The record of a session that is a chain of an engine's own blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstore.errors import Corrupt
from kvstore.ledger.record import MAX_CODECS, StoredSession

HASH_BYTES = 32
MAX_TOKEN = (1 << 32) - 1
ID_BYTES = 4  # of a token's id, little-endian


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
    def pinned_bytes(self) -> int:
        """Bytes that the session takes of the share for pins while it is pinned."""
        return self.packed_bytes + len(self.hashes) + len(self.ids)

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) // HASH_BYTES * self.block_tokens + len(self.part)


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


_decoder = msgspec.msgpack.Decoder(BlockRecord)


def encode_block_record(record: BlockRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_block_record(payload: memoryview) -> BlockRecord:
    """Read the record in a payload. Raises ``Corrupt``: not a record, or it contradicts itself."""
    try:
        record = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a record of blocks: {error}") from error
    num_blocks = len(record.hashes) // HASH_BYTES
    places = all(0 < x <= num_blocks for x in record.states)
    ids = all(0 <= x <= MAX_TOKEN for x in record.part)
    part_fits = not record.part or 0 < len(record.part) < record.block_tokens and num_blocks > 0
    block_ids, odd = divmod(len(record.ids), ID_BYTES * max(record.block_tokens, 1))
    if (
        len(record.hashes) % HASH_BYTES
        or record.block_tokens <= 0
        or not (places and ids and part_fits)
        or (odd or block_ids > num_blocks)
        or len(record.codecs) > MAX_CODECS
    ):
        raise Corrupt("a record of blocks contradicts itself")
    return record
