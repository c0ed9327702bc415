"""Keeps sessions hot between their turns, saves them, drops them for room, and restores cold ones.

Copy first, evict last: a session is dropped once the store has taken its KV. If the store refused
(its queue was full) it is asked once more, and then the session is dropped all the same: it is only
a cache, and running requests need the memory.

Looking for a prompt's KV and unpacking it happen on a few threads of this module's own, before the
prompt enters a batch, so running sequences never wait for a disk. The owner thread only turns the
finished arrays into caches. Any error on the way costs a prefill and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches
from engines.mlx_worker.sessions.hot_sessions import CacheRows, HotPrefix, HotSession, HotSessions
from engines.mlx_worker.sessions.restore_times import RestoreTimes
from kvstore.blobs.chain import Chain
from kvstore.blobs.state_tree import state_nbytes
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.ledger.record import SessionRecord
from kvstore.session import MissReason, SessionName, SessionRef, TierName
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Match, Restored
from kvstore.store.states import StateAt, TakenState

logger = logging.getLogger(__name__)

# Restores that may run at once; each holds a whole session's KV in flight.
NUM_RESTORES = 4

Cause: TypeAlias = Literal["saved", "dropped", "moved", "packed", "restored", "lost", "turn"]
# Called at every change of a session, on any thread.
Notify: TypeAlias = Callable[[Cause, SessionRef], None]


@dataclass(frozen=True)
class PrefixQuery:
    """A prompt at the start of its turn, for which the cold store may have KV."""

    session: SessionRef
    tokens: np.ndarray  # int32, (num_tokens,)
    limit: int  # at most so many tokens are of use
    held: int  # so many are there already
    prefill_s: Callable[[int], float]  # how long computing so many takes; 0 = not known yet
    chain: Chain = ()  # the names of its first chunks, if they are known


# Called with the restored part of a session, None = nothing, and the chain of its chunks.
OnLoaded: TypeAlias = Callable[[Restored | None, Chain], None]


@dataclass(frozen=True)
class ColdPrefix:
    """The cold store's answer; ``restored`` is None for a miss."""

    restored: Restored | None
    reason: MissReason | None
    seconds: float = 0.0  # that the restore took
    chain: Chain = ()  # of the prompt

    @property
    def num_tokens(self) -> int:
        return self.restored.num_tokens if self.restored else 0

    @property
    def tier(self) -> TierName | None:
        return self.restored.tier if self.restored else None


