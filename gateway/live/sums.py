"""Adds up sessions by state and tier as they change, so that nobody counts them all each second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from engines.base import TierName
from scheduler.session import Session, State

K = TypeVar("K", bound=Hashable)


class _Share(NamedTuple):
    """One session's part of the sums."""

    state: str
    tier: TierName | None
    hot_bytes: int
    idle_bytes: int
    cold_bytes: int
    cold_tokens: int


class Sums(Generic[K]):
    """The sums over the sessions of one scope."""

    def __init__(self) -> None:
        self._shares: dict[K, _Share] = {}
        self.states: Counter[str] = Counter()
        self.tier_sessions: Counter[TierName] = Counter()
        self.tier_bytes: Counter[TierName] = Counter()
        self.hot_bytes = self.idle_bytes = self.cold_bytes = self.cold_tokens = 0

    @property
    def num_sessions(self) -> int:
        return len(self._shares)

    def take(self, name: K, session: Session | None) -> None:
        """Count a session as it is now; None if it is gone."""
        before = self._shares.pop(name, None)
        if before is not None:
            self._count(before, -1)
        if session is not None:
            share = self._shares[name] = _share_of(session)
            self._count(share, 1)

    def _count(self, share: _Share, by: int) -> None:
        self.states[share.state] += by
        if not self.states[share.state]:
            del self.states[share.state]
        self.hot_bytes += by * share.hot_bytes
        self.idle_bytes += by * share.idle_bytes
        self.cold_bytes += by * share.cold_bytes
        self.cold_tokens += by * share.cold_tokens
        if share.tier is not None:
            self.tier_sessions[share.tier] += by
            self.tier_bytes[share.tier] += by * share.cold_bytes


def _share_of(session: Session) -> _Share:
    hot_bytes = session.hot_bytes if session.hot else 0
    return _Share(
        session.state.value,
        session.tier,
        hot_bytes,
        hot_bytes if session.state is State.IDLE else 0,
        session.cold_bytes,
        session.cold_tokens,
    )
