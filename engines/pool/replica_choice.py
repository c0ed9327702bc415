"""Chooses the replica of a session: its home, unless that one is away or far ahead of the next.

A session's home is found on a ring, the same in every gateway. Each replica has ``POINTS`` points
on it, by a hash of its name. A session belongs to the first point after its own. So the
sessions of an absent replica go to many others, and no other session moves. Finding a point takes
microseconds; hashing a thousand names for each session would take milliseconds.
"""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final

from engines.base import EngineUnavailable, EngineUnreached, SessionRef, SessionReport, Welcome
from engines.pool.replica import Replica
from kvstore.session import SessionName

POINTS: Final = 128
_POINT_BYTES: Final = 8
_AT_ONCE: Final = 64 // _POINT_BYTES  # points of one hash
NEAR: Final = 3  # replicas that are compared


class Ring:
    """Replicas, by their numbers, around a circle of 64 bits."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: of the replicas; a replica's number is its place in them."""
        points = sorted((point, i) for i, name in enumerate(names) for point in _points(name))
        self._points = [point for point, _ in points]
        self._numbers = [number for _, number in points]
        self._num_replicas = len(names)

    def walk(self, key: str) -> Iterator[int]:
        """Yield the number of each replica once, the nearest to the key first."""
        digest = blake2b(key.encode(), digest_size=_POINT_BYTES, person=b"session").digest()
        start = bisect(self._points, int.from_bytes(digest, "big"))
        seen: set[int] = set()
        for at in chain(range(start, len(self._points)), range(start)):
            number = self._numbers[at]
            if number not in seen:
                yield number
                seen.add(number)
                if len(seen) == self._num_replicas:
                    return


def _points(name: str) -> Iterator[int]:
    for i in range(POINTS // _AT_ONCE):
        digest = blake2b(f"{i} {name}".encode(), digest_size=64, person=b"replica").digest()
        for at in range(0, len(digest), _POINT_BYTES):
            yield int.from_bytes(digest[at : at + _POINT_BYTES], "big")


class Homes:
    """The homes that this gateway has seen; those used longest ago are dropped first.

    A home may be out of date: a wrong one costs a restore, or a prefill.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._homes: OrderedDict[SessionName, str] = OrderedDict()

    def get(self, session: SessionRef) -> str | None:
        """Return the name of the replica that had the session last; None if that is not known."""
        return self._homes.get(session.name)

    def put(self, session: SessionRef, replica: str) -> None:
        """Note that a replica has the session."""
        key = session.name
        self._homes[key] = replica
        self._homes.move_to_end(key)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def drop(self, session: SessionRef) -> None:
        """Forget the home of a session that no longer exists."""
        self._homes.pop(session.name, None)


class ReplicaChoice:
    """Knows which replica has which session."""

    def __init__(self, replicas: Sequence[Replica], homes: Homes, moves_at: int) -> None:
        """``moves_at``: a session moves if its home has so many more requests than another."""
        self._homes = homes
        self._moves_at = moves_at
        self._pinned: set[SessionName] = set()  # these do not move
        self.renew(replicas)

    def renew(self, replicas: Sequence[Replica]) -> None:
        """Choose among these from now on. Only sessions of a replica that is gone change places."""
        self._replicas = list(replicas)
        self._by_name = {x.name: x for x in replicas}
        self._ring = Ring([x.name for x in replicas])

    def choose(self, session: SessionRef, excluded: Welcome | None = None) -> Replica:
        """Choose the replica that is to have a session's next request.

        Args:
            excluded: the welcome of an engine process that must not be chosen; None = any may.

        Raises:
            EngineUnreached: no replica may be chosen.
        """
        near = self._near(session, excluded)
        if not near:
            troubles = (x.trouble for x in self._replicas)
            raise EngineUnreached(next(filter(None, troubles), "there is no other replica"))
        home = self.home(session)
        if home is not None and home.takes_beside(excluded) and not home.avoided:
            near = [home, *(x for x in near if x is not home)]
        if session.name in self._pinned:
            return near[0]
        idler = (x for x in near[1:] if near[0].num_running - x.num_running >= self._moves_at)
        return next((x for x in idler if not x.avoided), near[0])

    def _near(self, session: SessionRef, excluded: Welcome | None) -> list[Replica]:
        """List the first few replicas of a session's walk; those that take no connections last."""
        near: list[Replica] = []
        for number in self._ring.walk(f"{session.tenant}\0{session.id}"):
            if (replica := self._replicas[number]).takes_beside(excluded):
                near.append(replica)
                if len(near) == NEAR:
                    break
        return sorted(near, key=lambda x: x.avoided_s)

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
        """Record whether a session is pinned."""
        key = report.tenant, report.id
        (self._pinned.add if report.pinned else self._pinned.discard)(key)

    def forget(self, session: SessionRef) -> None:
        """Forget a session's home and whether it was pinned."""
        self._homes.drop(session)
        self._pinned.discard(session.name)
