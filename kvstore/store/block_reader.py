"""Finds and reads the stored blobs of a chain of blocks.

Every blob that is returned was read completely and verified, so a caller can offer it to an engine
safely. Only then does the engine set blocks aside for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from kvstore.blobs import format as blobs
from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.reading import CopyReader, GoodCopy
from kvstore.session import MissReason, SessionRef, TierName
from kvstore.store.block_keys import BlockKeys
from kvstore.store.records import BlockRecord, common_blocks
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob

READ_BATCH: Final = 8  # blobs per call to a tier


@dataclass(frozen=True)
class Fetched:
    """Verified blobs that cover blocks ``.. end_block`` of the prompt without a hole.

    ``tier`` is the slowest that was read. ``reason``: why less than was once stored is returned.
    ``from_slower``: by key, the blobs that the fastest tier lacked. ``part``: ids of the tokens
    after ``end_block`` whose rows are the last of the blobs. The caller compares the prompt with
    them: it may continue with all, only the first few, or none of them.
    """

    end_block: int
    spans: list[tuple[Span, blobs.VerifiedBlob]] = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    part: tuple[int, ...] = ()
    from_slower: list[tuple[bytes, Blob]] = field(default_factory=list, repr=False)
    hashes: Sequence[bytes] = field(default=(), repr=False)  # of the prompt's blocks


@dataclass(frozen=True)
class Known:
    """The record of a prompt's session, or why there is none."""

    record: BlockRecord | None
    why_none: MissReason = "never-stored"


_Read: TypeAlias = tuple[Span, GoodCopy[blobs.VerifiedBlob]]


@dataclass(frozen=True)
class _Plan:
    spans: list[Span]
    end_block: int
    reason: MissReason | None
    part: tuple[int, ...] = ()


