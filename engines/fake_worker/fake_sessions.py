"""The fake engine's sessions, hot or cold, and the words that a prompt reuses from them.

A token is a word. A session's KV is its list of words, at a made-up number of bytes each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engines.config import CalibrationOrder
from engines.http import COLD_SOURCES, CacheOutcome, CacheSource
from engines.wire import (
    CodecReport,
    Done,
    EngineReport,
    MeasurementEnd,
    Notice,
    SessionRef,
    SessionReport,
    TenantUses,
    TierName,
    TierStats,
)
from kvstore.session import TIER_NAMES, SessionName, TenantLimits
from kvstore.stats import Repacking

HOT_BYTES_PER_TOKEN = 1000
COLD_BYTES_PER_TOKEN = 200
UNPACKED_BYTES = 1 << 20  # made-up size of a session that is to be packed again
CASES = 5  # number of cases in a measurement
CODEC = CodecReport(name="words", id="words.1", why="words are kept as they are")


@dataclass
class FakeSession:
    """A session as a list of words, which is empty once the session was forgotten."""

    ref: SessionRef
    words: list[str] = field(default_factory=list)
    hot: bool = False
    tier: TierName | None = None
    pinned: bool = False
    num_turns: int = 0
    last_used: float = 0.0

    @property
    def hot_bytes(self) -> int:
        return len(self.words) * HOT_BYTES_PER_TOKEN if self.hot else 0

    @property
    def cold_bytes(self) -> int:
        return len(self.words) * COLD_BYTES_PER_TOKEN if self.tier else 0


class FakeSessions:
    """All sessions of the fake engine; also its ``SessionVerbs``. Runs on the event loop."""

    def __init__(
        self, hot_capacity_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.codec = CODEC
        self._capacity_bytes = hot_capacity_bytes
        self._notify: Callable[[Notice], None] = lambda notice: None
        self._clock = clock
        self._sessions: dict[SessionName, FakeSession] = {}
        self._cases_left = 0
        self._measured_at = 0.0
        self._num_unpacked = 0
        self._num_repacked = 0
        self._limits: dict[TierName, TenantLimits] = {}
        self._counters = {"turns": 0, "saves": 0, "restores": 0, "misses": 0, "evictions": 0}

    def listen(self, notify: Callable[[Notice], None]) -> None:
        """Have ``notify`` called with every change."""
        self._notify = notify

    # ---- turns

    def begin(self, ref: SessionRef, prompt: Sequence[str]) -> CacheOutcome:
        """Begin a turn, and return what it reuses of the session's KV."""
        session = self._sessions.setdefault(ref.name, FakeSession(ref))
        session.num_turns += 1
        session.last_used = self._clock()
        self._counters["turns"] += 1
        cached = min(_common(session.words, prompt), len(prompt) - 1)
        reason = "diverged" if session.words else "never-stored"
        if cached <= 0:
            self._counters["misses"] += 1
            return CacheOutcome("miss", 0, reason)
        source: CacheSource = "hot"
        if session.tier and not session.hot:
            source = COLD_SOURCES[session.tier]
        self._counters["restores"] += not session.hot
        whole = cached >= min(len(session.words), len(prompt) - 1)
        session.hot = True
        return CacheOutcome(source, cached, None if whole else reason)

    def end(self, ref: SessionRef, words: list[str]) -> None:
        """End a turn; ``words``: the words of its prompt and answer."""
        session = self._sessions.get(ref.name)
        if session is None:  # forgotten meanwhile
            return
        session.num_turns -= 1
        session.words, session.hot, session.tier = words, True, "ram"
        session.last_used = self._clock()
        self._counters["saves"] += 1
        self._keep_to_limits(ref.tenant)
        self._notify(Notice("turn", self._report(session)))
        self._notify(Notice("saved", self._report(session)))
        self._evict()

    def _evict(self) -> None:
        idle = [x for x in self._sessions.values() if x.hot and not x.num_turns]
        idle.sort(key=lambda x: x.last_used)
        while idle and self._hot_bytes() > self._capacity_bytes:
            session = idle.pop(0)
            session.hot = False
            self._counters["evictions"] += 1
            self._notify(Notice("dropped", self._report(session)))

    # ---- verbs: see ``engines.host.control_server.SessionVerbs``

    async def demote(self, ref: SessionRef, tier: TierName | None) -> Done:
        session = self._sessions.get(ref.name)
        if session is None:
            return Done(None)
        if session.num_turns:
            return Done(self._report(session), kept="busy")
        session.hot = False
        session.tier = tier or session.tier
        return Done(self._report(session))

    async def prefetch(self, ref: SessionRef) -> Done:
        session = self._sessions.get(ref.name)
        if session is None:
            return Done(None)
        self._counters["restores"] += not session.hot
        session.hot = True
        return Done(self._report(session))

    async def pin(self, ref: SessionRef, pinned: bool) -> Done:
        session = self._sessions.get(ref.name)
        if session is None:
            return Done(None)
        session.pinned = pinned
        return Done(self._report(session))

    async def forget(self, ref: SessionRef) -> Done:
        session = self._sessions.get(ref.name)
        if session is None:
            return Done(None)
        session.hot, session.tier, session.words = False, None, []
        if not session.num_turns:
            del self._sessions[ref.name]
        return Done(self._report(session))

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        self._limits = dict(tiers)
        tenants = {x.ref.tenant for x in self._sessions.values()}
        for tenant in tenants:
            self._keep_to_limits(tenant)
        return TenantUses({x: {y: self._held(y, x) for y in tenants} for x in TIER_NAMES})

    def _held(self, tenant: str, tier: TierName) -> int:
        of_tenant = (x for x in self._sessions.values() if x.ref.tenant == tenant)
        return sum(x.cold_bytes for x in of_tenant if x.tier == tier)

    def _keep_to_limits(self, tenant: str) -> None:
        """Drop the tenant's oldest cold copies beyond its limits."""
        for tier, limits in self._limits.items():
            cold = [x for x in self._sessions.values() if x.ref.tenant == tenant and x.tier == tier]
            cold.sort(key=lambda x: x.last_used)
            limit = limits.of(tenant)
            while cold and limit is not None and self._held(tenant, tier) > limit:
                session = cold.pop(0)
                session.tier = None
                self._notify(Notice("lost", self._report(session), "limit"))

    async def sessions(self) -> list[SessionReport]:
        return [self._report(x) for x in self._sessions.values()]

    async def stats(self) -> EngineReport:
        if self._cases_left:
            self._cases_left -= 1
            self._measured_at = self._clock()
        elif self._num_unpacked:
            self._num_unpacked -= 1
            self._num_repacked += 1
        return EngineReport(
            hot_bytes=self._hot_bytes(),
            idle_hot_bytes=sum(x.hot_bytes for x in self._sessions.values() if not x.num_turns),
            hot_capacity_bytes=self._capacity_bytes,
            active_bytes=self._hot_bytes(),
            num_running=self.num_running,
            num_waiting=0,
            save_queue_bytes=0,
            tiers=[self._tier("ram"), self._tier("disk")],
            counters=dict(self._counters),
            codec=self._with_progress(),
            repacking=Repacking(
                self._num_unpacked,
                self._num_unpacked * UNPACKED_BYTES,
                self._num_repacked,
                self._num_repacked * UNPACKED_BYTES // 2,
            ),
        )

    def _tier(self, name: TierName) -> TierStats:
        there = [x.cold_bytes for x in self._sessions.values() if x.tier == name]
        return TierStats(name, sum(there), 1 << 30, len(there), 0, 0, True)

    async def adopt(self) -> CodecReport:
        return self.codec

    async def measure(self, order: CalibrationOrder | None = None) -> CodecReport:
        """Pretend to measure: each call of ``stats`` ends one case.

        After the last case, each call packs one session again.
        """
        self._cases_left = CASES
        self._num_unpacked = sum(x.tier is not None for x in self._sessions.values())
        return self._with_progress()

    def _with_progress(self) -> CodecReport:
        done = CASES - self._cases_left
        words = f"measuring: {done} of {CASES} cases" if self._cases_left else ""
        ended = MeasurementEnd(self._measured_at) if self._measured_at and not words else None
        return msgspec.structs.replace(self.codec, progress=words, ended=ended)

    @property
    def num_running(self) -> int:
        return sum(x.num_turns for x in self._sessions.values())

    def _hot_bytes(self) -> int:
        return sum(x.hot_bytes for x in self._sessions.values())

    def _report(self, session: FakeSession) -> SessionReport:
        return SessionReport(
            tenant=session.ref.tenant,
            id=session.ref.id,
            hot=session.hot,
            tier=session.tier,
            tokens=len(session.words),
            hot_bytes=session.hot_bytes,
            cold_bytes=session.cold_bytes,
            idle_s=self._clock() - session.last_used,
            pinned=session.pinned,
            busy=session.num_turns > 0,
            cold_tokens=len(session.words) if session.tier else 0,
        )


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Count the equal words at the start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
