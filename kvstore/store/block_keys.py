"""Names of blobs for an engine that hashes its own blocks, and where a session's blocks rest.

vLLM cuts a request into blocks and gives each a hash over everything that its KV depends on: the
hash before it, its token ids, the tenant's salt, adapters, images. Here ``chunk_blocks`` blocks in
a row make one chunk, named by the hash of its *last* block, which through the chain covers all
tokens before it. The blocks after the last full chunk are one tail. Layers that do not keep all
tokens (recurrent ones, sliding windows) have a state, stored after a few of the blocks. Tokens
after the last full block have no hash from the engine; they are the *part* of a block, named by the
hash of the block before it and their ids.

    key = kind, H(version, fingerprint, tokens per block, number of blocks, last hash)

The hash does not cover weights, dtype or ranks; the fingerprint does.

The tiers' own answers are used, and like all of their answers the result is only a hint.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import (
    CHUNK,
    FORMAT_VERSION,
    PART,
    RECORD,
    SNAPSHOT,
    TAIL,
    hashed,
    name_bytes,
)
from kvstore.blobs.packer import RECORD_CODEC, Packer
from kvstore.errors import Mismatch
from kvstore.ledger.stack import TierStack
from kvstore.session import by_worth
from kvstore.store.records import (
    HASH_BYTES,
    BlockRecord,
    Span,
    common_blocks,
    decode_record,
    encode_record,
    in_order,
)
from kvstore.tiers.base import Blob

_BLOCKS: Final = b"thermoclineblock"
_STATE: Final = b"thermoclineblkst"
_PART: Final = b"thermoclinepart"
_SESSION: Final = b"thermoclineblkss"
# Runs of blocks in order: the first block of each, and the one after its last.
BlockRuns: TypeAlias = tuple[tuple[int, int], ...]


class BlockKeys:
    """Makes the keys of one store: one model, one rank, one size of chunks.

    Args:
        fingerprint: of weights, dtype, rank and layout.
        block_tokens: tokens per block of the engine.
        chunk_blocks: blocks per chunk.
    """

    def __init__(self, fingerprint: str, block_tokens: int, chunk_blocks: int) -> None:
        model = fingerprint.encode()
        self._prefix = struct.pack("<Q", len(model)) + model
        self.block_tokens = block_tokens
        self.chunk_blocks = chunk_blocks

    def span(self, hashes: Sequence[bytes], first_block: int, num_blocks: int) -> Span:
        """Name the blob of these blocks; ``first_block`` is a multiple of ``chunk_blocks``."""
        kind = CHUNK if num_blocks == self.chunk_blocks else TAIL
        last = hashes[first_block + num_blocks - 1]
        digest = self._digest(_BLOCKS, num_blocks, last)
        return self._span(kind + digest, first_block, num_blocks * self.block_tokens)

    def chunks(self, hashes: Sequence[bytes], first_block: int = 0) -> list[Span]:
        """Name all full chunks, from the one that holds ``first_block`` on."""
        size = self.chunk_blocks
        first = first_block - first_block % size
        return [self.span(hashes, i, size) for i in range(first, len(hashes) - size + 1, size)]

    def tails(self, hashes: Sequence[bytes], first_block: int) -> list[Span]:
        """Name every tail that may begin at ``first_block``, the longest first."""
        longest = min(self.chunk_blocks - 1, len(hashes) - first_block)
        return [self.span(hashes, first_block, n) for n in range(longest, 0, -1)]

    def whole(self, hashes: Sequence[bytes], first_block: int = 0) -> list[Span]:
        """Name the blobs that cover these blocks, from the chunk that holds ``first_block`` on."""
        num_full = len(hashes) // self.chunk_blocks * self.chunk_blocks
        return self.chunks(hashes, first_block) + self.tails(hashes, num_full)[:1]

    def state(self, hashes: Sequence[bytes], num_blocks: int) -> Span:
        """Name the state, after ``num_blocks`` blocks, of layers that do not keep all tokens."""
        digest = self._digest(_STATE, num_blocks, hashes[num_blocks - 1])
        return self._span(SNAPSHOT + digest, num_blocks, 0)

    def part(self, hashes: Sequence[bytes], tokens: Sequence[int]) -> Span:
        """Name the blob of the ``tokens`` after all these blocks; there is at least one block."""
        ids = struct.pack(f"<{len(tokens)}I", *tokens)
        digest = self._digest(_PART, len(hashes), hashes[-1], ids)
        return self._span(PART + digest, len(hashes), len(tokens))

    def covering(self, hashes: Sequence[bytes], part: Sequence[int]) -> list[Span]:
        """Name the blobs that ``whole`` names, and the part after them if there is one."""
        return self.whole(hashes) + ([self.part(hashes, part)] if part else [])

    def spans(self, record: BlockRecord) -> list[Span]:
        """Name all spans of a session."""
        hashes = record.block_hashes
        states = [self.state(hashes, x) for x in by_worth(record.states)]
        return in_order(self.covering(hashes, record.part), states)

    def _digest(self, person: bytes, num_blocks: int, *parts: bytes) -> bytes:
        sizes = struct.pack("<III", FORMAT_VERSION, self.block_tokens, num_blocks)
        return hashed(person, self._prefix, sizes, *parts)

    def _span(self, key: bytes, first_block: int, num_tokens: int) -> Span:
        return Span(key, first_block * self.block_tokens, num_tokens, self.block_tokens)

    def record_key(self, tenant: str, session_id: str) -> bytes:
        """Key of a session's record; differs between engines, models and ranks."""
        return RECORD + hashed(_SESSION, self._prefix, *name_bytes(tenant, session_id))


