"""The cold store of an engine that manages its own blocks and hashes (vLLM).

``ColdStore`` works on tokens and on arrays that an engine lends it for as long as it takes. Here
the engine cuts and names the blocks, and lends them only for moments. So the work is split: the
caller copies blocks out and in, and encodes and decodes them with ``packer``; this class knows
which blobs exist, where, and whose they are. Tiers, write-behind, format and codecs are the same.

    missing -> (caller encodes) -> commit           at the end of a turn
    fetch -> (caller decodes)                       on return
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from kvstore.block_committer import BlockCommitter
from kvstore.block_index import BlockIndex
from kvstore.block_keys import BlockKeys, Piece
from kvstore.block_reader import BlockReader
from kvstore.block_reader import Fetched as Fetched
from kvstore.block_records import BlockRecord, common_blocks
from kvstore.block_revision import BlockReviser
from kvstore.block_upkeep import BlockUpkeep
from kvstore.claims import Claims
from kvstore.codec_set import CodecSet
from kvstore.codec_switch import CodecSwitch, in_use, mark_tiers
from kvstore.codecs.base import Codec
from kvstore.config import StoreConfig
from kvstore.departures import Departures, OnGone
from kvstore.packer import Packer
from kvstore.pins import Pins
from kvstore.records import MissReason, SessionRef, TierName
from kvstore.rounds import Rounds
from kvstore.stats import Counters, StoreStats
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob, Tier
from kvstore.workers import Workers
from kvstore.write_behind import WriteBehind

CLOSE_FLUSH_S: Final = 10.0
HOUSEKEEPING_S: Final = 15.0
DISCARD_S: Final = 2.0  # a restore waits for it

# By key, what is new of a session in this codec.
Again: TypeAlias = Callable[[Codec], Mapping[bytes, Blob]]


class BlockStore:
    """Thread-safe; commits of one session must not overlap. Owns ``tiers`` and closes them."""

    def __init__(
        self,
        config: StoreConfig,
        packer: Packer,
        keys: BlockKeys,
        fingerprint: str,
        tiers: Sequence[Tier],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        has_state: bool = False,
    ) -> None:
        """``has_state``: the model has layers that do not keep all tokens."""
        self.packer = packer
        self.keys = keys
        self.counters = Counters()
        self.workers = Workers(config.num_threads)
        self._config = config
        self._clock = clock
        self._monotonic = monotonic
        self._closed = False
        self._stack = stack = TierStack(tiers, self.counters)
        mark_tiers(stack, packer)
        self._index = index = BlockIndex(stack, keys, fingerprint, config.index_bytes)
        index.load()
        self._pins = pins = Pins(stack, config.pinned_share, config.tenant_pinned_share)
        self._switch = CodecSwitch(packer, stack, pins)
        self._slower = [
            WriteBehind(stack, i, config.write_queue_bytes, self.counters)
            for i in range(1, len(stack))
        ]
        self._committer = BlockCommitter(stack, self._slower, index, pins)
        for record in reversed(index.all()):  # with a smaller share now, the newest stay
            self._committer.follow_pin(record)
        self._reviser = BlockReviser(keys, index, packer, clock)
        self._claims = Claims()
        self._departures = Departures(stack, index.restorable)
        self._upkeep = BlockUpkeep(
            stack,
            self._committer,
            index,
            keys,
            pins,
            self._claims,
            self.workers,
            self._departures,
            config.ttl_s,
            clock,
        )
        self._reader = BlockReader(
            stack,
            keys,
            index,
            self.workers,
            self.counters,
            packer,
            monotonic,
            has_state=has_state,
        )
        self._rounds = Rounds(self._upkeep.expire, HOUSEKEEPING_S, "kvstore-upkeep")

    # ---- turn end

    def missing(
        self, hashes: Sequence[bytes], states: Iterable[int] = (), part: Sequence[int] = ()
    ) -> list[Piece]:
        """Which blobs of the chain no tier holds yet.

        Args:
            states: after how many blocks.
            part: ids of the tokens behind the last block.
        """
        pieces = [*self.keys.covering(hashes, part), *(self.keys.state(hashes, x) for x in states)]
        places = self._stack.locate([x.key for x in pieces]).places
        return [x for x, place in zip(pieces, places, strict=True) if place is None]

    def unlisted(
        self, hashes: Sequence[bytes], states: Iterable[int] = (), part: Sequence[int] = ()
    ) -> list[Piece]:
        """What of the chain no known session has: about what ``missing`` says, at once."""
        size = self.keys.chunk_blocks

        def is_new(chunk: int) -> bool:
            return bool(self._index.unused([self.keys.piece(hashes, chunk * size, size).key]))

        # Who has a chunk has all before it.
        first = bisect_left(range(len(hashes) // size), True, key=is_new) * size
        pieces = [
            *self.keys.whole(hashes, first),
            *(self.keys.state(hashes, x) for x in states),
            *([self.keys.part(hashes, part)] if part else []),
        ]
        new = {*self._index.unused([x.key for x in pieces])}
        return [x for x in pieces if x.key in new]

    def commit(
        self,
        session: SessionRef,
        hashes: Sequence[bytes],
        fresh: Mapping[bytes, Blob],
        states: Sequence[int] = (),
        part: Sequence[int] = (),
        again: Again | None = None,
    ) -> BlockRecord | None:
        """The session is now this chain. Fast tier at once, slower ones behind.

        None if no tier takes it: the session stays what it was.

        Args:
            fresh: new blobs, in the codec of the fastest tier (the first of ``save_codecs``).
            states: after how many blocks a state is stored; those before that still hold are kept
                if there are none.
            part: ids of the tokens behind the last block that are stored, too.
            again: ``fresh`` in another codec, packed from the same rows. Called for each other one
                of ``save_codecs``, once the fastest tier has the session; without it slower tiers
                get copies of what that has.
        """
        with self._claims.claim(self.keys.record_key(session.tenant, session.id)):
            old = self._index.find(session.tenant, session.id)
            record, obsolete = self._reviser.revise(session, hashes, old, fresh, states, part)
            kept = self._committer.commit(record, fresh, obsolete)
            if kept:
                self._spread(record, fresh, obsolete, again)
        self.counters.add("saves" if kept else "saves_failed")
        return record if kept else None

    def _spread(
        self,
        record: BlockRecord,
        fresh: Mapping[bytes, Blob],
        obsolete: Sequence[bytes],
        again: Again | None,
    ) -> None:
        codecs = self.packer.codecs
        forms: dict[str, Mapping[bytes, Blob]] = {}
        try:
            if again is not None and fresh:
                for codec in codecs.on(self._stack.names)[1:]:
                    forms[codec.id] = again(codec)
        finally:  # what there is in no form of their own they get as it is
            self._committer.spread(
                record, lambda tier: forms.get(codecs.of(tier).id, fresh), obsolete
            )

    @property
    def save_codecs(self) -> tuple[Codec, ...]:
        """In which new blobs are wanted, the fastest tier's first. Empty without tiers."""
        return self.packer.codecs.on(self._stack.names)

    @property
    def home_codec(self) -> Codec:
        """The fastest tier's."""
        return next(iter(self.save_codecs), self.packer.codec)

    # ---- return

    def fetch(
        self,
        session: SessionRef | None,
        hashes: Sequence[bytes],
        first_block: int,
        deadline_s: float | None = None,
    ) -> Fetched:
        """Verified blobs for blocks ``first_block ..`` of a prompt. Blocks.

        Raises ``StoreClosed``, and nothing else: what cannot be had is a ``reason``.
        """
        record = self._record_for(session, hashes) if session else None
        wait_s = self._config.restore_deadline_s if deadline_s is None else deadline_s
        fetched = self._reader.fetch(record, hashes, first_block, wait_s)
        fetched = dataclasses.replace(fetched, hashes=hashes)
        if fetched.pieces:
            self.workers.later(self._used, record, fetched)
        return fetched

    def peek(
        self, session: SessionRef | None, hashes: Sequence[bytes], first_block: int
    ) -> tuple[int, MissReason | None]:
        """How far ``fetch`` would come if all blobs are good, and why not further. Reads no blob.

        A part of a block counts as a block. Raises ``StoreClosed``.
        """
        record = self._record_for(session, hashes) if session else None
        return self._reader.peek(record, hashes, first_block)

    def discard(self, key: bytes) -> None:
        """A blob that could not be decoded must not be offered again."""
        self.counters.add("corrupt")
        self.workers.quiet(DISCARD_S)  # or a copy on its way to a faster tier would come after
        for place in range(len(self._stack)):
            self._stack.delete(place, [key])

    def _record_for(self, session: SessionRef, hashes: Sequence[bytes]) -> BlockRecord | None:
        """This store's record, or that of another engine if it went further with this session."""
        local = self._index.find(session.tenant, session.id)
        if not self._stack.shared:
            return local
        shared = self._index.find_shared(session.tenant, session.id)
        if shared is None or shared.hashes == (local.hashes if local else b""):
            return local
        here = common_blocks(local.block_hashes, hashes) if local else -1
        if common_blocks(shared.block_hashes, hashes) <= here:
            return local
        self._index.put(shared)
        return shared

    def _used(self, record: BlockRecord | None, fetched: Fetched) -> None:
        """What was read is worth keeping near."""
        keys = chain = [x.key for x, _ in fetched.pieces]
        branches: set[bytes] = set()
        if record is not None:
            known = self._index.get(self._index.key(record))
            if known is None:
                return  # forgotten meanwhile: nothing of it may come back
            chain = [self._index.key(known), *self._index.chain(known)]
            branches = {*known.left_behind}
        # A blob that no session has may be of one that was forgotten meanwhile, too.
        gone = {*self._index.unused(keys)} - branches
        self._promote([(x.key, blob) for x, blob in fetched.pieces if x.key not in gone])
        self._stack.touch(chain)

    def _promote(self, blobs: list[tuple[bytes, Blob]]) -> None:
        held = self._stack.holds(0, [key for key, _ in blobs])
        slow = [x for x, near in zip(blobs, held, strict=True) if not near]
        if slow and self._stack.put(0, slow):
            self.counters.add("promoted_blobs", len(slow))

    # ---- in between

    def record(self, session: SessionRef) -> BlockRecord | None:
        """Also one in codecs that are not known here."""
        return self._index.find(session.tenant, session.id)

    def records(self) -> list[BlockRecord]:
        """Those of which anything can be read here."""
        return [x for x in self._index.all() if self.packer.reads_any(x.codecs)]

    def tier_of(self, record: BlockRecord) -> TierName | None:
        """The slowest tier that must be read; None if not even its beginning is held."""
        return self._upkeep.tier_of(record)

    def warm(self, session: SessionRef) -> None:
        """Bring the whole session to the fastest tier. Blocks."""
        record = self._index.find(session.tenant, session.id)
        if record is not None:
            self.fetch(session, record.block_hashes, 0)
            self.workers.quiet(self._config.restore_deadline_s)

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier``, then drop faster copies. Blocks; says where it rests."""
        return self._upkeep.demote(session, tier)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Raises ``PinLimit``: pinned sessions would take more than they may."""
        self._upkeep.pin(session, pinned)

    def forget(self, session: SessionRef) -> bool:
        """Remove the session from every tier, except what another session here uses. Blocks.

        A save of it that has begun must have ended: what it commits later, stays.
        """
        return self._upkeep.forget(session)

    def expire(self) -> None:
        """Forget sessions that nobody came back to for ``ttl_s``; done now and then anyway."""
        self._upkeep.expire()

    # ---- the store itself

    @property
    def codecs(self) -> CodecSet:
        """Those that it uses now."""
        return self.packer.codecs

    def adopt(self, codecs: CodecSet, *, keep: bool = True) -> None:
        """As ``ColdStore.adopt``."""
        self._switch.adopt(codecs, keep=keep)

    def listen(self, on_gone: OnGone) -> None:
        """``on_gone`` hears, on a store thread, of each session that its ttl or eviction took.

        It is told within a minute, and of a ``SessionRef`` without a salt.
        """
        self._departures.listen(on_gone)

    def stats(self, save_queue_bytes: int = 0) -> StoreStats:
        return StoreStats(
            counters=self.counters.as_dict(),
            save_queue_bytes=save_queue_bytes,
            write_queue_bytes={
                self._stack.name(i): x.nbytes for i, x in enumerate(self._slower, 1)
            },
            num_sessions=len(self._index.all()),
            tiers=self._stack.stats(),
            codecs=in_use(self._stack, self.packer),
        )

    def flush(self, deadline_s: float) -> bool:
        give_up_at = self._monotonic() + deadline_s
        quiet = self.workers.quiet(deadline_s)
        self._committer.catch_up()
        idle = [x.wait_idle(max(give_up_at - self._monotonic(), 0.0)) for x in self._slower]
        return quiet and all(idle) and self._stack.flush()

    def close(self) -> None:
        """Flush for a bounded time, stop all threads, close the tiers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._rounds.close()
        self.flush(CLOSE_FLUSH_S)
        for tier in self._slower:
            tier.close()
        self.workers.close()
        self._stack.close()
