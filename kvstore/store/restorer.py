"""Carries out a restore: reads the blobs of a match, verifies them, and unpacks rows and states.

The MLX engine gets the rows of a restore as arrays (``Restored``). vLLM lends its blocks only for a
moment, so its plug-in gets verified blobs (``Fetched``) and unpacks them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.blobs.chain import ChainKeys
from kvstore.blobs.format import VerifiedBlob
from kvstore.blobs.packer import Packer
from kvstore.blobs.state_tree import StateTree
from kvstore.errors import ForeignCodec, RefusedCodec, StoreClosed, Unusable
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.stack import GoodCopy
from kvstore.session import MissReason, TierName
from kvstore.shapes import KVRun, slice_tokens
from kvstore.store.blob_reader import BlobReader, Use
from kvstore.store.planner import BlobRead
from kvstore.store.states import unpack_state
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class Match:
    """The part of a prompt that can be restored. Cheap to make: only records were read, no blobs.

    Args:
        num_chunks: chunks of the prompt that are then in place, from its first one on.
        num_tokens: the tokens of these chunks.
        tier: the slowest tier that must be read; None for a miss.
        reason: why the rest of the session's stored KV cannot be reused; None if nothing is lost.
        reads: the blobs to read, in order.
        record_key: the key of the session's record; None if there is no usable one.
    """

    num_chunks: int
    num_tokens: int
    tier: TierName | None
    reason: MissReason | None
    reads: tuple[BlobRead, ...] = field(default=(), repr=False)
    record_key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Restored:
    """The unpacked KV of a restore.

    Args:
        num_tokens: tokens from the prompt's first one on; 0 if nothing was restored.
        run: per growing layer K and V, (num_kv_heads, num_tokens, head_dim), the engine's dtype
            (bf16 as uint16), C-contiguous; the receiver may keep it.
        state: for a model that needs states, its state after exactly these tokens; else None.
        tier: the slowest tier that was read; None if nothing was restored.
        reason: why there are fewer tokens than the match promised; None if there are as many.
        lossy_tokens: the number of first tokens whose rows or states may come from a lossy codec;
            a later save must report them as restored (``RowSource.is_restored``).
    """

    num_tokens: int
    run: KVRun = field(repr=False)
    state: StateTree = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    lossy_tokens: int = 0


@dataclass(frozen=True)
class Fetched:
    """Verified blobs that cover the prompt up to chunk ``num_chunks`` without a hole.

    Args:
        num_chunks: chunks of the prompt that are covered, from its first one on.
        blobs: in the order of the plan: a state and its windows first, then chunks.
        tier: the slowest tier that was read; None if there are no blobs.
        reason: why less is returned than was once stored; None if nothing is lost.
    """

    num_chunks: int
    blobs: list[tuple[BlobRead, VerifiedBlob]] = field(repr=False)
    tier: TierName | None
    reason: MissReason | None


class Restorer:
    """Reads, verifies and unpacks the blobs of a match. Thread-safe.

    Args:
        deadline_s: the time for a restore whose caller gives none.
    """

    def __init__(self, ledger: Ledger, packer: Packer, keys: ChainKeys, deadline_s: float) -> None:
        self._ledger = ledger
        self._packer = packer
        self._chunk_tokens = keys.chunk_tokens
        self._deadline_s = deadline_s
        self._counters = ledger.counters
        self._reader = BlobReader(ledger)
        self._profiles = ledger.profiles
        self._monotonic = ledger.monotonic

    def restore(
        self, match: Match, deadline_s: float | None = None, out: KVRun | None = None
    ) -> Restored:
        """Read and unpack the blobs of ``match``, up to the first bad one. Blocks.

        Bad or missing blobs and tiers that are down are not raised but given as the reason. Blobs
        that came from a slower tier are put into the fastest one afterwards, in the background.

        Args:
            deadline_s: the time for it; None = the default.
            out: arrays for all tokens of ``match``, to unpack into. The result's ``run`` is ``out``
                if every blob was good at the first reading. Otherwise ``out`` must not be used,
                since a late thread may still write to it.
        """
        size, layout = self._chunk_tokens, self._packer.layout
        whole: KVRun = []
        given = out

        def into_arrays() -> Use[VerifiedBlob]:
            """Begin a reading; a late thread of the one before may still write to its arrays."""
            nonlocal whole, given
            whole = run = given or layout.empty(match.num_tokens)
            given = None

            def use(pairs: Sequence[tuple[BlobRead, Blob]]) -> list[VerifiedBlob]:
                verified = self._verified(pairs)
                found = [(x, read.piece) for (read, _), x in zip(pairs, verified, strict=True)]
                if chunks := [x for x in found if x[1].is_chunk]:
                    rows = slice_tokens(run, chunks[0][1].first_token, chunks[-1][1].end_token)
                    self._packer.unpack_chunks(chunks, rows)
                return verified

            return use

        try:
            good, reason = self._read(match, into_arrays, deadline_s)
        except StoreClosed:
            return Restored(0, layout.empty(0), None, None, "disabled")
        try:
            state = self._state_of(match, good)
        except ForeignCodec:  # the state's codec was withdrawn meanwhile
            good, state, reason = [], None, "fingerprint"
        except Unusable:
            good, state, reason = [], None, "corrupt"
        rows = [x for x in match.reads[: len(good)] if x.piece.is_chunk]
        if not good:
            return Restored(0, layout.empty(0), None, None, reason)
        num_tokens = rows[-1].piece.end_token if rows else match.num_tokens
        if num_tokens < match.num_tokens:
            # A late thread may still be writing after the good prefix, so a copy is returned.
            whole = [(k.copy(), v.copy()) for k, v in slice_tokens(whole, 0, num_tokens)]
        lossy = [
            x.piece.first_token + max(x.piece.num_tokens, size * x.piece.is_state)
            for x, y in zip(match.reads, good, strict=False)
            if self._packer.is_lossy(y.value)
        ]
        self._counters.add("restores")
        self._counters.add("restored_tokens", num_tokens)
        tier = self._ledger.stack.name(max(x.level for x in good))
        lossy_tokens = min(max(lossy, default=0), num_tokens)
        return Restored(num_tokens, whole, state, tier, reason, lossy_tokens)

    def fetch(self, match: Match, deadline_s: float | None = None) -> Fetched:
        """Read and verify the blobs of ``match``, up to the first bad one. Blocks.

        Raises:
            StoreClosed: the store is closed. All other failures are given as the reason.
        """
        good, reason = self._read(match, lambda: self._verified, deadline_s)
        reason = reason or match.reason
        reads = match.reads[: len(good)]
        rows = [x.piece for x in reads if x.piece.is_chunk]
        end = match.num_chunks if len(good) == len(match.reads) else 0
        if rows and not end:
            end = rows[-1].end_token // self._chunk_tokens
        if not good:
            return Fetched(0, [], None, reason)
        tier = self._ledger.stack.name(max(x.level for x in good))
        pairs = [(x, y.value) for x, y in zip(reads, good, strict=True)]
        return Fetched(end, pairs, tier, reason)

    def _read(
        self,
        match: Match,
        begin: Callable[[], Use[VerifiedBlob]],
        deadline_s: float | None,
    ) -> tuple[list[GoodCopy[VerifiedBlob]], MissReason | None]:
        """Return the good blobs and why they end; read twice if profiles had to be fetched first.

        Args:
            begin: returns the ``Use`` for one reading. The second gets another one, since threads
                of the first may still be running.
        """
        end = self._monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        foreign: set[str] = set()

        def noting(use: Use[VerifiedBlob]) -> Use[VerifiedBlob]:
            def noted(pairs: Sequence[tuple[BlobRead, Blob]]) -> list[VerifiedBlob]:
                try:
                    return use(pairs)
                except ForeignCodec as error:
                    if self._profiles.is_refused(error.codec_id):
                        raise RefusedCodec(str(error), error.codec_id) from error
                    if not isinstance(error, RefusedCodec):
                        foreign.add(error.codec_id)
                    raise

            return noted

        good, reason = self._reader.read(match.reads, noting(begin()), end - self._monotonic())
        if foreign and self._profiles.fetch([*foreign], end - self._monotonic()):
            good, reason = self._reader.read(match.reads, noting(begin()), end - self._monotonic())
        has_state = any(x.piece.is_state for x in match.reads)
        if has_state and len(good) < len(match.reads):
            good = []  # without the state at its end, a run of tokens is unusable
        if reason is not None:
            self._counters.add(f"misses.{reason}")
        if good:
            reads = match.reads[: len(good)]
            slow = [(x.key, y.blob) for x, y in zip(reads, good, strict=True) if y.level]
            keys = [x.key for x in reads]
            self._ledger.workers.later(self._ledger.restored, match.record_key, keys, slow)
        return good, reason

    def _verified(self, pairs: Sequence[tuple[BlobRead, Blob]]) -> list[VerifiedBlob]:
        return [self._packer.verify(blob, read.piece) for read, blob in pairs]

    def _state_of(self, match: Match, good: Sequence[GoodCopy[VerifiedBlob]]) -> StateTree:
        pairs = [(x, y.value) for x, y in zip(match.reads, good, strict=False)]
        state = next(((x.piece, y) for x, y in pairs if x.piece.is_state), None)
        if state is None:
            return None
        windows = [x for x in pairs if x[0].piece.is_window]
        return unpack_state(self._packer, state, windows)
