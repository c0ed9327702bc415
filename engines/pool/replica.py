"""One of several engines of a model, what is known of it, and the joined reports of several."""

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

FIGURES_S: Final = 2.0  # sums are made without a replica that is silent for longer
AVOID_S: Final = 5.0  # a replica that took no connection, or broke one, comes last for so long
MAX_OWED: Final = 10_000  # deletions that a replica that is away is still to do
MAX_OWED_OF_TENANT: Final = MAX_OWED // 4  # of these
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
        """Say whether one more of this tenant is within the bounds."""
        return len(self._all) < MAX_OWED and self._num_of(tenant) < MAX_OWED_OF_TENANT

    def _num_of(self, tenant: str) -> int:
        return len(self._of[tenant]) if tenant in self._of else 0

    def make_room(self, tenant: str) -> None:
        """Drop the oldest until one more of this tenant is within the bounds."""
        while self._num_of(tenant) >= MAX_OWED_OF_TENANT:
            self._drop(next(iter(self._of[tenant])))
        while len(self._all) >= MAX_OWED:
            self._drop(next(iter(self._all)))

    def add(self, session: SessionRef, until: float = inf) -> None:
        """Add a deletion as the latest, even beyond the bounds.

        ``until``: the moment at which ``expire`` drops it; never before that of an older one.
        """
        self.discard(session)
        key = session.name
        self._all[key] = session, until
        self._of[session.tenant][key] = None

    def discard(self, session: SessionRef) -> None:
        """Take a session's deletion out, if there is one."""
        if session.name in self._all:
            self._drop(session.name)

    def _drop(self, key: SessionName) -> None:
        del self._all[key]
        of_tenant = self._of[key[0]]
        del of_tenant[key]
        if not of_tenant:
            del self._of[key[0]]

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
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
        self.hot_bytes = 0  # as it said last
        self.owed = ReplicaDeletions()  # of sessions that were deleted while it was away
        self.is_new = False  # it was taken on while others ran, and has not been ready yet
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
            name=self.name, ready=self.takes, trouble=self.trouble, num_running=self.num_running
        )

    @property
    def avoided_s(self) -> float:
        """The seconds for which it comes last: it has just taken no connection, or broke one."""
        return max(0.0, self._avoid_until - self._clock())

    @property
    def avoided(self) -> bool:
        return self.avoided_s > 0

    def avoid(self) -> None:
        """Note that it took or kept no connection: for some time others are asked first."""
        self._avoid_until = self._clock() + AVOID_S

    def count(self, report: EngineReport) -> None:
        """Take over its counters; those of its earlier lives are kept, so that sums only grow."""
        life = self.engine.welcome
        if life is not self._life:
            self._life = life
            self._earlier += self._counters
        self._counters = Counter(report.counters)
        self.hot_bytes = report.hot_bytes

    async def figures(self) -> EngineReport | None:
        """Ask for its report and count it; None if it does not answer soon."""
        try:
            async with asyncio.timeout(FIGURES_S):
                report = await self.engine.stats()
        except (EngineError, TimeoutError):
            return None
        self.count(report)
        return report

    @property
    def counters(self) -> Counter[str]:
        """Its counters, all lives together."""
        return self._earlier + self._counters


def joined_welcome(welcomes: Sequence[Welcome]) -> Welcome:
    """Return an account that holds for every replica: what all of them can do.

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
    """Say in a sentence why ``other`` is no replica of ``one``; "" if it is."""
    if (one.engine, one.model) == (other.engine, other.model):
        return ""
    return (
        f"it serves {other.model} by {other.engine}, the other replicas {one.model} by"
        f" {one.engine}; give replicas one model, one name and one kind of engine"
    )


def joined_report(reports: Sequence[EngineReport], counters: Mapping[str, int]) -> EngineReport:
    """Add the figures up.

    Args:
        reports: at least one.
        counters: of all lives of all replicas.
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
