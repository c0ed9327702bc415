"""Keeps sessions hot between their turns, saves them, and drops them when room is needed.

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

from engines.mlx_worker import parking
from engines.mlx_worker.cold import Cold
from engines.mlx_worker.hot import Candidate, HotSession, HotSessions
from engines.mlx_worker.turn import Caches, SessionKey
from kvstore.records import SessionRef
from kvstore.snapshot import Snapshot

logger = logging.getLogger(__name__)

Cause: TypeAlias = Literal["saved", "dropped", "restored", "lost", "turn"]
# Told of every change of a session, on whatever thread it happens.
Tell: TypeAlias = Callable[[Cause, SessionRef], None]


def resolved(value: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(value)
    return future


class Keeper:
    """Belongs to the owner thread."""

    def __init__(
        self, hot: HotSessions, cold: Cold | None, tell: Tell, nudge: Callable[[], None]
    ) -> None:
        """``nudge`` wakes the owner thread: a save has ended, so something may be dropped now."""
        self.hot = hot
        self._cold = cold
        self._tell = tell
        self._nudge = nudge
        self._tried_twice: set[SessionKey] = set()
        self.counters: Counter[str] = Counter()

    def keep(
        self,
        session: SessionRef,
        tokens: np.ndarray,
        caches: Caches,
        snapshots: Sequence[Snapshot] = (),
        saved: Future[bool] | None = None,
        lossy_tokens: int = 0,
    ) -> HotSession:
        """The session is idle now. ``caches`` hold ``tokens`` and are given away.

        ``saved``: of a session that has not changed since it was saved; it is not saved again.
        ``lossy_tokens``: how many of the first ones may come from a lossy copy (``Restored``).

        Raises:
            Mismatch: ``caches`` hold another number of tokens.
        """
        parking.settle(caches)
        parking.check_length(caches, len(tokens))
        hot = HotSession(session, tokens, caches, parking.nbytes_of(caches))
        hot.lossy_tokens = min(lossy_tokens, len(tokens))
        hot.saved = saved or resolved(False)
        self.hot.put(hot)
        self._tried_twice.discard(hot.key)
        if saved is None:
            self._save(hot, snapshots)
        return hot

    def _save(self, hot: HotSession, snapshots: Sequence[Snapshot] = ()) -> None:
        """Never raises: a session that cannot be saved is one without a cold copy."""
        if self._cold is None:
            return

        def then(stored: bool) -> None:
            if stored:
                self._tell("saved", hot.session)
            self._nudge()

        try:
            self._cold.save(hot, snapshots, then)
        except Exception:  # mlx, the store: whatever it is, running requests must not feel it
            logger.exception("a session could not be saved")
            self.counters["keep_failures"] += 1

    def borrow(self, session: SessionRef, prompt: np.ndarray, limit: int) -> Candidate | None:
        """The hot session to start this prompt from; the session's own is taken out."""
        best = self.hot.best(session, prompt, limit)
        if best is not None and best.own:
            self.hot.take(best.hot.key)
        return best

    def drop(self, hot: HotSession) -> None:
        """Its memory is free when this returns, unless a save still reads it."""
        self.hot.take(hot.key)
        hot.caches.clear()
        mx.clear_cache()
        self._tried_twice.discard(hot.key)
        lost = hot.saved.done() and not hot.is_saved
        if lost and not self.hot.is_busy(hot.key):
            self.hot.pin(hot.key, False)  # nothing is left that could be kept
        self._tell("dropped" if hot.is_saved else "lost", hot.session)

    def forget(self, key: SessionKey) -> None:
        if (hot := self.hot.take(key)) is not None:
            hot.caches.clear()
            mx.clear_cache()
        self._tried_twice.discard(key)
        self.hot.pin(key, False)

    def make_room(self, nbytes: int, spare: SessionKey | None) -> bool:
        """Drop idle sessions worth ``nbytes``, or nothing. False: not now; ``nudge`` says when to
        try again."""
        chosen: list[HotSession] = []
        waiting = False
        for hot in self.hot.victims():
            if sum(x.nbytes for x in chosen) >= nbytes:
                break
            if hot.key == spare or (waiting and self.hot.is_pinned(hot.key)):
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

    def drop_all(self, spare: SessionKey | None, at_any_price: bool) -> bool:
        """Drop all idle sessions but ``spare``. False: some are still being saved.

        ``at_any_price``: those too; their memory comes back when the save is through.
        """
        for hot in self.hot.victims():
            if hot.key != spare and (at_any_price or self._may_go(hot)):
                self.drop(hot)
        return all(hot.key == spare for hot in self.hot.victims())

    def _may_go(self, hot: HotSession) -> bool:
        if not hot.saved.done():
            return False
        if hot.saved.result() or self._cold is None or hot.key in self._tried_twice:
            return True
        self._tried_twice.add(hot.key)
        self._save(hot)
        return False

    @property
    def is_saving(self) -> bool:
        """Some idle session is on its way into the store; its memory can go soon."""
        return any(not hot.saved.done() for hot in self.hot.all())

    def save_again(self, hot: HotSession) -> None:
        """Save it if it has no cold copy and none is on its way."""
        if hot.saved.done() and not hot.saved.result():
            self._save(hot)
