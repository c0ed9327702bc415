"""The promise of a restore, and its result.

Two engines take the rows of a restore in two ways. One wants arrays: ``Restored``. The other lends
its blocks only for a moment, so it gets verified blobs (``Fetched``) and unpacks them by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.blobs.format import VerifiedBlob
from kvstore.blobs.state_tree import StateTree
from kvstore.session import MissReason, TierName
from kvstore.shapes import KVPair
from kvstore.store.planner import BlobRead


@dataclass(frozen=True)
class Match:
    """The part of a prompt that can be restored. Cheap to make: only records were read, no blobs.

    Args:
        num_chunks: of the prompt, from its first one on.
        num_tokens: in these chunks.
        tier: the slowest that must be read, None for a miss.
        reason: why the rest of the KV that was once stored is not reusable; None if nothing was
            lost.
        record_key: of the session whose record is known.
    """

    num_chunks: int
    num_tokens: int
    tier: TierName | None
    reason: MissReason | None
    reads: tuple[BlobRead, ...] = field(default=(), repr=False)
    record_key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Restored:
    """KV in the form that the engine uses.

    Args:
        run: per growing layer K and V, (num_kv_heads, num_tokens, head_dim), the engine's dtype
            (bf16 as uint16), C-contiguous; the receiver may keep it.
        state: for a cache that cannot be cut, its state after exactly these tokens.
        tier: the slowest that was read.
        reason: why there are fewer tokens than the match promised.
        lossy_tokens: no row, and no state, from this token on came from a lossy codec; a source
            of a later save of these rows says so of the rows before it.
    """

    num_tokens: int
    run: list[KVPair] = field(repr=False)
    state: StateTree = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    lossy_tokens: int = 0


@dataclass(frozen=True)
class Fetched:
    """Verified blobs that cover chunks ``.. num_chunks`` of the prompt without a hole.

    Args:
        blobs: in the order of the plan: a state and its windows first, then chunks.
        tier: the slowest that was read.
        reason: why less than was once stored is returned.
    """

    num_chunks: int
    blobs: list[tuple[BlobRead, VerifiedBlob]] = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
