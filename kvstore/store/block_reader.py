"""Reads the stored blobs of a chain of blocks.

Every blob that is returned was read completely and verified, so a caller can offer it to an engine
safely. Only then does the engine set blocks aside for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.blobs import format as blobs
from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.session import MissReason, SessionRef, TierName
from kvstore.store.blob_reader import BlobReader
from kvstore.store.block_keys import BlockKeys, BlockPrompt
from kvstore.store.planner import BlobRead, Plan, Planner
from kvstore.store.records import BlockRecord
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class Fetched:
    """Verified blobs that cover blocks ``.. end_block`` of the prompt without a hole.

    ``tier`` is the slowest that was read. ``reason``: why less than was once stored is returned.
    ``from_slower``: by key, the blobs that the fastest tier lacked. ``part``: ids of the tokens
    after ``end_block`` whose rows are the last of the blobs. The caller compares the prompt with
    them: it may continue with all, only the first few, or none of them. ``record_key``: of the
    prompt's session, if it is known.
    """

    end_block: int
    spans: list[tuple[Span, blobs.VerifiedBlob]] = field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    part: tuple[int, ...] = ()
    from_slower: list[tuple[bytes, Blob]] = field(default_factory=list, repr=False)
    hashes: Sequence[bytes] = field(default=(), repr=False)  # of the prompt's blocks
    record_key: bytes | None = field(default=None, repr=False)


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
        self._stack = ledger.stack
        self._counters = ledger.counters
        self._reader = BlobReader(ledger)
        self._keys = keys
        self._packer = packer
        self._has_state = has_state
        size = keys.chunk_blocks * keys.block_tokens
        self._planner = Planner(ledger, packer, size, growing=True, needs_state=has_state)

    def fetch(
        self,
        session: SessionRef | None,
        hashes: Sequence[bytes],
        first_block: int,
        deadline_s: float,
    ) -> Fetched:
        """Read and verify blobs for the blocks from ``first_block`` on. Blocks.

        Args:
            hashes: of all blocks of the prompt that may be restored, from its beginning.
        """
        plan = self._plan(session, hashes, first_block)
        good, reason = self._reader.read(plan.reads, self._verified, deadline_s)
        reason = reason or plan.reason
        if reason is not None:
            self._counters.add(f"misses.{reason}")
        if self._has_state and len(good) < len(plan.reads):
            good = []
        spans = [x.span for x in plan.reads[: len(good)]]
        last = spans[-1] if spans else None
        end = min(last.end_token, plan.end_token) // last.block_tokens if last else first_block
        part = plan.record.part if plan.record and last and last.is_part else ()
        if end <= first_block and not part:
            good, end = [], first_block
        copies = list(zip(spans, good, strict=False))
        slowest = max((x.level for x in good), default=None)
        return Fetched(
            end_block=end,
            spans=[(span, copy.value) for span, copy in copies],
            tier=None if slowest is None else self._stack.name(slowest),
            reason=reason,
            part=part,
            from_slower=[(span.key, copy.blob) for span, copy in copies if copy.level],
            hashes=hashes,
            record_key=self._index.key(plan.record) if plan.record else None,
        )

    def peek(
        self, session: SessionRef | None, hashes: Sequence[bytes], first_block: int
    ) -> tuple[int, MissReason | None]:
        """Return the end of the blobs that seem to exist; a part of a block counts as a block."""
        plan = self._plan(session, hashes, first_block)
        has_part = bool(plan.reads) and plan.reads[-1].span.is_part
        return plan.end_token // self._keys.block_tokens + has_part, plan.reason

    def _plan(
        self, session: SessionRef | None, hashes: Sequence[bytes], first_block: int
    ) -> Plan[BlockRecord]:
        prompt, size = BlockPrompt(self._keys, hashes), self._keys.block_tokens
        plan = self._planner.plan(session, prompt, first_block * size)
        reads, record = plan.reads, plan.record
        if reads and reads[-1].span.is_state:  # first, since without it no other need be read
            plan = plan._replace(reads=[reads[-1], *reads[:-1]])
        if record is None or not record.part:
            return plan
        if not plan.common == plan.end_token == record.comparable_tokens:
            return plan
        span = self._keys.part(record.block_hashes, record.part)
        level = self._stack.locate([span.key]).levels[0]
        if level is None:
            return plan._replace(reason="evicted")
        return plan._replace(reads=[*plan.reads, BlobRead(span, span.num_tokens, level)])

    def _verified(self, read: BlobRead, blob: Blob) -> blobs.VerifiedBlob:
        """Check the blob and its name: the key covers model, rank and every token before."""
        verified = blobs.verify(blob, read.key)
        self._packer.check_codecs(verified)
        return verified
