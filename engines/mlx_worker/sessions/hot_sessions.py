"""Idle sessions whose KV is still in the engine's memory: kept, saved, and dropped for room.

A session is here between its turns. A turn takes the session out and puts it back at its end.
Making room drops the least recently used sessions first, pinned ones last, and those that are being
saved only if no others are left, since the save holds their memory until it ends.

Only the owner thread changes sessions, except for their pins. Other threads read them for reports,
so each method uses single operations on a dict, a list or a set, which are atomic in Python.

Copy first, evict last: a session is dropped once the store has taken its KV. If the store refuses
(its queue is full), it is asked once more, and then the session is dropped in any case: it is only
a cache, and running requests need the memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.sessions.cold_sessions import ColdSessions, HotSession
from kvstore.blobs.chain import Chain, num_common
from kvstore.session import CHUNK_TOKENS, SessionName, SessionRef
from kvstore.store.states import StateAt

logger = logging.getLogger(__name__)

# A shared prefix shorter than this is computed faster than it is copied.
SHORTEST_SHARED = 32


Cause: TypeAlias = Literal["saved", "dropped", "moved", "restored", "lost", "turn"]
# Called at every change of a session, on any thread.
Notify: TypeAlias = Callable[[Cause, SessionRef], None]
ChainOf: TypeAlias = Callable[[SessionRef, np.ndarray], Chain]


@dataclass(frozen=True)
class HotPrefix:
    """A hot session that shares a prefix with a prompt."""

    session: HotSession
    num_tokens: int  # number of its first tokens that the prompt can use
    own: bool  # it is the prompt's own session, so its caches may be written to

    @property
    def diverged(self) -> bool:
        """True if it is the prompt's own session, but continues differently from the prompt."""
        return self.own and self.num_tokens < self.session.num_tokens

    def pop_caches(self) -> Caches:
        """Return caches with the first ``num_tokens`` tokens, which the caller may write to."""
        caches = self.session.caches if self.own else kv_arrays.copy_of(self.session.caches)
        kv_arrays.trim(caches, self.session.num_tokens - self.num_tokens)
        return caches


