"""The cold store: sessions in, sessions out.

A cold session is only a cache. ``save`` may be skipped, a tier may lose a blob or be down, a blob
may be damaged: each costs a recompute of the tokens concerned and nothing else. What ``load`` gives
back was verified blob by blob against the tokens it was computed from, the tenant's salt, the model
and the codec.

The parts, in the order in which a session meets them: ``save_queue`` and ``saver`` (turn end),
``encoder`` and ``revision`` (which blobs, which record), ``committer`` and ``write_behind`` (into
the tiers), then ``matcher`` and ``restore`` (on return). ``session_index`` remembers which sessions
there are, ``upkeep`` moves and removes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.accounting import SessionBytes, measure
from kvstore.chain import KeySpace, Tokens, as_tokens, common_prefix
from kvstore.chunk_size import chunk_tokens
from kvstore.codec_set import CodecSet
from kvstore.codec_switch import CodecSwitch, in_use, mark_tiers
from kvstore.codecs.base import Codec
from kvstore.committer import Committer
from kvstore.config import StoreConfig
from kvstore.departures import Departures, OnGone
from kvstore.encoder import Encoder
from kvstore.errors import StoreClosed
from kvstore.matcher import Match as Match
from kvstore.matcher import Matcher
from kvstore.packer import Packer
from kvstore.pins import Pins
from kvstore.promotion import Promotion
from kvstore.records import SessionRecord, SessionRef, TierName
from kvstore.restore import Restored as Restored
from kvstore.restore import Restorer
from kvstore.revision import Reviser
from kvstore.save_queue import Offered, OnDone, SaveJob, SaveQueue
from kvstore.saver import Saver
from kvstore.session_index import SessionIndex
from kvstore.session_keys import KeyMaker
from kvstore.shapes import KVLayout, KVRun
from kvstore.snapshot import Snapshot as Snapshot
from kvstore.snapshot import StateArray as StateArray
from kvstore.snapshot import StateTree as StateTree
from kvstore.snapshot import state_nbytes
from kvstore.stats import Counters, StoreStats
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Tier
from kvstore.upkeep import Upkeep
from kvstore.workers import Workers
from kvstore.write_behind import WriteBehind

CLOSE_FLUSH_S: Final = 10.0


class ColdStore:
    """Thread-safe. Owns ``tiers`` (fastest first) and closes them.

    Args:
        fingerprint: hex digest of weights, config, dtype and the engine's KV layout.
        model: the served name; sessions are found by it.
        needs_state: the model's cache cannot be cut back to an earlier token; sessions are then
            restorable only where a snapshot was taken.

    Raises:
        UnknownCodec: a codec cannot take this layout.
    """

    def __init__(
        self,
        config: StoreConfig,
        layout: KVLayout,
        fingerprint: str,
        model: str,
        codecs: Codec | CodecSet,
        tiers: Sequence[Tier],
        *,
        needs_state: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.layout = layout
        self._monotonic = monotonic
        self._closed = False
        self._counters = counters = Counters()
        self._packer = packer = Packer(codecs, layout, fingerprint)
        space = KeySpace(fingerprint, chunk_tokens(config), model)
        self._keys = keys = KeyMaker(space, growing=bool(layout.layers), needs_state=needs_state)
        self._stack = stack = TierStack(tiers, counters)
        mark_tiers(stack, packer)
        self._index = index = SessionIndex(
            stack,
            packer,
            keys,
            counters,
            clock,
            max_bytes=config.index_bytes,
            ttl_s=config.ttl_s,
        )
        index.load()
        self._pins = pins = Pins(stack, config.pinned_share, config.tenant_pinned_share)
        self._switch = CodecSwitch(packer, stack, pins)
        self._workers = workers = Workers(config.num_threads)
        self._queue = queue = SaveQueue(config.save_queue_bytes)
        self._slower = [
            WriteBehind(stack, i, config.write_queue_bytes, counters) for i in range(1, len(stack))
        ]
        self._committer = committer = Committer(stack, self._slower, packer, keys, index, pins)
        for record in reversed(index.all()):  # where the share is smaller now, the newest stay
            committer.follow_pin(record)
        self._matcher = Matcher(stack, index, keys)
        self._promotion = Promotion(stack, index, keys, queue, counters)
        self._restorer = Restorer(stack, packer, workers, counters, monotonic)
        self._departures = Departures(stack, index.restorable)
        self._upkeep = upkeep = Upkeep(
            stack, queue, committer, index, keys, pins, workers, self._departures
        )
        encoder = Encoder(stack, packer, keys, workers, counters, config.max_snapshots)
        reviser = Reviser(keys, index, packer)
        self._saver = Saver(
            queue, encoder, reviser, committer, keys, index, counters, clock, upkeep.expire
        )
        self._saver.start()

    # ---- turn end

    def save(
        self,
        session: SessionRef,
        token_ids: Sequence[int] | Tokens,
        run: KVRun,
        snapshots: Sequence[Snapshot] = (),
        on_done: OnDone | None = None,
        lossy_tokens: int = 0,
    ) -> bool:
        """Keep this session's KV. Any thread; returns at once.

        Args:
            run: views of the KV of ``token_ids``, from the first token on; all growing layers,
                the layout's dtype. They are read later, on store threads, so their memory must not
                change, and are let go of as soon as they are encoded.
            snapshots: states at positions within ``token_ids`` (models that need them only).
            on_done: called on a store thread with the session's new record, or with None if it
                could not be saved. Of a save that gave way to a newer one it is called with the
                newer one's record.
            lossy_tokens: if any of the KV was restored, what ``Restored`` said of it. Chunks among
                these tokens that no tier has any more are kept as rows, not packed once more.

        Returns:
            False if the save was skipped, because too much is waiting or nothing can hold it;
            ``on_done`` is then not called.
        """
        tokens = as_tokens(token_ids)
        if len(run):
            tokens = tokens[: run[0][0].shape[1]]
        key = self._keys.space.record_key(session.tenant, session.id)
        nbytes = self._unsaved_bytes(key, tokens) + sum(state_nbytes(x.state) for x in snapshots)
        listeners = [] if on_done is None else [on_done]
        job = SaveJob(key, session, tokens, run, tuple(snapshots), nbytes, listeners, lossy_tokens)
        possible = len(tokens) > 0 and len(self._stack) > 0
        offered = self._queue.offer(job) if possible else Offered.REFUSED
        if offered is Offered.SUPERSEDED:
            self._counters.add("saves_superseded")
        if offered is Offered.REFUSED:
            self._counters.add("saves_skipped")
        return offered is not Offered.REFUSED

    def settled(self, session: SessionRef) -> bool:
        """No save of this session is waiting or running."""
        return self._queue.settled(self._keys.space.record_key(session.tenant, session.id))

    # ---- return

    def match(
        self,
        session: SessionRef | None,
        salt: bytes,
        token_ids: Sequence[int] | Tokens,
        limit: int,
        boundaries: Sequence[int] = (),
    ) -> Match:
        """The longest prefix of at most ``limit`` tokens that can be restored.

        By the session's own record token by token, else by content in full chunks (another session
        of the tenant began alike). A model that needs state can only resume where a snapshot is:
        its record's, or at one of ``boundaries`` if anybody left one there.
        """
        if self._closed:
            return Match(0, None, "disabled")
        match = self._matcher.match(session, salt, token_ids, limit, boundaries)
        if match.reason is not None:
            self._counters.add(f"misses.{match.reason}")
        return match

    def prepare(self, session: SessionRef) -> Match:
        """All that the session's record covers, for a restore ahead of the prompt."""
        record = self.record(session)
        if record is None:
            return Match(0, None, "disabled" if self._closed else "never-stored")
        return self._matcher.match(session, session.salt, record.tokens, record.num_tokens)

    def load(self, match: Match, deadline_s: float | None = None) -> Restored:
        """Read and decode what ``match`` promised, or the good prefix of it. Blocks.

        Never raises for bad or missing blobs, or for tiers that are down. Blobs that came from a
        slower tier are put into the fastest one afterwards, in the background.
        """
        wait_s = self._config.restore_deadline_s if deadline_s is None else deadline_s
        try:
            restored, slow = self._restorer.load(match, wait_s)
            self._workers.later(self._promotion.used, match, restored.num_tokens, slow)
        except StoreClosed:
            return Restored(0, self.layout.empty(0), None, None, "disabled")
        self._counters.add("restores", int(restored.num_tokens > 0))
        self._counters.add("restored_tokens", restored.num_tokens)
        if restored.reason is not None:
            self._counters.add(f"misses.{restored.reason}")
        return restored

    # ---- in between

    def record(self, session: SessionRef) -> SessionRecord | None:
        """What is known of the session, if its blobs can be used by this engine."""
        return None if self._closed else self._index.find_usable(session)

    def records(self) -> list[SessionRecord]:
        """All sessions of this model, in codecs known here, that rest in local tiers."""
        return [] if self._closed else self._upkeep.resting_here()

    def tier_of(self, session: SessionRef | SessionRecord) -> TierName | None:
        """The fastest tier holding all of it, else the slowest one needed; None if nothing is."""
        record = session if isinstance(session, SessionRecord) else self.record(session)
        return None if record is None or self._closed else self._upkeep.tier_of(record)

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier`` and drop faster copies. Blocks; says where it rests now.

        A pinned session, and one that ``tier`` cannot take as a whole, stays where it is.
        """
        return None if self._closed else self._upkeep.demote(session, tier)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Keep the session's blobs from eviction, or stop to. Blocks while a save of it runs.

        Raises ``PinLimit``: with it, pinned sessions would take more than ``pinned_share``.
        """
        if not self._closed:
            self._upkeep.pin(session, pinned)

    def is_pinned(self, session: SessionRef) -> bool:
        """What its record says by now. From memory, so it does not wait."""
        record = self._index.get(self._keys.space.record_key(session.tenant, session.id))
        return record is not None and record.pinned

    def forget(self, session: SessionRef) -> bool:
        """Remove the session from every tier; False if nothing was known of it. Blocks.

        Afterwards no tier holds anything of it but chunks that another session here uses. A tier
        that is down is told when it is back.
        """
        return not self._closed and self._upkeep.forget(session)

    def session_bytes(self, session: SessionRef) -> SessionBytes | None:
        """Counted blob by blob; for benchmarks."""
        record = self.record(session)
        return measure(self._stack, self._packer, self._keys, record) if record else None

    # ---- the store itself

    @property
    def codecs(self) -> CodecSet:
        """Those that it uses now."""
        return self._packer.codecs

    def adopt(self, codecs: CodecSet, *, keep: bool = True) -> None:
        """Use these codecs from now on. Any thread; waits for nobody.

        What is stored stays as it is. ``keep``: codecs that could be read before still can;
        otherwise their blobs are as good as gone. Warm new codecs first. Raises ``UnknownCodec``,
        with nothing changed: one of them cannot take this layout.
        """
        self._switch.adopt(codecs, keep=keep)

    def listen(self, on_gone: OnGone) -> None:
        """``on_gone`` hears, on a store thread, of each session that its ttl or eviction took.

        It is told within a minute, and of a ``SessionRef`` without a salt.
        """
        self._departures.listen(on_gone)

    def stats(self) -> StoreStats:
        return StoreStats(
            counters=self._counters.as_dict(),
            save_queue_bytes=self._queue.nbytes,
            write_queue_bytes={
                self._stack.name(i): x.nbytes for i, x in enumerate(self._slower, 1)
            },
            num_sessions=len(self._index),
            tiers=self._stack.stats(),
            codecs=in_use(self._stack, self._packer),
        )

    def flush(self, deadline_s: float) -> bool:
        """All saves done, in every tier that takes them, as safe as they will get; or False."""
        give_up_at = self._monotonic() + deadline_s
        if self._closed or not self._queue.wait_idle(deadline_s):
            return False
        quiet = self._workers.quiet(give_up_at - self._monotonic())
        self._committer.catch_up()
        idle = [x.wait_idle(give_up_at - self._monotonic()) for x in self._slower]
        return quiet and all(idle) and self._stack.flush()

    def close(self) -> None:
        """Flush for a bounded time, stop all threads, close the tiers. Safe to call twice."""
        if self._closed:
            return
        self.flush(CLOSE_FLUSH_S)
        self._closed = True
        dropped = self._queue.close()
        self._saver.join()
        for tier in self._slower:
            tier.close()
        self._workers.close()
        self._stack.close()
        for on_done in (x for job in dropped for x in job.on_done):
            on_done(None)

    def _unsaved_bytes(self, key: bytes, tokens: Tokens) -> int:
        record = self._index.get(key)
        known = common_prefix(record.tokens, tokens) if record else 0
        return (len(tokens) - known) * self.layout.bytes_per_token
