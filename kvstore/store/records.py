"""The record of a session, the spans of its chain, and how a new save revises an older record.

A session is a chain of tokens, or a chain of an engine's own blocks.

The new record replaces the old one regardless of the tokens they share: the new chain may be longer
(the usual update), shorter (an answer is generated again), or depart from the old one half-way (an
edited message). An old tail or part is deleted, and so are states that are no longer kept, unless
another session needs them. Chunks of an abandoned branch stay, since the user may return to it; the
record remembers them so that ``forget`` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from kvstore.blobs.chain import CHUNK, DIGEST_BYTES, PART, SNAPSHOT, TAIL, Tokens
from kvstore.blobs.packer import Packer
from kvstore.errors import Corrupt
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import MAX_CODECS, R, StoredSession, abandoned_chunks, codecs_of
from kvstore.tiers.base import Blob

HASH_BYTES = 32
MAX_TOKEN = (1 << 32) - 1
ID_BYTES = 4  # of a token's id, little-endian


class Span(NamedTuple):
    """A blob of a session: a full chunk, the tail after them, a part of a block, or a state.

    It has the rows of ``num_tokens`` tokens from ``first_token`` on. A state was taken after the
    last of them; it has the rows since the last full chunk, or none. Positions in blocks are for
    engines that have blocks; a part of a block covers none.
    """

    key: bytes
    first_token: int
    num_tokens: int
    block_tokens: int = 1

    @property
    def end_token(self) -> int:
        """The index after its last token."""
        return self.first_token + self.num_tokens

    @property
    def first_block(self) -> int:
        return self.first_token // self.block_tokens

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block_tokens

    @property
    def end_block(self) -> int:
        return self.end_token // self.block_tokens

    @property
    def is_chunk(self) -> bool:
        return self.key[:1] == CHUNK

    @property
    def is_tail(self) -> bool:
        return self.key[:1] == TAIL

    @property
    def is_part(self) -> bool:
        return self.key[:1] == PART

    @property
    def is_state(self) -> bool:
        return self.key[:1] == SNAPSHOT


def in_order(rows: Sequence[Span], states: Sequence[Span]) -> list[Span]:
    """Order a session's spans by importance: the newest state, the rows, the older states.

    That is the order of use: evicting from the end loses the least. Nothing can be restored without
    a state. A turn that continues the answer needs only the newest, so under pressure the older
    ones, which are large, are evicted first.

    Args:
        states: the newest first.
    """
    return [*states[:1], *rows, *states[1:]]


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


class Reviser(Generic[R]):
    """Completes the new record of a session at a save. Thread-safe."""

    def __init__(self, index: SessionIndex[R], packer: Packer, chunk_tokens: int) -> None:
        self._index = index
        self._packer = packer
        self._chunk_tokens = chunk_tokens

    def revise(
        self,
        record: R,
        old: R | None,
        common: int,
        spans: Sequence[Span],
        fresh: Mapping[bytes, Blob],
    ) -> tuple[R, list[bytes]]:
        """Return the whole record, and keys of blobs that are unused once it is written.

        Args:
            record: the new record, without sizes, codecs and all else that follows from the old.
            common: the leading tokens that the two share.
            spans: all of the new record.
            fresh: new blobs among them, by key.
        """
        rows = [x for x in spans if not x.is_state]
        run_bytes, tail_bytes = self._run_bytes(rows, fresh, old, common)
        states_bytes = _states_bytes([x for x in spans if x.is_state], fresh, old)
        record = record.resized(run_bytes, tail_bytes, states_bytes)
        if old is None:
            return replace(record, codecs=codecs_of(self._packer.readable, ())), []
        current = {x.key for x in spans}
        before = [x for x in self._index.blob_keys(old) if x not in current]
        chunks = [x for x in before if x[:1] == CHUNK]
        left, overflow = abandoned_chunks(old.abandoned, chunks, current)
        gone = [*(x for x in before if x[:1] != CHUNK), *overflow]
        if not self._index.is_whole:  # sessions that are not known yet may share all but tails
            gone = [x for x in gone if x[:1] == TAIL]
        codecs = codecs_of(self._packer.readable, old.codecs)
        record = replace(record.abandoning(left), codecs=codecs, pinned=old.pinned)
        return record, self._index.unshared(gone, self._index.key(old))

    def _run_bytes(
        self, rows: Sequence[Span], fresh: Mapping[bytes, Blob], old: R | None, common: int
    ) -> tuple[int, int]:
        """Return the bytes of all rows, and of those after the last full chunk.

        Older chunks are in the codec of their own save.
        """
        known, total, tail_bytes = 0, 0, 0
        if old is not None and old.tail_bytes is not None:
            known = min(common // self._chunk_tokens, sum(x.is_chunk for x in rows))
            chunk_bytes = max(old.packed_bytes - old.tail_bytes - old.states_bytes, 0)
            num_chunks = max(old.num_tokens // self._chunk_tokens, 1)
            total = chunk_bytes * known // num_chunks
        for span in rows[known:]:
            blob = fresh.get(span.key)
            if blob is not None:
                nbytes = len(blob)
            else:
                nbytes = self._packer.run_nbytes(span.first_token, span.num_tokens)
            total += nbytes
            tail_bytes += 0 if span.is_chunk else nbytes
        return total, tail_bytes


def _states_bytes(
    states: Sequence[Span], fresh: Mapping[bytes, Blob], old: StoredSession | None
) -> int:
    """Estimate the bytes of all states: those of one session are about equally large."""
    sizes = [len(fresh[x.key]) for x in states if x.key in fresh]
    if sizes:
        return len(states) * sum(sizes) // len(sizes)
    if old is None or not old.state_positions:
        return 0
    return old.states_bytes * len(states) // len(old.state_positions)
