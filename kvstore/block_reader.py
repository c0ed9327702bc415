"""Finding and reading the stored blobs of a chain of blocks.

Everything that is returned was read completely and verified, so that whoever offers it to an engine
can keep the promise. Only then does the engine set blocks aside for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore import format as blobs
from kvstore.block_index import BlockIndex
from kvstore.block_keys import BlockKeys, Piece
from kvstore.block_records import BlockRecord, common_blocks
from kvstore.errors import ForeignCodec, Mismatch, TierUnavailable, Unusable
from kvstore.packer import Packer
from kvstore.records import MissReason, TierName
from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob
from kvstore.workers import Workers

READ_BATCH: Final = 8  # blobs per call to a tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """Verified blobs that cover blocks ``.. end_block`` of the prompt without a hole.

    ``tier`` is the slowest that was read. ``reason``: why not all of what was once stored.
    ``part``: ids of tokens behind ``end_block`` whose rows are the last of the blobs. Whether the
    prompt goes on with them is for the caller to see: with the first few of them, perhaps.
    """

    end_block: int
    pieces: list[tuple[Piece, Blob]] = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    part: tuple[int, ...] = ()
    hashes: Sequence[bytes] = field(default=(), repr=False)  # of the prompt's blocks


@dataclass(frozen=True)
class _Plan:
    pieces: list[Piece]
    end_block: int
    reason: MissReason | None
    part: tuple[int, ...] = ()


class BlockReader:
    """Thread-safe."""

    def __init__(
        self,
        stack: TierStack,
        keys: BlockKeys,
        index: BlockIndex,
        workers: Workers,
        counters: Counters,
        packer: Packer,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        has_state: bool = False,
    ) -> None:
        """``has_state``: only what reaches exactly to a stored state can be used."""
        self._packer = packer
        self._stack = stack
        self._keys = keys
        self._index = index
        self._workers = workers
        self._counters = counters
        self._monotonic = monotonic
        self._has_state = has_state

    def fetch(
        self,
        record: BlockRecord | None,
        hashes: Sequence[bytes],
        first_block: int,
        deadline_s: float,
    ) -> Fetched:
        """Blobs for the blocks from ``first_block`` on; what comes before is not needed.

        Args:
            hashes: of all blocks of the prompt that may be restored, from its beginning.
        """
        plan = self._plan_for(record, hashes, first_block)
        give_up_at = self._monotonic() + deadline_s
        good: list[tuple[Piece, Blob]] = []
        slowest, reason = -1, plan.reason
        for i in range(0, len(plan.pieces), READ_BATCH):
            batch = plan.pieces[i : i + READ_BATCH]
            read = self._workers.read(self._read, batch)
            try:
                found = read.result(timeout=max(give_up_at - self._monotonic(), 0.0))
            except TimeoutError:
                return self._result(plan, good, first_block, slowest, "deadline")
            for piece, (blob, place, why) in zip(batch, found, strict=True):
                if blob is None:
                    return self._result(plan, good, first_block, slowest, why)
                good.append((piece, blob))
                slowest = max(slowest, place)
        return self._result(plan, good, first_block, slowest, reason)

    def peek(
        self, record: BlockRecord | None, hashes: Sequence[bytes], first_block: int
    ) -> tuple[int, MissReason | None]:
        """Where the blobs end that seem to be there; a part of a block counts as a block."""
        plan = self._plan_for(record, hashes, first_block)
        return max(first_block, plan.end_block + bool(plan.part)), plan.reason

    def _result(
        self,
        plan: _Plan,
        good: list[tuple[Piece, Blob]],
        first_block: int,
        slowest: int,
        reason: MissReason | None,
    ) -> Fetched:
        if self._has_state and len(good) < len(plan.pieces):
            good = []
        end = min(good[-1][0].end_block, plan.end_block) if good else first_block
        part = plan.part if good and good[-1][0].is_part else ()
        if end <= first_block and not part:
            good, end, slowest = [], first_block, -1
        if reason is not None:
            self._counters.add(f"misses.{reason}")
        tier = self._stack.name(slowest) if slowest >= 0 else None
        return Fetched(end, good, tier, reason, part)

    # ---- which

    def _plan_for(
        self, record: BlockRecord | None, hashes: Sequence[bytes], first_block: int
    ) -> _Plan:
        plan = self._plan_to_state if self._has_state else self._plan
        return plan(record, hashes, first_block)

    def _plan(self, record: BlockRecord | None, hashes: Sequence[bytes], first_block: int) -> _Plan:
        """By content and by the session's record, whichever reaches further."""
        by_content = self._held(self._with_tail(hashes, first_block))
        end = by_content[-1].end_block if by_content else first_block
        reason: MissReason | None = "never-stored" if record is None else None
        if record is None:
            return _Plan(by_content, end, reason if end < len(hashes) else None)
        stored = record.block_hashes
        common = common_blocks(stored, hashes)
        needed = [
            x
            for x in self._keys.whole(stored)
            if x.first_block < common and x.end_block > first_block
        ]
        held = self._held(needed)
        reach = min(held[-1].end_block, common) if held else first_block
        if not self._packer.reads_any(record.codecs):
            reason = "fingerprint"
        elif len(held) < len(needed):
            reason = "evicted" if self._packer.reads_all(record.codecs) else "fingerprint"
        elif common < min(len(stored), len(hashes)):
            reason = "diverged"
        if reach < end:
            return _Plan(by_content, end, reason)
        if not record.part or not common == reach == len(stored):
            return _Plan(held, reach, reason)
        behind = self._held([self._keys.part(stored, record.part)])
        return _Plan(held + behind, reach, reason if behind else "evicted", record.part)

    def _plan_to_state(
        self, record: BlockRecord | None, hashes: Sequence[bytes], first_block: int
    ) -> _Plan:
        """The furthest state that is held together with everything before it."""
        states = [self._keys.state(hashes, n) for n in range(len(hashes), first_block, -1)]
        places = self._stack.locate([x.key for x in states]).places
        reason: MissReason = "never-stored" if record is None else "evicted"
        for state, place in zip(states, places, strict=True):
            if place is None:
                continue
            plan = self._plan(record, hashes[: state.end_block], first_block)
            if plan.end_block == state.end_block:
                # The state is read first: without it the rest need not be.
                return _Plan([state, *plan.pieces], plan.end_block, plan.reason)
            reason = plan.reason or reason
        return _Plan([], first_block, reason if len(hashes) > first_block else None)

    def _with_tail(self, hashes: Sequence[bytes], first_block: int) -> list[Piece]:
        """Full chunks as far as they go without a hole, then the longest tail there is."""
        chunks = self._held(self._keys.chunks(hashes, first_block))
        size = self._keys.chunk_blocks
        at = chunks[-1].end_block if chunks else first_block - first_block % size
        tails = self._keys.tails(hashes, at)
        places = self._stack.locate([x.key for x in tails]).places
        held = [x for x, place in zip(tails, places, strict=True) if place is not None]
        return chunks + held[:1]

    def _held(self, pieces: list[Piece]) -> list[Piece]:
        located = self._stack.locate([x.key for x in pieces])
        return pieces[: located.num_leading]

    # ---- reading

    def _read(self, pieces: list[Piece]) -> list[tuple[Blob | None, int, MissReason]]:
        """Each blob from the fastest tier that has a good one."""
        keys = [x.key for x in pieces]
        places = self._stack.locate(keys).places
        return [self._good(key, place) for key, place in zip(keys, places, strict=True)]

    def _good(self, key: bytes, place: int | None) -> tuple[Blob | None, int, MissReason]:
        reason: MissReason = "evicted"
        for i in range(place or 0, len(self._stack)):
            try:
                blob = self._stack.get(i, [key])[0]
                if blob is not None:
                    self._verify(key, blob)
                    return blob, i, reason
            except TierUnavailable:
                reason = "unavailable"
            except ForeignCodec as error:  # it would only keep a readable one from being stored
                reason = "fingerprint"
                _log.warning("dropped a blob from %s: %s", self._stack.name(i), error)
                self._stack.delete(i, [key])
            except Unusable as error:
                reason = "corrupt"
                _log.warning("dropped a bad blob from %s: %s", self._stack.name(i), error)
                self._counters.add("corrupt")
                self._stack.delete(i, [key])
        return None, -1, reason

    def _verify(self, key: bytes, blob: Blob) -> None:
        """The key names model, rank and every token before, so equality of keys is enough."""
        header, _ = blobs.parse(blob)
        if header.key != key:
            raise Mismatch("a blob under another blob's name")
        self._packer.check_codec(header)