class ColdSessions:
    """Saves hot sessions into the store and brings cold ones back.

    ``save`` and ``rebuild`` are the owner thread's; ``find`` and ``load`` return at once and call
    back on a thread of the pool.
    """

    def __init__(self, store: ColdStore, model: Any, plan: CachePlan) -> None:
        self.store = store
        self._model = model
        self._plan = plan
        self._pool = ThreadPoolExecutor(NUM_RESTORES, "mlx-restore")
        self.times = RestoreTimes()
        self.counters: Counter[str] = Counter()  # the owner thread's

    def find(self, query: PrefixQuery, then: Callable[[ColdPrefix], None]) -> None:
        """Look for a prompt's longest prefix and unpack it, then call ``then``."""
        self._pool.submit(self._find, query, then)

    def load(self, session: SessionRef, then: OnLoaded) -> None:
        """Unpack everything that is kept of a session, then call ``then`` with it and its chain."""
        self._pool.submit(self._load_session, session, then)

    def chain(self, ref: SessionRef, tokens: np.ndarray, before: Chain = ()) -> list[bytes]:
        """Name the full chunks of these tokens, int32 (num_tokens,), of a session's tenant.

        ``before``: the names of the first ones, if they are known.
        """
        return self.store.maker.of_tokens(ref.salt, tokens, before)

    def save(
        self, hot: HotSession, states: Sequence[StateAt], then: Callable[[bool], None]
    ) -> None:
        """Start copying the session into the store; resolves ``hot.saved``, then calls ``then``.

        Raises all that mlx or the store raise; ``hot.saved`` is then as it was.
        """
        saved: Future[bool] = Future()

        def done(record: SessionRecord | None) -> None:
            saved.set_result(record is not None)
            then(record is not None)

        size, model = self.store.chunk_tokens, self.store.model
        if len(hot.tokens):
            known = hot.chain[: hot.num_tokens // size]
            hot.chain = self.chain(hot.ref, hot.tokens, known)
        chain = hot.chain
        end = len(chain) * size
        if not self._plan.needs_state:
            states = ()
        elif hot.num_tokens == end:
            states = [*states, StateAt(end, kv_arrays.state_tree(hot.caches))]
        fitting = {x.position: x for x in states if not x.position % size and x.position <= end}
        taken = [TakenState(x, model.windows, model.window_tokens) for x in fitting.values()]
        # Rows of a packed cache are the codec's own bytes: to save them packs nothing again.
        packed = isinstance(self._plan.layout, PackedLayout)
        restored_tokens = 0 if packed else hot.restored_tokens
        run = kv_arrays.growing_run(hot.caches, end)
        if not self.store.save(
            hot.ref,
            chain,
            CacheRows(self.store, run, taken, restored_tokens),
            states=sorted(x // size for x in fitting),
            state_bytes=sum(state_nbytes(x.tree) for x in fitting.values()),
            on_done=done,
        ):
            saved.set_result(False)
        # Last: what raises above leaves no promise that would not be kept.
        hot.saved = saved

    def rebuild(self, restored: Restored) -> Caches:
        """Make caches of the KV that the store has restored.

        Raises ``Mismatch`` for KV of another model, or an error of mlx.
        """
        return kv_arrays.rebuild(
            self._model, self._plan.layout, restored.run, restored.state, restored.num_tokens
        )

    def close(self) -> None:
        """End the threads; look-ups that have not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    # ---- threads of the pool

    def _find(self, query: PrefixQuery, then: Callable[[ColdPrefix], None]) -> None:
        try:
            found = self._look_up(query)
        except Exception:  # the edge of this thread: a store that fails is a store without KV
            logger.exception("the cold store could not be read")
            found = ColdPrefix(None, "unavailable")
        then(found)

    def _load_session(self, session: SessionRef, then: OnLoaded) -> None:
        restored: Restored | None = None
        chain: Chain = ()
        try:
            match, chain = self.store.prepare(session)
            restored = self._restore(match).restored
        except Exception:  # as in _find
            logger.exception("the cold store could not be read")
        then(restored, chain)

    def _look_up(self, query: PrefixQuery) -> ColdPrefix:
        chain = self.chain(query.session, query.tokens[: query.limit], query.chain)
        if not chain:  # of less than a chunk there is nothing to match
            known = self.store.record(query.session) is not None
            why = "diverged" if known else self.store.ledger.why_unknown(query.session)
            return ColdPrefix(None, why)
        match = self.store.match(query.session, chain)
        more = match.num_tokens - query.held
        computing_s = query.prefill_s(more) if query.held and more > 0 else 0.0
        if not self.times.is_worth(match.num_tokens, computing_s):
            return ColdPrefix(None, "computed-sooner", chain=chain)
        return replace(self._restore(match, query.held), chain=chain)

    def _restore(self, match: Match, held: int = 0) -> ColdPrefix:
        """Restore a match if it has more tokens than are held."""
        if match.num_tokens <= held:
            return ColdPrefix(None, match.reason)
        began = time.perf_counter()
        restored = self.store.restore(match)
        reason, seconds = restored.reason or match.reason, time.perf_counter() - began
        return ColdPrefix(restored if restored.num_tokens > held else None, reason, seconds)


def resolved(value: bool) -> Future[bool]:
    """A future that has its result already."""
    future: Future[bool] = Future()
    future.set_result(value)
    return future


class HotCache:
    """Keeps, saves and drops the hot sessions. Belongs to the owner thread."""

    def __init__(
        self,
        sessions: HotSessions,
        cold: ColdSessions | None,
        notify: Notify,
        nudge: Callable[[], None],
    ) -> None:
        """``nudge`` wakes the owner thread: a save has ended, so something may be dropped now."""
        self.sessions = sessions
        self._cold = cold
        self._notify = notify
        self._nudge = nudge
        self._saved_again: set[SessionName] = set()  # the store refused these once
        self.counters: Counter[str] = Counter()

    @property
    def remembered(self) -> set[SessionName]:
        """Every session that anything is kept of here: KV, a running turn, a pin, a refusal."""
        return self.sessions.known | self._saved_again

    def keep(
        self,
        hot: HotSession,
        states: Sequence[StateAt] = (),
        saved: Future[bool] | None = None,
    ) -> None:
        """Make a session idle, and save it.

        Args:
            states: those taken in its turn.
            saved: of a session that has not changed since it was saved; it is not saved again.

        Raises:
            Mismatch: its caches hold another number of tokens.
        """
        kv_arrays.compact(hot.caches)
        kv_arrays.check_length(hot.caches, hot.num_tokens)
        hot.nbytes = kv_arrays.nbytes_of(hot.caches)
        hot.saved = saved or resolved(False)
        self.sessions.put(hot)
        self._saved_again.discard(hot.key)
        if saved is None:
            self._save(hot, states)

    def _save(self, hot: HotSession, states: Sequence[StateAt] = ()) -> None:
        """Start a save. Never raises: a session that cannot be saved is one without a cold copy."""
        if self._cold is None:
            return

        def then(stored: bool) -> None:
            if stored:
                self._notify("saved", hot.ref)
            self._nudge()

        try:
            self._cold.save(hot, states, then)
        except Exception:  # of mlx or the store: running requests must not feel it
            logger.exception("a session could not be saved")
            self.counters["keep_failures"] += 1

    def take_prefix(self, ref: SessionRef, prompt: np.ndarray, limit: int) -> HotPrefix | None:
        """Choose the hot session to start a prompt from; the prompt's own session is taken out.

        Args:
            prompt: int32 token ids, (num_tokens,).
            limit: at most so many tokens are of use.
        """
        chain_of = self._cold.chain if self._cold is not None else None
        best = self.sessions.best_prefix(ref, prompt, limit, chain_of)
        if best is not None and best.own:
            self.sessions.take(best.session.key)
        return best

    def note_restored(self, ref: SessionRef) -> None:
        """Take over a restored session's pin, and report it."""
        # Pinned perhaps by an engine before this one. As of now: it may have been unpinned since.
        if self._cold is not None and self._cold.store.is_pinned(ref):
            self.sessions.pin(ref.name, True)
        self._notify("restored", ref)

    def drop(self, hot: HotSession) -> None:
        """Give up a hot session; its memory is free on return, unless a save still reads it."""
        self.sessions.take(hot.key)
        hot.caches.clear()
        mx.clear_cache()
        self._saved_again.discard(hot.key)
        lost = hot.saved.done() and not hot.is_saved
        if lost and not self.sessions.is_busy(hot.key):
            self.sessions.pin(hot.key, False)  # nothing is left that could be kept
        self._notify("dropped" if hot.is_saved else "lost", hot.ref)

    def forget(self, key: SessionName) -> None:
        """Drop a session that was deleted, with its pin, without a report."""
        if (hot := self.sessions.take(key)) is not None:
            hot.caches.clear()
            mx.clear_cache()
        self._saved_again.discard(key)
        self.sessions.pin(key, False)

    def make_room(self, nbytes: int, spare: SessionName | None) -> bool:
        """Free at least ``nbytes`` by dropping idle sessions, or drop none and return False.

        False: not now; ``nudge`` says when to try again.
        """
        chosen: list[HotSession] = []
        waiting = False
        for hot in self.sessions.victims():
            if sum(x.nbytes for x in chosen) >= nbytes:
                break
            if hot.key == spare or (waiting and self.sessions.is_pinned(hot.key)):
                continue
            if self._may_go(hot):
                chosen.append(hot)
            else:
                waiting = True
        if sum(x.nbytes for x in chosen) < nbytes:
            return False
        for hot in chosen:
            self.drop(hot)
        return True

    def drop_all(self, spare: SessionName | None, at_any_price: bool) -> bool:
        """Drop all idle sessions but ``spare``. False: some are still being saved.

        ``at_any_price``: those too; their memory comes back when the save is through.
        """
        for hot in self.sessions.victims():
            if hot.key != spare and (at_any_price or self._may_go(hot)):
                self.drop(hot)
        return all(hot.key == spare for hot in self.sessions.victims())

    def _may_go(self, hot: HotSession) -> bool:
        if not hot.saved.done():
            return False
        if hot.saved.result() or self._cold is None or hot.key in self._saved_again:
            return True
        self._saved_again.add(hot.key)
        self._save(hot)
        return False

    @property
    def is_saving(self) -> bool:
        """True if an idle session is on its way into the store; its memory can go soon."""
        return any(not hot.saved.done() for hot in self.sessions.all())

    def save_again(self, hot: HotSession) -> None:
        """Save it if it has no cold copy and none is on its way."""
        if hot.saved.done() and not hot.saved.result():
            self._save(hot)
