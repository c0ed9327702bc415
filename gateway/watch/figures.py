"""The figures of memory and of the quality gate in a snapshot.

They are sums over sessions, and the engine's own reports. Only admins see figures of the whole
machine, which would show a tenant how busy the others are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from engines.base import EngineReport, TierName
from engines.calibration.gate.rules import CHAIN_FACTOR, LEAST_CHAIN_TOP1, LEAST_TOP1
from engines.wire import CodecReport, TierStats
from gateway.watch.shape import (
    CodecVerdict,
    HotMemory,
    MemoryStatus,
    QualityBound,
    QualityRow,
    QualityStatus,
    TierStatus,
)
from gateway.watch.tally import Tally
from kvstore.codecs.names import EXACT
from scheduler.session import AWAY, Session, State

# The sizes of the presets that a first measurement chooses between.
EXPECTED: Final = "about 1/5 to 1/11 of bf16"


class TenantSums:
    """The sums over one tenant's sessions."""

    def __init__(self) -> None:
        self.num_sessions = self.hot_bytes = self.cold_bytes = 0


class Sums:
    """The sums over the sessions that a reader may see."""

    def __init__(self) -> None:
        self.of: defaultdict[str, TenantSums] = defaultdict(TenantSums)  # by tenant
        self.states: Counter[str] = Counter()
        self.asleep: Counter[TierName] = Counter()
        self.copied: Counter[TierName] = Counter()  # not cold, with a copy in the tier
        self.tier_bytes: Counter[TierName] = Counter()
        self.hot_bytes = self.idle_bytes = self.cold_bytes = self.bf16_bytes = 0

    def add(self, session: Session, hot_bytes: int, bf16_bytes: int, is_away: bool = False) -> None:
        """Count a session.

        Args:
            hot_bytes: the size of its live KV, which counts only if it is hot.
            bf16_bytes: the size that its cold KV would have in bf16.
            is_away: its KV was in the memory of an engine that is not running now.
        """
        own = self.of[session.ref.tenant]
        own.num_sessions += 1
        self.states[AWAY if is_away else session.state.value] += 1
        if is_away:
            return
        own.cold_bytes += session.cold_bytes
        if session.hot:
            own.hot_bytes += hot_bytes
            self.hot_bytes += hot_bytes
        if session.state is State.IDLE:
            self.idle_bytes += hot_bytes
        self.cold_bytes += session.cold_bytes
        self.bf16_bytes += bf16_bytes
        if session.tier is not None:
            sleeps = session.state is State.COLD
            (self.asleep if sleeps else self.copied)[session.tier] += 1
            self.tier_bytes[session.tier] += session.cold_bytes


def memory_shown(
    sums: Sums,
    report: EngineReport | None,
    codec: CodecReport | None,
    tally: Tally,
    water: tuple[float, float],
    *,
    admin: bool,
) -> MemoryStatus:
    """Return the memory part of a snapshot.

    Args:
        report: the engine's latest report; None if it has sent none.
        water: the scheduler's high and low water marks.
        admin: True for readers who see figures of the whole machine.
    """
    whole = report if admin else None
    measures = codec is not None and bool(codec.progress)
    hot = HotMemory(
        bytes=whole.hot_bytes if whole else sums.hot_bytes,
        idle_bytes=whole.idle_hot_bytes if whole else sums.idle_bytes,
        capacity_bytes=report.hot_capacity_bytes if report else None,
        high_water=water[0],
        low_water=water[1],
        save_queue_bytes=whole.save_queue_bytes if whole else None,
        measuring_bytes=max(0, whole.hot_bytes - sums.hot_bytes) if whole and measures else 0,
    )
    return MemoryStatus(
        hot=hot,
        tiers=[_tier(x, sums, codec, admin) for x in (report.tiers if report else ())],
        cold_bytes=sums.cold_bytes,
        bf16_bytes=sums.bf16_bytes or (None if sums.cold_bytes else 0),
        sessions=dict(sorted(sums.states.items())),
        outcomes={source: dict(reasons) for source, reasons in tally.outcomes.items()},
        departures={place: dict(whys) for place, whys in tally.departures.items()},
        repacking=whole.repacking if whole else None,
    )


def _tier(tier: TierStats, sums: Sums, codec: CodecReport | None, admin: bool) -> TierStatus:
    return TierStatus(
        name=tier.name,
        bytes=tier.nbytes if admin else sums.tier_bytes[tier.name],
        profile_bytes=tier.profile_bytes if admin else 0,
        sessions=sums.asleep[tier.name],
        hot_sessions=sums.copied[tier.name],
        capacity_bytes=tier.capacity_bytes,
        blobs=tier.num_blobs if admin else None,
        evictions=tier.evictions if admin else None,
        errors=tier.errors if admin else None,
        available=tier.available,
        codec=codec.id or None if codec else None,
    )


def quality_shown(
    codec: CodecReport | None, can_measure: bool, history: list[CodecVerdict]
) -> QualityStatus | None:
    """Return the quality part of a snapshot; None until the engine has reported its codec."""
    if codec is None:
        return None
    fields = [x for x in QualityRow.__struct_fields__ if x != "in_use"]
    return QualityStatus(
        name=codec.name,
        codec=codec.id,
        exact=codec.name == EXACT,
        expected=EXPECTED if codec.unmeasured and codec.progress else "",
        why=codec.why,
        measured=not codec.unmeasured,
        progress=codec.progress,
        can_measure=can_measure,
        bound=_bound(codec.max_kl) if codec.max_kl is not None else None,
        rows=[
            QualityRow(in_use=x.codec_id == codec.id, **{name: getattr(x, name) for name in fields})
            for x in (*codec.rows, *codec.others)
        ],
        history=history,
    )


def _bound(max_kl: float) -> QualityBound:
    return QualityBound(max_kl, LEAST_TOP1, CHAIN_FACTOR * max_kl, LEAST_CHAIN_TOP1)