class BlockPrompt:
    """The hashes of a prompt's blocks: see ``planner.Prompt``. A tail is found by content, too."""

    def __init__(self, keys: BlockKeys, hashes: Sequence[bytes]) -> None:
        self._keys = keys
        self._hashes = hashes

    @property
    def num_tokens(self) -> int:
        return len(self._hashes) * self._keys.block_tokens

    def common(self, record: BlockRecord) -> int:
        return common_blocks(record.block_hashes, self._hashes) * self._keys.block_tokens

    def rows(self, record: BlockRecord) -> list[Span]:
        return self._keys.whole(record.block_hashes)

    def chunks(self, first_token: int, end_token: int) -> list[Span]:
        size = self._keys.block_tokens
        return self._keys.chunks(self._hashes[: end_token // size], first_token // size)

    def tails(self, first_token: int, end_token: int) -> list[Span]:
        size = self._keys.block_tokens
        return self._keys.tails(self._hashes[: end_token // size], first_token // size)

    def states(self, own: Sequence[int], first_token: int) -> list[Span]:
        first = first_token // self._keys.block_tokens
        return [self._keys.state(self._hashes, n) for n in range(len(self._hashes), first, -1)]


class BlockRecords:
    """Describes records of chains of blocks to the ledger: see ``RecordKind``."""

    def __init__(self, keys: BlockKeys, packer: Packer) -> None:
        self._keys = keys
        self._packer = packer
        self._fingerprint = blobs.fingerprint_digest(packer.fingerprint)

    def key(self, tenant: str, session_id: str) -> bytes:
        return self._keys.record_key(tenant, session_id)

    def blob_keys(self, record: BlockRecord) -> list[bytes]:
        return [x.key for x in self._keys.spans(record)]

    def is_usable(self, record: BlockRecord) -> bool:
        """True if a codec of it is known; the key names the model already."""
        return self._packer.reads_any(record.codecs)

    def pack(self, record: BlockRecord) -> Blob:
        key, size = self.key(record.tenant, record.id), len(record.hashes) // HASH_BYTES
        header = blobs.Header(key, RECORD_CODEC, self._fingerprint, bytes(16), 0, size)
        return blobs.pack(header, encode_record(record))

    def unpack(self, key: bytes, blob: Blob) -> BlockRecord:
        header, payload = blobs.parse(blob)
        if (header.key, header.fingerprint) != (key, self._fingerprint):
            raise Mismatch("the record is of another model, rank or session")
        record = decode_record(payload, BlockRecord)
        if record.block_tokens != self._keys.block_tokens:
            raise Mismatch("the record has blocks of another size")
        return record


class Resting(msgspec.Struct, frozen=True):
    """The blocks of a session that are in memory, and those that are in slower tiers."""

    ram: BlockRuns = ()
    storage: BlockRuns = ()


def resting_blocks(
    keys: BlockKeys, stack: TierStack, record: BlockRecord, *, has_state: bool
) -> Resting:
    """Find the blocks of a session. A tier that does not answer has none of them.

    ``has_state``: only a prefix that ends at a stored state can be used.
    """
    hashes = record.block_hashes
    end = len(hashes)
    if has_state:
        states = [keys.state(hashes, x) for x in record.states]
        levels = stack.locate([x.key for x in states]).levels
        held = [x.end_block for x, level in zip(states, levels, strict=True) if level is not None]
        end = max(held, default=0)
    spans = [x for x in keys.whole(hashes) if x.first_block < end]
    in_ram, slower = [False] * len(spans), [False] * len(spans)
    for level, name in enumerate(stack.names):
        known = in_ram if name == "ram" else slower
        rest = [i for i, there in enumerate(known) if not there]
        if rest:  # a slower tier is asked only for blobs that the faster ones lack
            found = stack.holds(level, [spans[i].key for i in rest])
            for i, there in zip(rest, found, strict=True):
                known[i] = there
    return Resting(_runs(spans, in_ram, end), _runs(spans, slower, end))


def _runs(spans: Sequence[Span], held: Sequence[bool], end: int) -> BlockRuns:
    runs: list[tuple[int, int]] = []
    for span, there in zip(spans, held, strict=True):
        if not there:
            continue
        if runs and runs[-1][1] == span.first_block:
            runs[-1] = (runs[-1][0], min(span.end_block, end))
        else:
            runs.append((span.first_block, min(span.end_block, end)))
    return tuple(runs)
