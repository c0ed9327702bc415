"""The cold store of an engine that manages its own blocks and hashes (vLLM).

Here the engine cuts and names the blocks, and lends them only for moments. So the work is split:
the caller copies blocks out and in, and encodes and decodes them with ``packer``; this class tracks
which blobs exist, in which tier, and which sessions they belong to.

    missing -> (caller encodes) -> commit           at the end of a turn
    fetch -> (caller decodes)                       on return
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from kvstore.blobs import format as blobs
from kvstore.blobs.packer import Packer
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.codecs.base import Codec
from kvstore.config import StoreConfig
from kvstore.ledger.ledger import Ledger
from kvstore.session import MissReason, SessionRef, TierName, kept_states
from kvstore.stats import StoreStats
from kvstore.store.block_keys import BlockKeys, BlockPrompt, BlockRecords, Resting, resting_blocks
from kvstore.store.encoder import OlderCopies, OlderRun
from kvstore.store.planner import BlobRead, Plan, Planner
from kvstore.store.records import ID_BYTES, BlockRecord, Reviser, Span, common_blocks
from kvstore.store.restorer import BlobReader
from kvstore.store.store import Store
from kvstore.tiers.base import Blob, Tier

VERIFIED_TOGETHER: Final = 8  # checking a blob takes less than handing it to a thread
DISCARD_S: Final = 2.0  # a restore waits up to this long for running copies

# Packs the new blobs of a session in this codec; returns them by key.
Again: TypeAlias = Callable[[Codec], Mapping[bytes, Blob]]


@dataclasses.dataclass(frozen=True)
class RestoredPart:
    """Rows restored from a part of a block, which are now the first rows of a fuller block.

    ``tokens``: ids of the tokens in the stored blob, of which the first ``num_loaded`` were used.
    """

    first_block: int
    tokens: tuple[int, ...]
    num_loaded: int


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Verified blobs that cover blocks ``.. end_block`` of the prompt without a hole.

    ``tier`` is the slowest that was read. ``reason``: why less than was once stored is returned.
    ``part``: ids of the tokens after ``end_block`` whose rows are the last of the blobs. The caller
    compares the prompt with them: it may continue with all, only the first few, or none of them.
    """

    end_block: int
    spans: list[tuple[Span, blobs.VerifiedBlob]] = dataclasses.field(repr=False)
    tier: TierName | None
    reason: MissReason | None
    part: tuple[int, ...] = ()
    hashes: Sequence[bytes] = dataclasses.field(default=(), repr=False)  # of the prompt's blocks


