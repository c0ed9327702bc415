"""The cold store: saves sessions and restores them.

A cold session is only a cache. ``save`` may be skipped, a tier may lose a blob or be down, a blob
may be damaged: each costs a recompute of the tokens concerned and nothing else. Everything that
``load`` returns was verified blob by blob against the tokens it was computed from, the tenant's
salt, the model and the codec.

The parts, in the order in which a session meets them: ``save_queue`` and ``saver`` (turn end),
``encoder`` and ``reviser`` (which blobs, which record), then ``matcher`` and ``restorer`` (on
return). The ledger (``kvstore.ledger``) keeps track of which sessions exist and where they are
stored, and decides which are evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.blobs.chain import KeySpace, Tokens, as_tokens, common_prefix
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.packer import Packer
from kvstore.blobs.snapshot import Snapshot as Snapshot
from kvstore.blobs.snapshot import StateArray as StateArray
from kvstore.blobs.snapshot import StateTree as StateTree
from kvstore.blobs.snapshot import state_nbytes
from kvstore.chunk_size import chunk_tokens
from kvstore.codecs.base import Codec
from kvstore.config import StoreConfig
from kvstore.errors import StoreClosed
from kvstore.ledger.claims import Claims
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.notices import OnNotice
from kvstore.ledger.repacking import OnPacked
from kvstore.session import SessionRef, TierName
from kvstore.shapes import KVRun, StoredModel
from kvstore.stats import StoreStats
from kvstore.store.records import SessionRecord
from kvstore.store.restorer import Restored as Restored
from kvstore.store.restorer import Restorer
from kvstore.store.saving.encoder import Encoder
from kvstore.store.saving.save_queue import Offered, OnDone, SaveJob, SaveQueue
from kvstore.store.saving.saver import Saver
from kvstore.store.token_keys import TokenKeys, TokenRecords
from kvstore.store.token_matcher import Match as Match
from kvstore.store.token_matcher import Matcher
from kvstore.tiers.base import Tier
from kvstore.tiers.ram_tier import RamTier

WAIT_S: Final = 30.0  # for saves of the session that wait or run
CLOSE_FLUSH_S: Final = 10.0
RESIZE_FLUSH_S: Final = 15.0


class ColdStore:
    """Thread-safe. Owns ``tiers`` (fastest first) and closes them.

    Raises:
        UnknownCodec: a codec cannot take this layout.
    """

    def __init__(
        self,
        config: StoreConfig,
        model: StoredModel,
        codecs: Codec | CodecSet,
        tiers: Sequence[Tier],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.layout = model.layout
        self._closed = False
        self.packer = packer = Packer(codecs, model.layout, model.fingerprint, model.windows)
        space = KeySpace(model.fingerprint, chunk_tokens(config), model.name)
        growing = bool(model.layout.layers)
        self.keys = keys = TokenKeys(space, growing=growing, needs_state=model.needs_state)
        claims = Claims()
        self._queue = queue = SaveQueue(config.save_queue_bytes, claims)
        self.ledger = ledger = Ledger(
            config,
            TokenRecords(keys, packer),
            packer,
            tiers,
            claims=claims,
            is_awaited=queue.is_waiting,
            clock=clock,
            monotonic=monotonic,
        )
        ledger.start()
        self._matcher = Matcher(ledger, keys, packer)
        self._restorer = Restorer(ledger, packer)
        encoder = Encoder(ledger, packer, keys, config.max_snapshots)
        self._saver = Saver(queue, encoder, packer, keys, ledger)
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
        lossy_state: int = 0,
    ) -> bool:
        """Save this session's KV. Any thread; returns at once.

        Args:
            run: views of the KV of ``token_ids``, from the first token on; all growing layers,
                the layout's dtype. They are read later, on store threads, so their memory must not
                change; they are released as soon as they are encoded.
            snapshots: states at positions within ``token_ids`` (models that need them only).
            on_done: called on a store thread with the session's new record, or with None if it
                could not be saved. If a newer save replaced this one, it is called with the newer
                one's record.
            lossy_tokens: ``Restored.lossy_tokens``, if any of the KV was restored. Chunks among
                these tokens that no tier has any more are kept as rows, not packed once more.
            lossy_state: ``Restored.lossy_state``, likewise: the part of the state that comes from
                these tokens is not packed again.

        Returns:
            False if the save was skipped, because too much is waiting or no tier can hold it;
            ``on_done`` is then not called.
        """
        tokens = as_tokens(token_ids)
        if len(run):
            tokens = tokens[: run[0][0].shape[1]]
        key = self.ledger.record_key(session)
        nbytes = self._unsaved_bytes(key, tokens) + sum(state_nbytes(x.state) for x in snapshots)
        listeners = [] if on_done is None else [on_done]
        job = SaveJob(
            key,
            session,
            tokens,
            run,
            tuple(snapshots),
            nbytes,
            listeners,
            lossy_tokens,
            lossy_state,
        )
        possible = len(tokens) > 0 and len(self.ledger.stack) > 0
        offered = self._queue.offer(job) if possible else Offered.REFUSED
        if offered is Offered.SUPERSEDED:
            self.ledger.counters.add("saves_superseded")
        if offered is Offered.REFUSED:
            self.ledger.counters.add("saves_skipped")
        return offered is not Offered.REFUSED

    def settled(self, session: SessionRef) -> bool:
        """True if no save of this session is waiting or running."""
        return self._queue.settled(self.ledger.record_key(session))

    # ---- return

    def match(
        self,
        session: SessionRef | None,
        salt: bytes,
        token_ids: Sequence[int] | Tokens,
        limit: int,
        boundaries: Sequence[int] = (),
    ) -> Match:
        """Find the longest prefix of at most ``limit`` tokens that can be restored.

        The session's own record is matched token by token; beyond it, full chunks are found by
        content (another session of the tenant had the same beginning). A model that needs state can
        only resume where a snapshot is: one of its record, or one that any session left at one of
        ``boundaries``.
        """
        if self._closed:
            return Match(0, None, "disabled")
        match = self._matcher.match(session, salt, token_ids, limit, boundaries)
        if match.reason is not None:
            self.ledger.counters.add(f"misses.{match.reason}")
        return match

    def prepare(self, session: SessionRef) -> Match:
        """Match everything that the session's record covers, for a restore ahead of the prompt."""
        record = self.record(session)
        if record is None:
            return Match(0, None, "disabled" if self._closed else self.ledger.company.why_unknown())
        return self._matcher.match(session, session.salt, record.tokens, record.num_tokens)

    def load(self, match: Match, deadline_s: float | None = None) -> Restored:
        """Read and decode the tokens of ``match``, or the good prefix of them. Blocks.

        Never raises for bad or missing blobs, or for tiers that are down. Blobs that came from a
        slower tier are put into the fastest one afterwards, in the background.
        """
        wait_s = self._config.restore_deadline_s if deadline_s is None else deadline_s
        try:
            restored, slow = self._restorer.load(match, wait_s)
            if restored.num_tokens:
                keys = [x.key for x in match.reads]
                used = self.ledger.promotion.used
                self.ledger.workers.later(used, match.record_key, keys, slow)
        except StoreClosed:
            return Restored(0, self.layout.empty(0), None, None, "disabled")
        self.ledger.counters.add("restores", int(restored.num_tokens > 0))
        self.ledger.counters.add("restored_tokens", restored.num_tokens)
        if restored.reason is not None:
            self.ledger.counters.add(f"misses.{restored.reason}")
        return restored

    # ---- between turns

    def record(self, session: SessionRef) -> SessionRecord | None:
        """The record of the session, if its blobs can be used by this engine."""
        return None if self._closed else self._matcher.usable_record(session)

    def records(self) -> list[SessionRecord]:
        """All known sessions of this model, in codecs known here, that a tier still has."""
        return [] if self._closed else self.ledger.resting_here()

    def tier_of(self, session: SessionRef | SessionRecord) -> TierName | None:
        """Return the slowest tier that a restore must read; None if even the beginning is gone."""
        record = session if isinstance(session, SessionRecord) else self.record(session)
        return None if record is None or self._closed else self.ledger.tier_of(record)

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier`` and drop faster copies. Blocks; returns its tier then.

        A pinned session, and one that ``tier`` cannot take as a whole, stays where it is.
        """
        if self._closed:
            return None
        self._queue.wait_settled(self.ledger.record_key(session), WAIT_S)
        return self.ledger.demote(session, tier)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Keep the session's blobs from eviction, or stop that. Blocks while a save of it runs.

        Has no effect on a session that was never saved. Raises ``PinLimit`` if pinned sessions
        would then take more than their share.
        """
        if not self._closed:
            self._queue.wait_settled(self.ledger.record_key(session), WAIT_S)
            self.ledger.pin(session, pinned)

    def is_pinned(self, session: SessionRef) -> bool:
        """True if its record is pinned by now. Asks memory only, so it does not wait."""
        record = self.ledger.index.get(self.ledger.record_key(session))
        return record is not None and record.pinned

    def forget(self, session: SessionRef) -> bool:
        """Remove the session from every tier; False if it was not known. Blocks.

        Afterwards no tier holds any of it except chunks that another session here uses. A tier
        that is down deletes it when it is back.
        """
        if self._closed:
            return False
        dropped = self._queue.drop(self.ledger.record_key(session))
        was_known = self.ledger.forget(session)
        for on_done in dropped.on_done if dropped else ():
            on_done(None)
        return was_known or dropped is not None

    def expire(self) -> None:
        """Forget sessions that were not used for ``ttl_s``; also runs periodically by itself."""
        self.ledger.expire()

    # ---- the store itself

    @property
    def codecs(self) -> CodecSet:
        """The codecs that the store uses now."""
        return self.packer.codecs

    def adopt(self, codecs: CodecSet, *, keep: bool = True) -> None:
        """Use these codecs from now on. Any thread; does not wait.

        Blobs stored unpacked are packed later: see ``pack_when``. ``keep``: codecs that could be
        read before still can be; otherwise their blobs are effectively lost. Warm new codecs first.
        Raises ``UnknownCodec``, with nothing changed: one of them cannot take this layout.
        """
        self.ledger.adopt(codecs, keep=keep)

    def pack_when(self, is_idle: Callable[[], bool], on_packed: OnPacked | None = None) -> None:
        """Pack unpacked blobs from now on when ``is_idle``: see ``Repacker.begin``. Call once."""
        self.ledger.repacker.begin(is_idle, on_packed)

    def listen(self, on_notice: OnNotice) -> None:
        """Call ``on_notice`` on a store thread when sessions expire, are evicted or are found.

        See ``kvstore.ledger.notices``. The call comes within a minute.
        """
        self.ledger.listen(on_notice)

    def resize_memory(self, ram_bytes: int) -> None:
        """Set another budget of packed bytes in memory, never below the configured one.

        Blobs that no longer fit are in slower tiers by then, if those take them in time.
        """
        ram_bytes = max(ram_bytes, self._config.ram_bytes)
        for tier in self.ledger.stack.tiers:
            if isinstance(tier, RamTier):
                if ram_bytes < tier.stats().nbytes:
                    self.ledger.flush(RESIZE_FLUSH_S)
                tier.resize(ram_bytes)

    def stats(self) -> StoreStats:
        """Return the current statistics."""
        return self.ledger.stats(self._queue.nbytes)

    def flush(self, deadline_s: float) -> bool:
        """Wait until every tier has its share of all saves; False if time ran out."""
        give_up_at = self.ledger.monotonic() + deadline_s
        if self._closed or not self._queue.wait_idle(deadline_s):
            return False
        return self.ledger.flush(give_up_at - self.ledger.monotonic())

    def close(self) -> None:
        """Flush for a bounded time, stop all threads, close the tiers. Safe to call twice."""
        if self._closed:
            return
        self.flush(CLOSE_FLUSH_S)
        self._closed = True
        dropped = self._queue.close()
        self._saver.join()
        self.ledger.close()
        for on_done in (x for job in dropped for x in job.on_done):
            on_done(None)

    def _unsaved_bytes(self, key: bytes, tokens: Tokens) -> int:
        record = self.ledger.index.get(key)
        known = common_prefix(record.tokens, tokens) if record else 0
        return (len(tokens) - known) * self.layout.bytes_per_token
