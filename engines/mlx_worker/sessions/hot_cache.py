"""Keeps sessions hot between their turns, has them saved, and drops them for room.

Copy first, evict last: a session is dropped once the store has taken its KV. If the store refused
(its queue was full) it is asked once more, and then the session is dropped all the same: it is only
a cache, and running requests need the memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, TypeAlias

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.sessions.cold_sessions import ColdSessions
from engines.mlx_worker.sessions.hot_sessions import HotPrefix, HotSession, HotSessions
from kvstore.session import SessionName, SessionRef
from kvstore.store.states import StateAt

logger = logging.getLogger(__name__)

Cause: TypeAlias = Literal["saved", "dropped", "moved", "restored", "lost", "turn"]
# Called at every change of a session, on any thread.
Notify: TypeAlias = Callable[[Cause, SessionRef], None]


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
        self.counters: Counter[str] = Counter()

    def keep(
        self,
        hot: HotSession,
        states: Sequence[StateAt] = (),
        saved: Future[bool] | None = None,
    ) -> None:
        """Make a session idle, and save it. Never raises: its KV can be computed again.

        Args:
            states: those taken in its turn.
            saved: of a session that has not changed since it was saved; it is not saved again.
        """
        try:
            kv_arrays.compact(hot.caches)
            kv_arrays.check_length(hot.caches, hot.num_tokens)
            hot.nbytes = kv_arrays.nbytes_of(hot.caches)
        except Exception:  # of mlx, or a defect: running requests must not feel it
            logger.exception("the KV of a turn could not be kept")
            self.counters["keep_failures"] += 1
            return
        hot.saved = saved or resolved(False)
        self.sessions.put(hot)
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
        lost = hot.saved.done() and not hot.is_saved
        if lost and not self.sessions.is_busy(hot.key):
            self.sessions.pin(hot.key, False)  # nothing is left that could be kept
        self._notify("dropped" if hot.is_saved else "lost", hot.ref)

    def forget(self, key: SessionName) -> None:
        """Drop a session that was deleted, with its pin, without a report."""
        if (hot := self.sessions.take(key)) is not None:
            hot.caches.clear()
            mx.clear_cache()
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
        if hot.saved.result() or self._cold is None or hot.was_refused:
            return True
        hot.was_refused = True
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