class HotSessions:
    """The table of hot sessions, of running turns and of pins; reading it is thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[SessionName, HotSession] = {}
        self._pinned: set[SessionName] = set()
        self._turns: dict[SessionName, list[int]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of KV that all idle sessions hold."""
        return sum(x.nbytes for x in self.all())

    @property
    def known(self) -> set[SessionName]:
        """Every session that is hot, busy or pinned."""
        return {*self._sessions, *self._turns, *self._pinned}

    def all(self) -> list[HotSession]:
        return list(self._sessions.values())

    def get(self, key: SessionName) -> HotSession | None:
        return self._sessions.get(key)

    def idle_s(self, hot: HotSession) -> float:
        """Return the seconds since the end of the session's last turn."""
        return max(0.0, self._clock() - hot.last_used_s)

    def put(self, hot: HotSession) -> None:
        """Add a session as the most recently used; it replaces an earlier one with its key."""
        hot.last_used_s = self._clock()
        self._sessions[hot.key] = hot

    def take(self, key: SessionName) -> HotSession | None:
        """Remove and return a session; None if it is not hot."""
        return self._sessions.pop(key, None)

    # ---- sessions that are being served

    def begin_turn(self, key: SessionName, num_tokens: int) -> None:
        """Record that a turn has begun whose prompt has ``num_tokens`` tokens."""
        self._turns.setdefault(key, []).append(num_tokens)

    def end_turn(self, key: SessionName, num_tokens: int) -> None:
        """Record that a turn has ended; ``num_tokens`` as at its ``begin_turn``."""
        self._turns[key].remove(num_tokens)
        if not self._turns[key]:
            del self._turns[key]

    def busy_tokens(self, key: SessionName) -> int:
        """Return the tokens of the longest prompt being served; 0 = the session is not busy."""
        return max(self._turns.get(key, ()), default=0)

    def is_busy(self, key: SessionName) -> bool:
        """Return whether a turn of the session runs."""
        return self.busy_tokens(key) > 0

    def busy(self) -> list[SessionName]:
        """Return all sessions with a running turn."""
        return list(self._turns)

    # ---- pins

    def pin(self, key: SessionName, pinned: bool) -> None:
        """Pin or unpin a session, hot or not. Any thread."""
        (self._pinned.add if pinned else self._pinned.discard)(key)

    def is_pinned(self, key: SessionName) -> bool:
        return key in self._pinned

    # ---- choosing

    def best_prefix(
        self, ref: SessionRef, prompt: np.ndarray, limit: int, chain_of: ChainOf | None = None
    ) -> HotPrefix | None:
        """Return the hot session of the same tenant that shares the longest prefix; None if none.

        At equal length, the prompt's own session is preferred, as its KV need not be copied.

        Args:
            prompt: int32 token ids, (num_tokens,).
            limit: most tokens to use, since at least one must be fed.
            chain_of: returns the chunk hashes of a prompt, for sessions without known tokens.
        """
        wanted_chain = cache(lambda: chain_of(ref, prompt) if chain_of else ())

        def usable_tokens(hot: HotSession) -> int:
            if len(hot.tokens):
                common = common_prefix(hot.tokens, prompt)
            else:
                size = hot.num_tokens // len(hot.chain)
                common = num_common(hot.chain, wanted_chain()) * size
            common = whole_chunks(min(common, limit), hot.restored_tokens)
            return common if common == hot.num_tokens or kv_arrays.can_trim(hot.caches) else 0

        alike = [x for x in self.all() if (x.ref.tenant, x.ref.salt) == (ref.tenant, ref.salt)]
        found = [HotPrefix(x, usable_tokens(x), x.key == ref.name) for x in alike]
        found = [x for x in found if x.num_tokens >= (1 if x.own else SHORTEST_SHARED)]
        return max(found, key=lambda x: (x.num_tokens, x.own), default=None)

    def victims(self) -> list[HotSession]:
        """Return all sessions, in the order in which they may be dropped."""
        return sorted(
            self.all(), key=lambda x: (self.is_pinned(x.key), not x.saved.done(), x.last_used_s)
        )


