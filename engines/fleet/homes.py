"""The replica that had each session last."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from engines.wire import SessionRef
from kvstore.session import SessionName


class Homes(Protocol):
    """Knows the home of sessions. It is a belief: a wrong one costs a restore, or a prefill."""

    def get(self, session: SessionRef) -> str | None:
        """Return the name of the replica that had the session last; None if that is not known."""

    def put(self, session: SessionRef, replica: str) -> None:
        """Note that a replica has the session, as it says."""

    def served(self, session: SessionRef, replica: str) -> None:
        """Note that a replica has taken a request of the session."""

    def drop(self, session: SessionRef) -> None:
        """Note that the session is no more."""


class LastHomes:
    """The homes that this gateway has seen; those used longest ago are dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._homes: OrderedDict[SessionName, str] = OrderedDict()

    def get(self, session: SessionRef) -> str | None:
        return self._homes.get(session.name)

    def put(self, session: SessionRef, replica: str) -> None:
        key = session.name
        self._homes[key] = replica
        self._homes.move_to_end(key)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def served(self, session: SessionRef, replica: str) -> None:
        self.put(session, replica)

    def drop(self, session: SessionRef) -> None:
        self._homes.pop(session.name, None)


MAX_SAID: Final = 1024
SAID_S: Final = 5.0  # so long a move is said: others look twice in a second


class Move(NamedTuple):
    """A session's new home, as gateways say it to each other: hashes of both."""

    session: bytes
    replica: bytes


class SaidMoves:
    """The latest moves by requests of this gateway, for the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moves: deque[tuple[float, Move]] = deque(maxlen=MAX_SAID)
        self.num = 0  # of all that were ever said

    def say(self, move: Move) -> None:
        self._moves.append((self._clock(), move))
        self.num += 1

    def recent(self) -> Sequence[Move]:
        """List the last of all moves that were said."""
        now = self._clock()
        while self._moves and now - self._moves[0][0] > SAID_S:
            self._moves.popleft()
        return [move for _, move in self._moves]


class SharedHomes:
    """The homes of sessions whose engines several gateways use, as all of these see them.

    What was heard last holds: that another gateway's request has moved a session, or that our own
    has. Whether a home is there, each gateway sees by its own connection to it.
    """

    def __init__(
        self,
        most: int,
        mark: Callable[[str, str], bytes],
        replicas: Mapping[bytes, str],
        said: SaidMoves,
    ) -> None:
        """
        Args:
            most: homes that are remembered: so many that this gateway saw, and as many it heard.
            mark: returns the hash of a session by tenant and id, the same in all gateways.
            replicas: names by their hashes, the same in all gateways.
            said: takes the moves of all models of this gateway.
        """
        self._own = LastHomes(most)
        self._most = most
        self._mark = mark
        self._replicas = replicas
        self._marks = {name: x for x, name in replicas.items()}
        self._said = said
        self._heard: OrderedDict[bytes, str] = OrderedDict()

    def get(self, session: SessionRef) -> str | None:
        return self._heard.get(self._mark(*session.name)) or self._own.get(session)

    def put(self, session: SessionRef, replica: str) -> None:
        if self._mark(*session.name) not in self._heard:
            self._own.put(session, replica)

    def served(self, session: SessionRef, replica: str) -> None:
        moved = self.get(session) != replica
        mark = self._mark(*session.name)
        self._heard.pop(mark, None)
        self._own.put(session, replica)
        if moved:
            self._said.say(Move(mark, self._marks[replica]))

    def drop(self, session: SessionRef) -> None:
        self._heard.pop(self._mark(*session.name), None)
        self._own.drop(session)

    def hear(self, moves: Iterable[Move]) -> None:
        """Take over what another gateway has said; moves among others' engines mean nothing."""
        for session, replica in moves:
            if (name := self._replicas.get(replica)) is not None:
                self._heard[session] = name
                self._heard.move_to_end(session)
                while len(self._heard) > self._most:
                    self._heard.popitem(last=False)


class FleetHomes(NamedTuple):
    """The homes of the sessions of each fleet, and the moves to report to other gateways."""

    fleets: list[SharedHomes]
    said: SaidMoves
