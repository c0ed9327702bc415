"""Adds up sessions by state and tier as they change, instead of counting them each second."""

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
    bf16_bytes: int  # that what is cold would take


class Sums(Generic[K]):
    """The sums over the sessions of one scope."""

    def __init__(self) -> None:
        self._shares: dict[K, _Share] = {}
        self.states: Counter[str] = Counter()
        self.tier_sessions: Counter[TierName] = Counter()
        self.tier_bytes: Counter[TierName] = Counter()
        self.hot_bytes = self.idle_bytes = self.cold_bytes = self.bf16_bytes = 0

    @property
    def num_sessions(self) -> int:
        return len(self._shares)

    def take(
        self, name: K, session: Session | None, hot_bytes: int = 0, bf16_bytes: int = 0
    ) -> None:
        """Count a session as it is now; None if it is gone.

        Args:
            hot_bytes: that it takes while it is hot.
            bf16_bytes: that its cold KV would take in bf16.
        """
        before = self._shares.pop(name, None)
        if before is not None:
            self._count(before, -1)
        if session is not None:
            share = self._shares[name] = _share_of(session, hot_bytes, bf16_bytes)
            self._count(share, 1)

    def _count(self, share: _Share, by: int) -> None:
        self.states[share.state] += by
        if not self.states[share.state]:
            del self.states[share.state]
        self.hot_bytes += by * share.hot_bytes
        self.idle_bytes += by * share.idle_bytes
        self.cold_bytes += by * share.cold_bytes
        self.bf16_bytes += by * share.bf16_bytes
        if share.tier is not None:
            self.tier_sessions[share.tier] += by
            self.tier_bytes[share.tier] += by * share.cold_bytes


def _share_of(session: Session, hot_bytes: int, bf16_bytes: int) -> _Share:
    hot_bytes = hot_bytes if session.hot else 0
    return _Share(
        session.state.value,
        session.tier,
        hot_bytes,
        hot_bytes if session.state is State.IDLE else 0,
        session.cold_bytes,
        bf16_bytes,
    )