def whole_chunks(num_tokens: int, restored_tokens: int) -> int:
    """Return a prefix's length, rounded down to whole chunks if it ends within restored tokens.

    Otherwise its last chunk would be restored in part; as no row is packed twice, neither that
    chunk nor any after it could ever be saved.
    """
    return num_tokens - num_tokens % CHUNK_TOKENS if num_tokens < restored_tokens else num_tokens


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix of two arrays of token ids, (num_tokens,)."""
    length = min(len(one), len(other))
    different = np.nonzero(one[:length] != other[:length])[0]
    return int(different[0]) if len(different) else length


def resolved(value: bool) -> Future[bool]:
    """Return a future that has its result already."""
    future: Future[bool] = Future()
    future.set_result(value)
    return future


class HotCache:
    """Keeps, saves and drops the hot sessions; belongs to the owner thread."""

    def __init__(
        self,
        sessions: HotSessions,
        cold: ColdSessions | None,
        notify: Notify,
        nudge: Callable[[], None],
    ) -> None:
        """``nudge`` wakes the owner thread when a save has ended, so that it may drop a session."""
        self.sessions = sessions
        self.cold = cold
        self.notify = notify
        self._nudge = nudge
        self.counters: Counter[str] = Counter()

    def keep(
        self,
        hot: HotSession,
        states: Sequence[StateAt] = (),
        saved: Future[bool] | None = None,
    ) -> None:
        """Add an idle session, and save it; it never raises, since KV can be computed again.

        Args:
            states: the states taken during its turn.
            saved: the earlier save of a session that has not changed since; it is not saved again.
        """
        try:
            kv_arrays.compact(hot.caches)
            kv_arrays.check_length(hot.caches, hot.num_tokens)
            hot.nbytes = kv_arrays.nbytes_of(hot.caches)
        except Exception:  # an error here must not affect running requests
            logger.exception("the KV of a turn could not be kept")
            self.counters["keep_failures"] += 1
            return
        hot.saved = saved or resolved(False)
        self.sessions.put(hot)
        if saved is None:
            self._save(hot, states)

    def _save(self, hot: HotSession, states: Sequence[StateAt] = ()) -> None:
        """Start a save; it never raises: on an error the session just has no cold copy."""
        if self.cold is None:
            return

        def then(stored: bool) -> None:
            if stored:
                self.notify("saved", hot.ref)
            self._nudge()

        try:
            self.cold.save(hot, states, then)
        except Exception:  # an error of mlx or the store must not affect running requests
            logger.exception("a session could not be saved")
            self.counters["keep_failures"] += 1

    def take_prefix(self, ref: SessionRef, prompt: np.ndarray, limit: int) -> HotPrefix | None:
        """Return the hot session to start a prompt from; remove it if it is the prompt's own.

        Args:
            prompt: int32 token ids, (num_tokens,).
            limit: most tokens to use.

        Returns:
            None if no hot session shares a usable prefix.
        """
        chain_of = self.cold.chain if self.cold is not None else None
        best = self.sessions.best_prefix(ref, prompt, limit, chain_of)
        if best is not None and best.own:
            self.sessions.take(best.session.key)
        return best

    def note_restored(self, ref: SessionRef) -> None:
        """Take over a restored session's pin, and report the restore."""
        # An earlier engine may have pinned it. The store is asked now, as it may be unpinned since.
        if self.cold is not None and self.cold.store.is_pinned(ref):
            self.sessions.pin(ref.name, True)
        self.notify("restored", ref)

    def drop(self, hot: HotSession) -> None:
        """Drop a hot session; its memory is free on return, unless a save still reads it."""
        self.sessions.take(hot.key)
        hot.caches.clear()
        mx.clear_cache()
        lost = hot.saved.done() and not hot.is_saved
        if lost and not self.sessions.is_busy(hot.key):
            self.sessions.pin(hot.key, False)  # neither copy is left to be pinned
        self.notify("dropped" if hot.is_saved else "lost", hot.ref)

    def forget(self, key: SessionName) -> None:
        """Drop a session that was deleted, with its pin, without a report."""
        if (hot := self.sessions.take(key)) is not None:
            hot.caches.clear()
            mx.clear_cache()
        self.sessions.pin(key, False)

    def make_room(self, nbytes: int, spare: SessionName | None) -> bool:
        """Free at least ``nbytes`` by dropping idle sessions, or drop none and return False.

        If it returns False, ``nudge`` is called when another attempt may succeed.

        Args:
            spare: a session that is not dropped.
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
        """Drop all idle sessions but ``spare``; return False if some are still being saved.

        ``at_any_price``: drop these, too; their memory is freed when the save ends.
        """
        for hot in self.sessions.victims():
            if hot.key != spare and (at_any_price or self._may_go(hot)):
                self.drop(hot)
        return all(hot.key == spare for hot in self.sessions.victims())

    def _may_go(self, hot: HotSession) -> bool:
        if not hot.saved.done():
            return False
        if hot.saved.result() or self.cold is None or hot.was_refused:
            return True
        hot.was_refused = True
        self._save(hot)
        return False

    @property
    def is_saving(self) -> bool:
        """True if an idle session is being saved, so that its memory can be freed soon."""
        return any(not hot.saved.done() for hot in self.sessions.all())

    def save_again(self, hot: HotSession) -> None:
        """Save a session that has no cold copy, unless a save of it is running."""
        if hot.saved.done() and not hot.saved.result():
            self._save(hot)
