"""The cold store of one engine: sessions as chains of full chunks, between their turns.

A cold session is only a cache. A save may be skipped, a tier may lose a blob or be down, a blob may
be damaged: each costs a recompute of the tokens concerned and nothing else. A restore verifies
every blob against the requested name, the model and the codec before it returns it. A name covers
all tokens up to the chunk's end, and the tenant's salt.

The tokens after the last full chunk are never stored: on return they are computed together with
the new message. The ledger (``kvstore.ledger``) keeps track of which sessions exist and where they
are stored, and decides which are evicted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstore.blobs.chain import Chain, ChainKeys, ChainMaker, Piece
from kvstore.blobs.packer import Packer, StoreCodecs
from kvstore.codecs.base import Codec
from kvstore.config import StoreConfig
from kvstore.ledger.index import Claims
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.notices import OnNotice
from kvstore.ledger.record import Records, SessionRecord
from kvstore.session import CHUNK_TOKENS, UNKNOWN_REASONS, SessionRef, TenantLimits, TierName
from kvstore.shapes import KVRun, StoredModel
from kvstore.stats import Counters, StoreStats
from kvstore.store.planner import Planner
from kvstore.store.restorer import Fetched, Match, Restored, Restorer
from kvstore.store.save_queue import Offered, OnDone, RowSource, SaveJob, SaveQueue
from kvstore.store.saver import Saver
from kvstore.tiers.base import Tier
from kvstore.workers import Workers

WAIT_S: Final = 30.0  # the longest wait for the waiting and running saves of a session
CLOSE_FLUSH_S: Final = 10.0
DISCARD_S: Final = 2.0  # the longest wait for running promotions before a bad blob is deleted


class ColdStore:
    """Saves, finds, restores, moves and deletes the sessions of one engine. Thread-safe.

    Args:
        codecs: the codec of rows, or all codecs that are written and read.
        tiers: fastest first; the store owns and closes them.
        chunk_tokens: tokens per chunk; see ``chunk_of_blocks`` for an engine with its own blocks.
        clock: wall-clock seconds, for stored times.
        monotonic: seconds that never jump, for deadlines.

    Raises:
        UnknownCodec: a codec does not support the model's layout.
    """

    def __init__(
        self,
        config: StoreConfig,
        model: StoredModel,
        codecs: Codec | StoreCodecs,
        tiers: Sequence[Tier],
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.model = model
        self.packer = packer = Packer(codecs, model)
        self.maker = ChainMaker(model.fingerprint, chunk_tokens)
        growing, window_tokens = bool(model.layout.layers), model.window_tokens
        self.keys = keys = ChainKeys(chunk_tokens, growing=growing, window_tokens=window_tokens)
        claims = Claims()
        self._queue = queue = SaveQueue(config.save_queue_bytes, claims)
        self.ledger = ledger = Ledger(
            config,
            Records(model.name, packer, keys),
            packer,
            tiers,
            claims=claims,
            is_awaited=queue.is_waiting,
            clock=clock,
            monotonic=monotonic,
        )
        self._planner = Planner(ledger, keys, needs_state=model.needs_state)
        self._restorer = Restorer(ledger, packer, keys, config.restore_deadline_s)
        self._saver = Saver(queue, ledger, packer, keys, needs_state=model.needs_state)
        self._closed = False
        self._saver.start()

    @property
    def chunk_tokens(self) -> int:
        return self.keys.chunk_tokens

    @property
    def workers(self) -> Workers:
        """The store's threads, for engines that pack and unpack its blobs."""
        return self.ledger.workers

    @property
    def counters(self) -> Counters:
        """The counters that ``stats`` reports."""
        return self.ledger.counters

    # ---- turn end

    def save(
        self,
        session: SessionRef,
        chain: Chain,
        source: RowSource,
        *,
        states: Sequence[int] = (),
        state_bytes: int = 0,
        note: bytes = b"",
        on_done: OnDone | None = None,
        always: bool = False,
    ) -> bool:
        """Queue a save of a session's KV. Any thread; returns at once.

        Args:
            chain: the names of all full chunks of the session, from the first one on.
            source: packs their rows. Its memory must not change until it is released.
            states: the numbers of chunks after which the source has a state, ascending.
            state_bytes: hot bytes of these states.
            note: bytes that only the engine reads, the same number for each chunk; kept with the
                record.
            on_done: called on a store thread with the session's new record, or with None if it
                could not be saved. If a newer save replaced this one, it is called with the newer
                one's record.
            always: queue it even if the queue is full.

        Returns:
            False if the save was skipped, because the queue is full, there is no tier, the chain is
            empty or the store is closed. The source is then released and ``on_done`` not called.
        """
        key = self.ledger.index.key_of(session)
        nbytes = self._unsaved_bytes(chain) + state_bytes
        listeners = [] if on_done is None else [on_done]
        job = SaveJob(key, session, chain, source, nbytes, states, note, listeners)
        offered = Offered.REFUSED
        if not chain:
            self.ledger.index.note(key, "too-short")
        elif len(self.ledger.stack):
            offered = self._queue.offer(job, always=always)
        if offered is Offered.SUPERSEDED:
            self.counters.add("saves_superseded")
        if offered is Offered.REFUSED:
            source.release()
            self.counters.add("saves_skipped", int(bool(chain)))
        return offered is not Offered.REFUSED

    def _unsaved_bytes(self, chain: Chain) -> int:
        """Return the hot bytes of the chunks that no known session has, without asking a tier."""
        if not self.keys.growing:
            return 0

        def is_new(number: int) -> bool:
            key = self.keys.chunks(chain, number, number + 1)[0].key
            return bool(self.ledger.index.unused([key]))

        # A session that has a chunk also has all chunks before it.
        known = bisect_left(range(len(chain)), True, key=is_new)
        return (len(chain) - known) * self.chunk_tokens * self.model.layout.bytes_per_token

    def wait_saved(self, session: SessionRef, within_s: float = WAIT_S) -> bool:
        """Wait until all saves of this session are done; return False if time runs out."""
        return self._queue.wait_settled(self.ledger.index.key_of(session), within_s)

    def wait_all_saved(self, within_s: float = WAIT_S) -> bool:
        """Wait until all saves are done and each ``on_done`` was called; False if time runs out."""
        return self._queue.wait_idle(within_s)

    @property
    def is_saved(self) -> bool:
        """True if all saves are done and each ``on_done`` was called."""
        return self._queue.wait_idle(0.0)

    # ---- return

    def match(self, session: SessionRef | None, chain: Chain, first: int = 0) -> Match:
        """Find the longest beginning of a prompt that can be restored.

        Args:
            session: the prompt's session, for the reason of a miss; None if it is not known.
            chain: the names of the prompt's full chunks, from the first one on.
            first: the number of the first chunk to restore; the engine has those before it.
        """
        if self._closed:
            return Match(first, 0, None, "disabled")
        match = self._match(session, chain, first)
        if match.reason is not None:
            self.counters.add(f"misses.{match.reason}")
        return match

    def prepare(self, session: SessionRef) -> tuple[Match, Chain]:
        """Match the whole chain of a session's record, for a restore before its prompt arrives.

        Returns:
            The match and the chain; the chain is empty if there is no usable record.
        """
        record = self.record(session)
        if record is None:
            reason = "disabled" if self._closed else self.ledger.why_unknown(session)
            return Match(0, 0, None, reason), ()
        return self._match(session, record.names, 0), record.names

    def _match(self, session: SessionRef | None, chain: Chain, first: int) -> Match:
        plan = self._planner.plan(session, chain, first)
        reads, reason = plan.reads, plan.reason
        tier = self.ledger.stack.name(max(x.level for x in reads)) if reads else None
        if reads and plan.record is None and reason in UNKNOWN_REASONS:
            reason = None  # the session is new, so nothing of its own is missing
        key = self.ledger.index.key(plan.record) if plan.record else None
        count = plan.num_chunks if reads else 0
        return Match(count, count * self.chunk_tokens, tier, reason, tuple(reads), key)

    def restore(
        self, match: Match, deadline_s: float | None = None, out: KVRun | None = None
    ) -> Restored:
        """Read and unpack what ``match`` found; see ``Restorer.restore``. Blocks."""
        return self._restorer.restore(match, deadline_s, out)

    def fetch(self, match: Match, deadline_s: float | None = None) -> Fetched:
        """Read and verify what ``match`` found; see ``Restorer.fetch``. Blocks."""
        return self._restorer.fetch(match, deadline_s)

    def discard(self, key: bytes) -> None:
        """Delete a blob that could not be unpacked from every tier, and count it as corrupt."""
        self.counters.add("corrupt")
        self.workers.quiet(DISCARD_S)  # a running promotion could write it again
        for level in range(len(self.ledger.stack)):
            self.ledger.stack.delete(level, [key])

    def warm(self, session: SessionRef) -> None:
        """Copy the whole session into the fastest tier. Blocks."""
        match, _ = self.prepare(session)
        if match.reads:
            self.fetch(match)
            self.workers.quiet(self._config.restore_deadline_s)

    # ---- between turns

    def record(self, session: SessionRef) -> SessionRecord | None:
        """Return the session's record from memory or any tier; None if it is not usable here."""
        record = None if self._closed else self.ledger.index.find_anywhere(session)
        if record is None or not self.ledger.records.is_usable(record):
            return None
        return None if self.ledger.index.is_over(record) else record

    def records(self) -> list[SessionRecord]:
        """Return the records of all known sessions of this model that a tier still has.

        A session that only a shared tier has is not known before it returns.
        """
        return [] if self._closed else self.ledger.resting_here()

    def tier_of(self, session: SessionRef | SessionRecord) -> TierName | None:
        """Return the slowest tier that a restore must read; None if even the beginning is gone."""
        record = self.record(session) if isinstance(session, SessionRef) else session
        return None if record is None or self._closed else self.ledger.tier_of(record)

    def pieces_of(self, session: SessionRef) -> tuple[SessionRecord, list[Piece]] | None:
        """Return the session's record and its list of blobs from memory; None if not known."""
        record = self.ledger.index.get(self.ledger.index.key_of(session))
        if record is None or not self.ledger.records.is_usable(record):
            return None
        return record, self.ledger.records.pieces(record)

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Move the session to ``tier``: copy it there, then drop its copies in faster tiers.

        Blocks. A pinned session, and one that ``tier`` cannot take completely, stays where it is.

        Returns:
            The tier of the session afterwards, see ``tier_of``; None if the session is not known.
        """
        self.wait_saved(session)
        return None if self._closed else self.ledger.demote(session, tier)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Pin the session, so that its blobs are evicted last, or unpin it.

        Blocks while a save of it waits or runs. Has no effect on a session that was never saved.
        """
        self.wait_saved(session)
        if not self._closed:
            self.ledger.pin(session, pinned)

    def is_pinned(self, session: SessionRef) -> bool:
        """Return whether the session's record in memory is pinned. Does not wait for a tier."""
        record = self.ledger.index.get(self.ledger.index.key_of(session))
        return record is not None and record.pinned

    def forget(self, session: SessionRef) -> bool:
        """Delete the session from every tier; return whether it was known. Blocks.

        Afterwards no tier holds any of its blobs, except those that another session here uses. In a
        tier that is down they are deleted once it answers.
        """
        dropped = self._queue.drop(self.ledger.index.key_of(session))
        was_known = not self._closed and self.ledger.forget(session)
        if dropped is not None:
            dropped.call_listeners(None)
        return was_known or dropped is not None

    def expire(self) -> None:
        """Forget sessions that were not used for ``ttl_s``. The store also does so at intervals."""
        self.ledger.expire()

    def listen(self, on_notice: OnNotice) -> None:
        """Call ``on_notice`` on a store thread when sessions expire, are evicted or packed again.

        See ``kvstore.ledger.notices``. The call comes within a minute.
        """
        self.ledger.notices.listen(on_notice)

    def limit_tenants(
        self, limits: Mapping[TierName, TenantLimits]
    ) -> dict[TierName, dict[str, int]]:
        """Limit the bytes of tenants in each tier from now on. Blocks.

        A tier that is not named has no limits. Returns as ``TierStack.limit_tenants``.
        """
        return {} if self._closed else self.ledger.stack.limit_tenants(limits)

    # ---- codecs

    @property
    def codecs(self) -> StoreCodecs:
        """The codecs that the store uses now."""
        return self.packer.codecs

    def adopt(self, codecs: StoreCodecs, *, keep: bool = True) -> None:
        """Use these codecs from now on. Any thread; does not wait.

        Blobs that were stored exactly are packed later: see ``pack_when``. Compile the kernels of
        new codecs first.

        Args:
            keep: also keep reading with the former codecs; otherwise their blobs are unusable.

        Raises:
            UnknownCodec: a codec does not support the layout; nothing is changed.
        """
        self.ledger.adopt(codecs, keep=keep)

    def pack_when(self, is_idle: Callable[[], bool]) -> None:
        """Pack exact blobs from now on whenever ``is_idle`` returns True. Call once.

        See ``Repacker.begin``.
        """
        self.ledger.repacker.begin(is_idle)

    # ---- the store itself

    def stats(self) -> StoreStats:
        """Return the current statistics."""
        return self.ledger.stats(self._queue.nbytes)

    def flush(self, deadline_s: float) -> bool:
        """Wait until every tier has all saves so far; return False if time ran out."""
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
        for job in dropped:
            job.call_listeners(None)
        self.ledger.close()
