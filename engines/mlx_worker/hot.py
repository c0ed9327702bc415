"""Idle sessions whose KV is still in the engine's memory.

A session is here between its turns. A turn takes the session out and brings it back at its end.
Whoever needs room drops some: least recently used first, pinned ones last, and those that are being
saved only when nothing else is left, since their memory is pinned until the save is through.

The owner thread alone changes what is here. Reports are written on other threads, so the table has
a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engines.mlx_worker import parking
from engines.mlx_worker.turn import Caches, SessionKey
from kvstore.records import SessionRef

# A shared prefix shorter than this is computed again sooner than it is copied.
SHORTEST_SHARED = 32


@dataclass(eq=False)
class HotSession:
    """``caches`` hold exactly ``tokens``."""

    session: SessionRef
    tokens: np.ndarray  # int32, (num_tokens,)
    caches: Caches
    nbytes: int
    last_used_s: float = 0.0  # monotonic
    # Resolved by the store: True = there is a cold copy. Unresolved = a save is on its way.
    saved: Future[bool] = field(default_factory=Future)
    lossy_tokens: int = 0  # the first so many may have been restored from a lossy copy

    @property
    def key(self) -> SessionKey:
        return self.session.tenant, self.session.id

    @property
    def is_saved(self) -> bool:
        return self.saved.done() and self.saved.result()


@dataclass(frozen=True)
class Candidate:
    """A hot session that begins as a prompt does."""

    hot: HotSession
    num_tokens: int  # of its tokens that the prompt can use
    own: bool  # it is the prompt's own session, so it may be taken apart

    @property
    def diverged(self) -> bool:
        return self.own and self.num_tokens < len(self.hot.tokens)


class HotSessions:
    """Thread-safe, for looking at."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[SessionKey, HotSession] = {}
        self._pinned: set[SessionKey] = set()
        self._turns: dict[SessionKey, list[int]] = {}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.all())

    def all(self) -> list[HotSession]:
        with self._lock:
            return list(self._sessions.values())

    def get(self, key: SessionKey) -> HotSession | None:
        with self._lock:
            return self._sessions.get(key)

    def idle_s(self, hot: HotSession) -> float:
        return max(0.0, self._clock() - hot.last_used_s)

    def put(self, hot: HotSession) -> None:
        """As the most recently used; takes the place of what was there of this session."""
        hot.last_used_s = self._clock()
        with self._lock:
            self._sessions[hot.key] = hot

    def take(self, key: SessionKey) -> HotSession | None:
        with self._lock:
            return self._sessions.pop(key, None)

    # ---- sessions that are being served

    def begin_turn(self, key: SessionKey, num_tokens: int) -> None:
        """``num_tokens`` of its prompt."""
        with self._lock:
            self._turns.setdefault(key, []).append(num_tokens)

    def end_turn(self, key: SessionKey, num_tokens: int) -> None:
        with self._lock:
            self._turns[key].remove(num_tokens)
            if not self._turns[key]:
                del self._turns[key]

    def busy_tokens(self, key: SessionKey) -> int:
        """Tokens of the longest prompt that is being served; 0 = the session is not busy."""
        with self._lock:
            return max(self._turns.get(key, [0]))

    def is_busy(self, key: SessionKey) -> bool:
        return self.busy_tokens(key) > 0

    def busy(self) -> list[SessionKey]:
        with self._lock:
            return list(self._turns)

    # ---- pins

    def pin(self, key: SessionKey, pinned: bool) -> None:
        with self._lock:
            (self._pinned.add if pinned else self._pinned.discard)(key)

    def is_pinned(self, key: SessionKey) -> bool:
        with self._lock:
            return key in self._pinned

    # ---- choosing

    def best(self, session: SessionRef, prompt: np.ndarray, limit: int) -> Candidate | None:
        """The hot session of the same tenant with the longest usable beginning in common.

        ``limit``: at most so many tokens, since one at least must be fed. The session's own KV is
        preferred: it need not be copied.
        """
        own = self.get((session.tenant, session.id))
        others = [
            x
            for x in self.all()
            if x is not own and (x.session.tenant, x.session.salt) == (session.tenant, session.salt)
        ]
        found = [Candidate(x, usable(x, prompt, limit), False) for x in others]
        found = [x for x in found if x.num_tokens >= SHORTEST_SHARED]
        if own is not None and own.session.salt == session.salt:
            found.append(Candidate(own, usable(own, prompt, limit), True))
        best = max(found, key=lambda x: (x.num_tokens, x.own), default=None)
        return best if best is not None and best.num_tokens else None

    def victims(self) -> list[HotSession]:
        """In the order in which they may be dropped."""
        return sorted(
            self.all(),
            key=lambda x: (self.is_pinned(x.key), not x.saved.done(), x.last_used_s),
        )


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens two token arrays share."""
    length = min(len(one), len(other))
    different = np.nonzero(one[:length] != other[:length])[0]
    return int(different[0]) if len(different) else length


def usable(hot: HotSession, prompt: np.ndarray, limit: int) -> int:
    """Tokens of it that a prompt can start from: all, or, if it can be trimmed, a part."""
    common = min(common_prefix(hot.tokens, prompt), limit)
    return common if common == len(hot.tokens) or parking.can_trim(hot.caches) else 0


def take_apart(candidate: Candidate) -> Caches:
    """Caches with exactly ``num_tokens`` tokens, free to be written to."""
    hot = candidate.hot
    caches = hot.caches if candidate.own else parking.copy_of(hot.caches)
    parking.trim(caches, len(hot.tokens) - candidate.num_tokens)
    return caches