class BlockStore(Store[BlockRecord]):
    """Thread-safe, but commits of one session must not overlap. Owns ``tiers`` and closes them.

    A save of a session that is forgotten must have ended: blobs that it commits later stay.
    """

    def __init__(
        self,
        config: StoreConfig,
        packer: Packer,
        keys: BlockKeys,
        tiers: Sequence[Tier],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        has_state: bool = False,
    ) -> None:
        """Set ``has_state`` for a model that has layers that do not keep all tokens."""
        self.keys = keys
        self._config = config
        records = BlockRecords(keys, packer)
        ledger = Ledger(config, records, packer, tiers, clock=clock, monotonic=monotonic)
        super().__init__(ledger, packer)
        self._has_state = has_state
        size = keys.chunk_blocks * keys.block_tokens
        self._reviser = Reviser(ledger.index, packer, size)
        self._planner = Planner(ledger, packer, size, growing=True, needs_state=has_state)
        self._reader = BlobReader(ledger, together=VERIFIED_TOGETHER)
        self.older = OlderCopies(ledger.stack, packer)

    # ---- turn end

    def missing(
        self, hashes: Sequence[bytes], states: Iterable[int] = (), part: Sequence[int] = ()
    ) -> list[Span]:
        """List the blobs of the chain that no tier holds yet.

        Args:
            states: the numbers of blocks after which there is a state.
            part: ids of the tokens after the last block.
        """
        spans = [*self.keys.covering(hashes, part), *(self.keys.state(hashes, x) for x in states)]
        levels = self.ledger.stack.locate([x.key for x in spans]).levels
        return [x for x, level in zip(spans, levels, strict=True) if level is None]

    def unlisted(
        self, hashes: Sequence[bytes], states: Iterable[int] = (), part: Sequence[int] = ()
    ) -> list[Span]:
        """List the blobs of the chain that no known session has.

        The result is about that of ``missing``, but comes at once, since no tier is asked.
        """
        size = self.keys.chunk_blocks

        def is_new(chunk: int) -> bool:
            return bool(self.ledger.index.unused([self.keys.span(hashes, chunk * size, size).key]))

        # A session that has a chunk also has all chunks before it.
        first = bisect_left(range(len(hashes) // size), True, key=is_new) * size
        spans = [
            *self.keys.whole(hashes, first),
            *(self.keys.state(hashes, x) for x in states),
            *([self.keys.part(hashes, part)] if part else []),
        ]
        new = {*self.ledger.index.unused([x.key for x in spans])}
        return [x for x in spans if x.key in new]

    def lineage(
        self,
        session: SessionRef,
        hashes: Sequence[bytes],
        span: Span,
        lossy_tokens: int,
        codec: Codec,
        part: RestoredPart | None = None,
    ) -> Lineage:
        """Find the surviving lossy copies that a new blob's rows continue.

        Args:
            hashes: of the session's blocks.
            lossy_tokens: no row of the session from this token on was restored.
            codec: of the new blob; a copy in it is preferred to others.
            part: the part from which some of the rows were restored.
        """
        if lossy_tokens <= span.first_token:
            return FRESH
        if codec.exact:
            return Lineage(lossy_tokens)
        runs, end = self._older_runs(session, hashes, span)
        if part is not None and end == part.first_block * span.block_tokens:
            older = self.keys.part(hashes[: part.first_block], part.tokens)
            end += part.num_loaded
            runs.append(OlderRun(older, end))
        return Lineage(lossy_tokens, self.older.rows(runs, codec.id), end)

    def _older_runs(
        self, session: SessionRef, hashes: Sequence[bytes], span: Span
    ) -> tuple[list[OlderRun], int]:
        """Name the stored blob that holds most of the blocks of ``span``.

        Returns it with the end of the tokens that both have in common.
        """
        first = span.first_block
        tails = self.keys.tails(hashes[: max(span.end_block, first)], first)
        levels = self.ledger.stack.locate([x.key for x in tails]).levels
        held = [x for x, level in zip(tails, levels, strict=True) if level is not None][:1]
        end = held[0].end_block if held else first
        old = self.ledger.find(session)
        if old is not None and (common := common_blocks(old.block_hashes, hashes)) > end:
            whole = self.keys.whole(old.block_hashes, first)
            other = [x for x in whole if x.first_block == first and x.key != span.key]
            if other:
                held, end = other, min(common, other[0].end_block)
        end_token = end * span.block_tokens
        return [OlderRun(x, end_token) for x in held], end_token

    def commit(
        self,
        session: SessionRef,
        hashes: Sequence[bytes],
        fresh: Mapping[bytes, Blob],
        states: Sequence[int] = (),
        part: Sequence[int] = (),
        again: Again | None = None,
        ids: bytes = b"",
    ) -> BlockRecord | None:
        """Make this chain the session's. Writes to the fastest tier at once, to slower ones later.

        Returns None if no tier takes it: then the session stays as it was.

        Args:
            fresh: new blobs, in the codec of the fastest tier (the first of ``save_codecs``).
            states: the numbers of blocks after which a state is stored. If empty, the older states
                that still match the chain are kept.
            part: ids of the tokens after the last block that are stored, too.
            again: packs ``fresh`` in another codec, from the same rows. Called for each further
                codec of ``save_codecs``, once the fastest tier has the session; without it slower
                tiers get copies of the fastest tier's blobs.
            ids: of the blocks' tokens, if the record is to have them.
        """
        with self.ledger.claims.claim(self.ledger.record_key(session)):
            old = self.ledger.find(session)
            common = common_blocks(old.block_hashes, hashes) if old else 0
            still_good = [x for x in old.states if x <= common] if old else []
            known_ids = old.ids[: common * old.block_tokens * ID_BYTES] if old else b""
            record = BlockRecord(
                tenant=session.tenant,
                id=session.id,
                hashes=b"".join(hashes),
                block_tokens=self.keys.block_tokens,
                last_used_s=self.ledger.clock(),
                states=kept_states(states or still_good, self._config.max_snapshots),
                part=tuple(part),
                ids=ids or known_ids,
            )
            spans, common_tokens = self.keys.spans(record), common * self.keys.block_tokens
            record, obsolete = self._reviser.revise(record, old, common_tokens, spans, fresh)
            codecs = self.packer.codecs
            others = codecs.on(self.ledger.stack.names)[1:] if again and fresh else ()
            forms = ((x.id, {**fresh, **again(x)}) for x in others if again)
            kept = self.ledger.committer.save(record, fresh, obsolete, codecs, forms)
        self.counters.add("saves" if kept else "saves_failed")
        return record if kept else None

    @property
    def save_codecs(self) -> tuple[Codec, ...]:
        """Codecs to pack new blobs in, the fastest tier's first. Empty without tiers."""
        return self.packer.codecs.on(self.ledger.stack.names)

    @property
    def home_codec(self) -> Codec:
        """The codec of the fastest tier."""
        return next(iter(self.save_codecs), self.packer.codec)

    # ---- return

    def fetch(
        self,
        session: SessionRef | None,
        hashes: Sequence[bytes],
        first_block: int,
        deadline_s: float | None = None,
    ) -> Fetched:
        """Return verified blobs for blocks ``first_block ..`` of a prompt. Blocks.

        Raises ``StoreClosed``, and nothing else: a ``reason`` explains blobs that are unavailable.
        """
        plan = self._plan(session, hashes, first_block)
        wait_s = self._config.restore_deadline_s if deadline_s is None else deadline_s
        good, reason = self._reader.read(plan.reads, self._verified, wait_s)
        reason = reason or plan.reason
        if reason is not None:
            self.counters.add(f"misses.{reason}")
        if self._has_state and len(good) < len(plan.reads):
            good = []
        spans = [x.span for x in plan.reads[: len(good)]]
        last = spans[-1] if spans else None
        end = min(last.end_token, plan.end_token) // last.block_tokens if last else first_block
        part = plan.record.part if plan.record and last and last.is_part else ()
        if end <= first_block and not part:
            return Fetched(first_block, [], None, reason, hashes=hashes)
        key = self.ledger.index.key(plan.record) if plan.record else None
        slow = [(span.key, x.blob) for span, x in zip(spans, good, strict=True) if x.level]
        self.workers.later(self.ledger.promotion.used, key, [x.key for x in spans], slow)
        tier = self.ledger.stack.name(max(x.level for x in good))
        blobs_of = [(span, x.value) for span, x in zip(spans, good, strict=True)]
        return Fetched(end, blobs_of, tier, reason, part, hashes)

    def peek(
        self, session: SessionRef | None, hashes: Sequence[bytes], first_block: int
    ) -> tuple[int, MissReason | None]:
        """Return how far ``fetch`` would get if all blobs are good, and why not further.

        Reads no blob. A part of a block counts as a block. Raises ``StoreClosed``.
        """
        plan = self._plan(session, hashes, first_block)
        has_part = bool(plan.reads) and plan.reads[-1].span.is_part
        return plan.end_token // self.keys.block_tokens + has_part, plan.reason

    def _plan(
        self, session: SessionRef | None, hashes: Sequence[bytes], first_block: int
    ) -> Plan[BlockRecord]:
        prompt, size = BlockPrompt(self.keys, hashes), self.keys.block_tokens
        plan = self._planner.plan(session, prompt, first_block * size)
        reads, record = plan.reads, plan.record
        if reads and reads[-1].span.is_state:  # first, since without it no other need be read
            plan = plan._replace(reads=[reads[-1], *reads[:-1]])
        if record is None or not record.part:
            return plan
        if not plan.common == plan.end_token == record.comparable_tokens:
            return plan
        span = self.keys.part(record.block_hashes, record.part)
        level = self.ledger.stack.locate([span.key]).levels[0]
        if level is None:
            return plan._replace(reason="evicted")
        return plan._replace(reads=[*plan.reads, BlobRead(span, span.num_tokens, level)])

    def _verified(self, read: BlobRead, blob: Blob) -> blobs.VerifiedBlob:
        """Check the blob and its name: the key covers model, rank and every token before."""
        verified = blobs.verify(blob, read.key)
        self.packer.check_codecs(verified)
        return verified

    def discard(self, key: bytes) -> None:
        """Delete a blob that could not be decoded, so that it is never offered again."""
        self.counters.add("corrupt")
        self.workers.quiet(DISCARD_S)  # else a copy on its way to a faster tier could come later
        for level in range(len(self.ledger.stack)):
            self.ledger.stack.delete(level, [key])

    # ---- between turns

    def record(self, session: SessionRef) -> BlockRecord | None:
        """Return the session's record, even if it is in codecs that are not known here."""
        return self.ledger.find_anywhere(session)

    def resting(self, session: SessionRef) -> tuple[BlockRecord, Resting] | None:
        """Return the session's record, and the kinds of tiers that hold its blocks.

        None if the index does not know it, or it could not be restored here.
        """
        record = self.ledger.index.get(self.ledger.record_key(session))
        if record is None or not self.ledger.kind.is_usable(record):
            return None
        stack, has_state = self.ledger.stack, self._has_state
        return record, resting_blocks(self.keys, stack, record, has_state=has_state)

    def warm(self, session: SessionRef) -> None:
        """Bring the whole session to the fastest tier. Blocks."""
        record = self.ledger.find(session)
        if record is not None:
            self.fetch(session, record.block_hashes, 0)
            self.workers.quiet(self._config.restore_deadline_s)

    # ---- the store itself

    def stats(self, save_queue_bytes: int = 0) -> StoreStats:
        """Return the current statistics. ``save_queue_bytes``: hot bytes waiting at the caller."""
        return self.ledger.stats(save_queue_bytes)
