"""One engine of a fleet, and the fleet's account of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engines.base import Engine, EngineReport, ReplicaState, SessionRef
from engines.wire import Welcome

AVOID_S = 5.0  # a replica that took no connection comes last for so long


class Replica:
    """One of several engines of one model."""

    def __init__(self, name: str, engine: Engine, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self.engine = engine
        self.num_running = 0  # requests of this gateway
        self._avoid_until = float("-inf")
        self.leaving = False  # it is about to end: no new requests
        self.differs = ""  # why it serves something else than the others; "" = it does not
        self.hot_bytes = 0  # as it said last
        # Sessions that were deleted while it was away.
        self.owed: dict[tuple[str, str], SessionRef] = {}
        self._life: Welcome | None = None
        self._counters: Counter[str] = Counter()  # of its present life
        self._earlier: Counter[str] = Counter()  # of all lives before

    @property
    def takes(self) -> bool:
        """True while it may be asked."""
        return self.engine.ready and not self.differs

    def takes_beside(self, but: Welcome | None) -> bool:
        """Say whether it may be asked for an answer, and is not that life of it."""
        return self.takes and not self.leaving and (but is None or self.engine.welcome is not but)

    @property
    def trouble(self) -> str:
        """The reason why it may not be asked, as a sentence; "" if it may."""
        return self.differs or self.engine.trouble

    @property
    def state(self) -> ReplicaState:
        """Its state, for lists."""
        return ReplicaState(
            name=self.name,
            ready=self.takes,
            trouble=self.trouble,
            num_running=self.num_running,
        )

    @property
    def avoided(self) -> bool:
        """True if it has just taken no connection."""
        return self._clock() < self._avoid_until

    def avoid(self) -> None:
        """Note that it took no connection: for some time others are asked first."""
        self._avoid_until = self._clock() + AVOID_S

    def left(self) -> None:
        """Note that a request has ended."""
        self.num_running -= 1

    def count(self, report: EngineReport) -> None:
        """Take over its counters; those of its earlier lives are kept, so that sums only grow."""
        life = self.engine.welcome
        if life is not self._life:
            self._life = life
            self._earlier += self._counters
        self._counters = Counter(report.counters)
        self.hot_bytes = report.hot_bytes

    @property
    def counters(self) -> Counter[str]:
        """Its counters, all lives together."""
        return self._earlier + self._counters
