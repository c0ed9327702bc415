"""Restores the KV of a match: unpacks each blob straight into its place in the final arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvstore.blobs.chain import Tokens, no_tokens
from kvstore.blobs.packer import Packer
from kvstore.blobs.snapshot import StateTree
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.reading import GoodCopy
from kvstore.session import MissReason, TierName
from kvstore.shapes import KVPair, slice_tokens
from kvstore.store.blob_reader import BlobReader
from kvstore.store.planner import BlobRead
from kvstore.store.records import SessionRecord
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class Match:
    """The part of a prompt that can be restored. Cheap to make: only records were read, no blobs.

    ``tier`` is the slowest that must be read, None for a miss. ``reason``: why the rest of the KV
    that was once stored is not reusable; None if nothing was lost. ``tokens``, (num_tokens,) int32,
    are the tokens of the match: loading it needs no other source for the tokens of the KV.
    """

    num_tokens: int
    tier: TierName | None
    reason: MissReason | None
    reads: tuple[BlobRead, ...] = field(default=(), repr=False)
    record_key: bytes | None = field(default=None, repr=False)
    tokens: Tokens = field(default_factory=no_tokens, repr=False, compare=False)


@dataclass(frozen=True)
class Restored:
    """The KV of ``tokens``, (num_tokens,) int32, in the form that the engine uses.

    ``run``: per growing layer K and V, (num_kv_heads, num_tokens, head_dim), the engine's dtype
    (bf16 as uint16), C-contiguous; the receiver may keep it. ``state``: for a cache that cannot be
    cut, its state after exactly these tokens. ``tier``: the slowest that was read. ``reason``: why
    there are fewer tokens than the match promised. ``lossy_tokens``: no row from this token on was
    unpacked from a lossy codec; a caller that saves these rows again passes it on. ``lossy_state``:
    the same for the state: its position, or 0 if it is exact.
    """

    num_tokens: int
    run: list[KVPair] = field(repr=False)
    state: StateTree = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    tokens: Tokens = field(default_factory=no_tokens, repr=False)
    lossy_tokens: int = 0
    lossy_state: int = 0


class Restorer:
    """Thread-safe; every ``load`` works on arrays of its own."""

    def __init__(self, ledger: Ledger[SessionRecord], packer: Packer) -> None:
        self._stack = ledger.stack
        self._reader = BlobReader(ledger)
        self._packer = packer

    def load(self, match: Match, deadline_s: float) -> tuple[Restored, list[tuple[bytes, Blob]]]:
        """Return the restored prefix, and those of its blobs that the fastest tier lacks."""
        out = self._packer.layout.empty(match.num_tokens)
        ends = dict(zip(match.reads, accumulate(x.take for x in match.reads), strict=True))

        def unpack(read: BlobRead, blob: Blob) -> StateTree:
            target = slice_tokens(out, ends[read] - read.take, ends[read])
            key, first, count, _ = read.span
            if read.span.is_state:
                return self._packer.unpack_snapshot(blob, key, first, count, target)
            self._packer.unpack_run(blob, key, first, count, target)
            return None

        good, reason = self._reader.read(match.reads, unpack, deadline_s)
        slow = [(x.key, y.blob) for x, y in zip(match.reads, good, strict=False) if y.level]
        return self._assemble(match, good, out, reason), slow

    def _assemble(
        self,
        match: Match,
        good: Sequence[GoodCopy[StateTree]],
        out: list[KVPair],
        reason: MissReason | None,
    ) -> Restored:
        if reason is not None and match.reads and match.reads[-1].span.is_state:
            good = []  # without the state at its end, a run of tokens is unusable
        if not good:
            return Restored(0, self._packer.layout.empty(0), None, None, reason)
        reads = match.reads[: len(good)]
        num_tokens = sum(x.take for x in reads)
        if num_tokens < match.num_tokens:
            # A late thread may still be writing after the good prefix, so a copy is returned.
            out = [(k.copy(), v.copy()) for k, v in slice_tokens(out, 0, num_tokens)]
        lossy = [x for x, y in zip(reads, good, strict=True) if self._packer.is_lossy(y.blob)]
        is_lossy_state = reads[-1].span.is_state and self._packer.has_lossy_state(good[-1].blob)
        return Restored(
            num_tokens,
            out,
            good[-1].value,
            self._stack.name(max(x.level for x in good)),
            reason,
            match.tokens[:num_tokens],
            max((x.end_token for x in lossy), default=0),
            num_tokens if is_lossy_state else 0,
        )
