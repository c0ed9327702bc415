"""The store of an engine that keeps a session's KV as arrays of tokens (mlx): it packs by itself.

The parts, in the order in which a session meets them: ``save_queue`` and ``saver`` (turn
end), then ``planner`` and ``restorer`` (on return).
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
from kvstore.ledger.index import Claims
from kvstore.ledger.ledger import Ledger
from kvstore.session import UNKNOWN_REASONS, SessionRef, TierName
from kvstore.shapes import KVRun, StoredModel
from kvstore.stats import StoreStats
from kvstore.store.encoder import Encoder
from kvstore.store.planner import Planner
from kvstore.store.records import SessionRecord
from kvstore.store.restorer import Match as Match
from kvstore.store.restorer import Restored as Restored
from kvstore.store.restorer import Restorer
from kvstore.store.save_queue import Offered, OnDone, SaveJob, SaveQueue
from kvstore.store.saver import Saver
from kvstore.store.store import Store
from kvstore.store.token_keys import TokenKeys, TokenPrompt, TokenRecords
from kvstore.tiers.base import Tier

WAIT_S: Final = 30.0  # for saves of the session that wait or run


class ColdStore(Store[SessionRecord]):
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
        packer = Packer(codecs, model.layout, model.fingerprint, model.windows)
        space = KeySpace(model.fingerprint, chunk_tokens(config), model.name)
        growing = bool(model.layout.layers)
        self.keys = keys = TokenKeys(space, growing=growing, needs_state=model.needs_state)
        claims = Claims()
        self._queue = queue = SaveQueue(config.save_queue_bytes, claims)
        ledger = Ledger(
            config,
            TokenRecords(keys, packer),
            packer,
            tiers,
            claims=claims,
            is_awaited=queue.is_waiting,
            clock=clock,
            monotonic=monotonic,
        )
        super().__init__(ledger, packer)
        size, needs_state = space.chunk_tokens, model.needs_state
        self._planner = Planner(ledger, packer, size, growing=growing, needs_state=needs_state)
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
            self.counters.add("saves_superseded")
        if offered is Offered.REFUSED:
            self.counters.add("saves_skipped")
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
        match = self._match(session, salt, as_tokens(token_ids)[: max(limit, 0)], boundaries)
        if match.reason is not None:
            self.counters.add(f"misses.{match.reason}")
        return match

    def prepare(self, session: SessionRef) -> Match:
        """Match everything that the session's record covers, for a restore ahead of the prompt."""
        record = self.record(session)
        if record is None:
            return Match(0, None, "disabled" if self._closed else self.ledger.company.why_unknown())
        return self._match(session, session.salt, record.tokens, ())

    def _match(
        self, session: SessionRef | None, salt: bytes, tokens: Tokens, boundaries: Sequence[int]
    ) -> Match:
        prompt = TokenPrompt(self.keys, self.keys.space.root(salt), tokens, boundaries)
        reads, end, reason, record, _ = self._planner.plan(session, prompt)
        tier = self.ledger.stack.name(max(x.level for x in reads)) if reads else None
        if reads and record is None and reason in UNKNOWN_REASONS:
            reason = None  # a new session found more than it could expect
        key = self.ledger.index.key(record) if record else None
        return Match(end, tier, reason, tuple(reads), key, tokens[:end])

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
        self.counters.add("restores", int(restored.num_tokens > 0))
        self.counters.add("restored_tokens", restored.num_tokens)
        if restored.reason is not None:
            self.counters.add(f"misses.{restored.reason}")
        return restored

    # ---- between turns

    def record(self, session: SessionRef) -> SessionRecord | None:
        """The record of the session, if its blobs can be used by this engine.

        The store's own notices name sessions without a salt; such a session is found by name alone.
        """
        index = self.ledger.index
        record = None if self._closed else index.find_anywhere(session.tenant, session.id)
        if record is None or index.is_over(record) or not self.packer.reads_any(record.codecs):
            return None
        is_theirs = session.salt and record.root != self.keys.space.root(session.salt)
        return None if is_theirs else record

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        self._queue.wait_settled(self.ledger.record_key(session), WAIT_S)
        return super().demote(session, tier)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        self._queue.wait_settled(self.ledger.record_key(session), WAIT_S)
        super().pin(session, pinned)

    def is_pinned(self, session: SessionRef) -> bool:
        """True if its record is pinned by now. Asks memory only, so it does not wait."""
        record = self.ledger.index.get(self.ledger.record_key(session))
        return record is not None and record.pinned

    def forget(self, session: SessionRef) -> bool:
        dropped = self._queue.drop(self.ledger.record_key(session))
        was_known = super().forget(session)
        for on_done in dropped.on_done if dropped else ():
            on_done(None)
        return was_known or dropped is not None

    # ---- the store itself

    def stats(self) -> StoreStats:
        """Return the current statistics."""
        return self.ledger.stats(self._queue.nbytes)

    def flush(self, deadline_s: float) -> bool:
        give_up_at = self.ledger.monotonic() + deadline_s
        if self._closed or not self._queue.wait_idle(deadline_s):
            return False
        return super().flush(give_up_at - self.ledger.monotonic())

    def _end_saves(self) -> None:
        dropped = self._queue.close()
        self._saver.join()
        for on_done in (x for job in dropped for x in job.on_done):
            on_done(None)

    def _unsaved_bytes(self, key: bytes, tokens: Tokens) -> int:
        record = self.ledger.index.get(key)
        known = common_prefix(record.tokens, tokens) if record else 0
        return (len(tokens) - known) * self.layout.bytes_per_token