class BlockReader:
    """Finds and reads blobs for a prompt. Thread-safe."""

    def __init__(
        self,
        ledger: Ledger[BlockRecord],
        keys: BlockKeys,
        packer: Packer,
        *,
        has_state: bool = False,
    ) -> None:
        """Set ``has_state`` where only a prefix that ends at a stored state can be used."""
        self._index = ledger.index
        self._take = ledger.committer.take
        self._stack = ledger.stack
        self._workers = ledger.workers
        self._counters = ledger.counters
        self._monotonic = ledger.monotonic
        self._ledger = ledger
        self._copies = CopyReader(ledger.stack, ledger.counters)
        self._keys = keys
        self._packer = packer
        self._has_state = has_state

    def known(self, session: SessionRef | None, hashes: Sequence[bytes]) -> Known:
        """Find this store's record, or another engine's if that matches more of the prompt.

        Args:
            hashes: of the prompt's blocks.
        """
        if session is None:
            return Known(None)
        local = self._index.find(session.tenant, session.id)
        if self._stack.shared:
            shared = self._index.find_shared(session.tenant, session.id)
            if shared is not None and _goes_further(shared, local, hashes):
                self._take(shared)
                return Known(shared)
        lapsed = local is None and self._index.has_lapsed(session.tenant, session.id)
        return Known(local, "ttl" if lapsed else self._ledger.company.why_unknown())

    def fetch(
        self, known: Known, hashes: Sequence[bytes], first_block: int, deadline_s: float
    ) -> Fetched:
        """Read and verify blobs for the blocks from ``first_block`` on. Blocks.

        Args:
            hashes: of all blocks of the prompt that may be restored, from its beginning.
        """
        plan = self._plan_for(known, hashes, first_block)
        give_up_at = self._monotonic() + deadline_s
        good: list[_Read] = []
        for i in range(0, len(plan.spans), READ_BATCH):
            batch = plan.spans[i : i + READ_BATCH]
            reading = self._workers.read(self._read, batch)
            try:
                found = reading.result(timeout=max(give_up_at - self._monotonic(), 0.0))
            except TimeoutError:
                return self._result(plan, good, first_block, "deadline")
            for span, copy in zip(batch, found, strict=True):
                if isinstance(copy, str):
                    return self._result(plan, good, first_block, copy)
                good.append((span, copy))
        return self._result(plan, good, first_block, plan.reason)

    def peek(
        self, known: Known, hashes: Sequence[bytes], first_block: int
    ) -> tuple[int, MissReason | None]:
        """Return the end of the blobs that seem to exist; a part of a block counts as a block."""
        plan = self._plan_for(known, hashes, first_block)
        return max(first_block, plan.end_block + bool(plan.part)), plan.reason

    def _result(
        self, plan: _Plan, good: list[_Read], first_block: int, reason: MissReason | None
    ) -> Fetched:
        if self._has_state and len(good) < len(plan.spans):
            good = []
        end = min(good[-1][0].end_block, plan.end_block) if good else first_block
        part = plan.part if good and good[-1][0].is_part else ()
        if end <= first_block and not part:
            good, end = [], first_block
        if reason is not None:
            self._counters.add(f"misses.{reason}")
        slowest = max((copy.level for _, copy in good), default=None)
        return Fetched(
            end_block=end,
            spans=[(span, copy.value) for span, copy in good],
            tier=None if slowest is None else self._stack.name(slowest),
            reason=reason,
            part=part,
            from_slower=[(span.key, copy.blob) for span, copy in good if copy.level],
        )

    # ---- which

    def _plan_for(self, known: Known, hashes: Sequence[bytes], first_block: int) -> _Plan:
        plan = self._plan_to_state if self._has_state else self._plan
        return plan(known, hashes, first_block)

    def _plan(self, known: Known, hashes: Sequence[bytes], first_block: int) -> _Plan:
        """Plan by content and by the session's record, and use the plan that reaches further."""
        by_content = self._held(self._with_tail(hashes, first_block))
        end = by_content[-1].end_block if by_content else first_block
        record = known.record
        reason: MissReason | None = None
        if record is None:
            return _Plan(by_content, end, known.why_none if end < len(hashes) else None)
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
            reason = "diverged" if common else self._ledger.company.why_diverged()
        if reach < end:
            return _Plan(by_content, end, reason)
        if not record.part or not common == reach == len(stored):
            return _Plan(held, reach, reason)
        tail = self._held([self._keys.part(stored, record.part)])
        return _Plan(held + tail, reach, reason if tail else "evicted", record.part)

    def _plan_to_state(self, known: Known, hashes: Sequence[bytes], first_block: int) -> _Plan:
        """Plan up to the furthest state that is held together with everything before it."""
        states = [self._keys.state(hashes, n) for n in range(len(hashes), first_block, -1)]
        levels = self._stack.locate([x.key for x in states]).levels
        reason: MissReason = known.why_none if known.record is None else "evicted"
        for state, level in zip(states, levels, strict=True):
            if level is None:
                continue
            plan = self._plan(known, hashes[: state.end_block], first_block)
            if plan.end_block == state.end_block:
                # The state is read first: without it the rest need not be read.
                return _Plan([state, *plan.spans], plan.end_block, plan.reason)
            reason = plan.reason or reason
        return _Plan([], first_block, reason if len(hashes) > first_block else None)

    def _with_tail(self, hashes: Sequence[bytes], first_block: int) -> list[Span]:
        """Find full chunks as far as they go without a hole, then the longest tail that exists."""
        chunks = self._held(self._keys.chunks(hashes, first_block))
        size = self._keys.chunk_blocks
        at = chunks[-1].end_block if chunks else first_block - first_block % size
        tails = self._keys.tails(hashes, at)
        levels = self._stack.locate([x.key for x in tails]).levels
        held = [x for x, level in zip(tails, levels, strict=True) if level is not None]
        return chunks + held[:1]

    def _held(self, spans: list[Span]) -> list[Span]:
        located = self._stack.locate([x.key for x in spans])
        return spans[: located.num_leading]

    # ---- reading

    def _read(self, spans: list[Span]) -> list[GoodCopy[blobs.VerifiedBlob] | MissReason]:
        """Read a good copy of each blob, from the fastest tier that has one."""
        levels = self._stack.locate([x.key for x in spans]).levels
        return [self._good(x.key, level) for x, level in zip(spans, levels, strict=True)]

    def _good(self, key: bytes, level: int | None) -> GoodCopy[blobs.VerifiedBlob] | MissReason:
        levels = range(level or 0, len(self._stack))
        return self._copies.read(key, levels, partial(self._verify, key))

    def _verify(self, key: bytes, blob: Blob) -> blobs.VerifiedBlob:
        """Check the blob and its name: the key covers model, rank and every token before."""
        verified = blobs.verify(blob, key)
        self._packer.check_codecs(verified)
        return verified


def _goes_further(shared: BlockRecord, local: BlockRecord | None, hashes: Sequence[bytes]) -> bool:
    """True if another engine's record of the session matches more of this prompt than ours."""
    if shared.hashes == (local.hashes if local else b""):
        return False
    here = common_blocks(local.block_hashes, hashes) if local else -1
    return common_blocks(shared.block_hashes, hashes) > here
