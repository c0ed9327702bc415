"""Chooses the replica of a session: its home, unless that one is away or far ahead of the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from engines.base import EngineUnavailable, EngineUnreached, SessionRef, SessionReport, Welcome
from engines.fleet.homes import Homes
from engines.fleet.replica import Replica
from engines.fleet.ring import Ring

T = TypeVar("T")

NEAR: Final = 3  # replicas that are compared


def least_behind(near: Sequence[T], load: Callable[[T], int], moves_at: int) -> T:
    """Return the first of ``near``, or a later one that has so many requests fewer."""
    first = near[0]
    for other in near[1:]:
        if load(first) - load(other) >= moves_at:
            return other
    return first


class Choice:
    """Knows which replica has which session."""

    def __init__(self, replicas: Sequence[Replica], homes: Homes, moves_at: int) -> None:
        """``moves_at``: the requests by which a home has to be ahead for a session to move."""
        self._homes = homes
        self._moves_at = moves_at
        self._pinned: set[tuple[str, str]] = set()  # these do not move
        self.renew(replicas)

    def renew(self, replicas: Sequence[Replica]) -> None:
        """Choose among these from now on. Only sessions of a replica that is gone change places."""
        self._replicas = list(replicas)
        self._by_name = {x.name: x for x in replicas}
        self._ring = Ring([x.name for x in replicas])

    def choose(self, session: SessionRef, but: Welcome | None = None) -> Replica:
        """Choose the replica that is to have a session's next request.

        Args:
            but: not this life of one.

        Raises:
            EngineUnreached: there is none.
        """
        near = self._near(session, but)
        if not near:
            troubles = (x.trouble for x in self._replicas)
            raise EngineUnreached(next(filter(None, troubles), "no other replica is there"))
        home = self.home(session)
        if home is not None and home.takes_beside(but) and not home.avoided:
            near = [home, *(x for x in near if x is not home)]
        if (session.tenant, session.id) in self._pinned:
            return near[0]
        near = [near[0], *(x for x in near[1:] if not x.avoided)]
        return least_behind(near, lambda x: x.num_running, self._moves_at)

    def _near(self, session: SessionRef, but: Welcome | None) -> list[Replica]:
        """List the first few replicas of a session's walk; those that take no connections last."""
        near: list[Replica] = []
        for number in self._ring.walk(f"{session.tenant}\0{session.id}"):
            if (replica := self._replicas[number]).takes_beside(but):
                near.append(replica)
                if len(near) == NEAR:
                    break
        return sorted(near, key=lambda x: x.avoided)

    def home(self, session: SessionRef) -> Replica | None:
        """Return the replica that had the session last; None if that is not known, or it leaves."""
        home = self._by_name.get(self._homes.get(session) or "")
        return None if home is None or home.leaving else home

    def holder(self, session: SessionRef) -> Replica:
        """Return the replica that a verb on a session goes to. Raises ``EngineUnavailable``."""
        home = self.home(session)
        if home is None:
            return self.choose(session)
        if not home.takes:
            raise EngineUnavailable(
                f"replica {home.name}, which had the session last, is away: {home.trouble}"
            )
        return home

    def note_pinned(self, report: SessionReport) -> None:
        """Take over whether a session is pinned."""
        key = report.tenant, report.id
        (self._pinned.add if report.pinned else self._pinned.discard)(key)

    def forget(self, session: SessionRef) -> None:
        """Forget that there was such a session."""
        self._homes.drop(session)
        self._pinned.discard((session.tenant, session.id))
