"""A replica, one of several engines of a model; and the joined reports of several."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from engines.base import Engine, EngineError, ReplicaState, SessionRef
from engines.wire import EngineReport, TierStats, Welcome
from kvstore.session import SessionName
from kvstore.stats import Repacking

FIGURES_S: Final = 2.0  # sums leave out a replica whose report takes longer
AVOID_S: Final = 5.0  # a replica that refused or broke a connection is chosen last
MAX_OWED: Final = 10_000  # deletions that an absent replica has yet to carry out
MAX_OWED_OF_TENANT: Final = MAX_OWED // 4  # one tenant's part of these
_SUMS = (
    *("hot_bytes", "idle_hot_bytes", "hot_capacity_bytes", "active_bytes"),
    *("num_running", "num_waiting", "save_queue_bytes"),
)


class ReplicaDeletions:
    """Sessions that are to be deleted, the oldest deletion first. A step takes constant time."""

    def __init__(self) -> None:
        self._all: OrderedDict[SessionName, tuple[SessionRef, float]] = OrderedDict()
        self._of: defaultdict[str, OrderedDict[SessionName, None]] = defaultdict(OrderedDict)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, key: object) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[SessionRef]:
        return (session for session, _ in list(self._all.values()))

    def has_room(self, tenant: str) -> bool:
        """Return whether one more deletion of this tenant is within the bounds."""
        return len(self._all) < MAX_OWED and self._num_of(tenant) < MAX_OWED_OF_TENANT

    def _num_of(self, tenant: str) -> int:
        return len(self._of[tenant]) if tenant in self._of else 0

    def make_room(self, tenant: str) -> None:
        """Drop the oldest until one more deletion of this tenant is within the bounds."""
        while self._num_of(tenant) >= MAX_OWED_OF_TENANT:
            self._drop(next(iter(self._of[tenant])))
        while len(self._all) >= MAX_OWED:
            self._drop(next(iter(self._all)))

    def add(self, session: SessionRef, until: float = inf) -> None:
        """Add a deletion as the latest, even beyond the bounds.

        ``until``: the time from which ``expire`` drops it; not before that of an older one.
        """
        self.discard(session)
        key = session.name
        self._all[key] = session, until
        self._of[session.tenant][key] = None

    def discard(self, session: SessionRef) -> None:
        """Remove a session's deletion, if there is one."""
        if session.name in self._all:
            self._drop(session.name)

    def _drop(self, key: SessionName) -> None:
        del self._all[key]
        of_tenant = self._of[key[0]]
        del of_tenant[key]
        if not of_tenant:
            del self._of[key[0]]

    def expire(self, now: float) -> None:
        """Drop the deletions whose time is over."""
        while self._all and next(iter(self._all.values()))[1] <= now:
            self._drop(next(iter(self._all)))


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
        self.hot_bytes = 0  # by its latest report
        self.owed = ReplicaDeletions()  # deletions that it has yet to carry out
        self.is_new = False  # it was added while others ran, and has not been ready yet
        self._counted_welcome: Welcome | None = None
        self._counters: Counter[str] = Counter()  # of its present process
        self._earlier: Counter[str] = Counter()  # of all earlier processes

    @property
    def takes(self) -> bool:
        """True while it may be sent requests and verbs."""
        return self.engine.ready and not self.differs

    def takes_beside(self, excluded: Welcome | None) -> bool:
        """Return whether it may be sent a request, and its process is not that of ``excluded``."""
        return (
            self.takes
            and not self.leaving
            and (excluded is None or self.engine.welcome is not excluded)
        )

    @property
    def trouble(self) -> str:
        """The reason why it is not in use, as a sentence; "" if it is."""
        return self.differs or self.engine.trouble

    @property
    def state(self) -> ReplicaState:
        """Its state, for lists."""
        return ReplicaState(
            name=self.name, ready=self.takes, trouble=self.trouble, num_running=self.num_running
        )

    @property
    def avoided_s(self) -> float:
        """The seconds for which it is still chosen last; 0 if it is not avoided."""
        return max(0.0, self._avoid_until - self._clock())

    @property
    def avoided(self) -> bool:
        return self.avoided_s > 0

    def avoid(self) -> None:
        """Note a refused or broken connection: others are chosen first for ``AVOID_S``."""
        self._avoid_until = self._clock() + AVOID_S

    def count(self, report: EngineReport) -> None:
        """Store its counters, beside those of its earlier processes, so that sums only grow."""
        welcome = self.engine.welcome
        if welcome is not self._counted_welcome:
            self._counted_welcome = welcome
            self._earlier += self._counters
        self._counters = Counter(report.counters)
        self.hot_bytes = report.hot_bytes

    async def figures(self) -> EngineReport | None:
        """Return its report, and count it; None if it does not answer within ``FIGURES_S``."""
        try:
            async with asyncio.timeout(FIGURES_S):
                report = await self.engine.stats()
        except (EngineError, TimeoutError):
            return None
        self.count(report)
        return report

    @property
    def counters(self) -> Counter[str]:
        """The sums of its counters over all its processes."""
        return self._earlier + self._counters


def joined_welcome(welcomes: Sequence[Welcome]) -> Welcome:
    """Return the welcome of the pool, with the abilities that all replicas have.

    Args:
        welcomes: at least one.
    """
    first = welcomes[0]
    return msgspec.structs.replace(
        first,
        max_context=min(x.max_context for x in welcomes),
        hibernation=all(x.hibernation for x in welcomes),
        hibernation_reason=next((x.hibernation_reason for x in welcomes if not x.hibernation), ""),
        can_measure=all(x.can_measure for x in welcomes),
        sees_images=all(x.sees_images for x in welcomes),
    )


def difference(one: Welcome, other: Welcome) -> str:
    """Return a sentence that says why ``other`` is no replica of ``one``; "" if it is."""
    if (one.engine, one.model) == (other.engine, other.model):
        return ""
    return (
        f"it serves {other.model} by {other.engine}, the other replicas {one.model} by"
        f" {one.engine}; give replicas one model, one name and one kind of engine"
    )


def joined_report(reports: Sequence[EngineReport], counters: Mapping[str, int]) -> EngineReport:
    """Return the sums of the replicas' figures as one report.

    Args:
        reports: at least one.
        counters: the sums over all processes of all replicas.
    """
    sums = {name: sum(getattr(x, name) for x in reports) for name in _SUMS}
    tiers: dict[str, list[TierStats]] = {}
    for report in reports:
        for tier in report.tiers:
            tiers.setdefault(tier.name, []).append(tier)
    return msgspec.structs.replace(
        reports[0],
        **sums,
        tiers=[TierStats.joined(x, available=any(y.available for y in x)) for x in tiers.values()],
        counters=dict(counters),
        requests=[y for x in reports for y in x.requests],
        repacking=_joined_repacking([x.repacking for x in reports]),
        differs=tuple(sorted({kind for x in reports for kind in x.differs})),
    )


def _joined_repacking(parts: Sequence[Repacking]) -> Repacking:
    names = Repacking.__struct_fields__
    return Repacking(**{name: sum(getattr(x, name) for x in parts) for name in names})
