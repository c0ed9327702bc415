"""Makes the figures of memory: the engine's own for an admin, sums of own sessions for a tenant.

Figures of the whole machine would show a tenant how busy the others are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from engines.base import EngineReport
from engines.wire import CodecReport, TierReport
from gateway.live.rows import Key
from gateway.live.shape import HotShown, MemoryShown, RepackingShown, TierShown
from gateway.live.sums import Sums

Counts: TypeAlias = Mapping[str, Mapping[str, int]]


def memory_shown(
    sums: Sums[Key],
    report: EngineReport | None,
    codec: CodecReport | None,
    outcomes: Counts,
    departures: Counts,
    water: tuple[float, float],
    *,
    admin: bool,
) -> MemoryShown:
    """Show memory.

    Args:
        report: the engine's latest; None if it has sent none.
        water: the scheduler's high and low mark.
    """
    tiers = report.tiers if report else []
    return MemoryShown(
        hot=_hot(sums, report, water, admin),
        tiers=[_tier(x, sums, codec, admin) for x in tiers],
        cold_bytes=sums.cold_bytes,
        bf16_bytes=sums.bf16_bytes or (None if sums.cold_bytes else 0),
        sessions=dict(sorted(sums.states.items())),
        outcomes={source: dict(reasons) for source, reasons in outcomes.items()},
        departures={place: dict(whys) for place, whys in departures.items()},
        repacking=_repacking(report) if report and admin else None,
    )


def _repacking(report: EngineReport) -> RepackingShown:
    now = report.repacking
    return RepackingShown(now.sessions_left, now.bytes_left, now.sessions_done, now.freed_bytes)


def _hot(
    sums: Sums[Key], report: EngineReport | None, water: tuple[float, float], admin: bool
) -> HotShown:
    shown = report if admin else None
    return HotShown(
        bytes=shown.hot_bytes if shown else sums.hot_bytes,
        idle_bytes=shown.idle_hot_bytes if shown else sums.idle_bytes,
        capacity_bytes=report.hot_capacity_bytes if report else None,
        high_water=water[0],
        low_water=water[1],
        save_queue_bytes=shown.save_queue_bytes if shown else None,
    )


def _tier(tier: TierReport, sums: Sums[Key], codec: CodecReport | None, admin: bool) -> TierShown:
    return TierShown(
        name=tier.name,
        bytes=tier.nbytes if admin else sums.tier_bytes[tier.name],
        sessions=sums.tier_sessions[tier.name],
        capacity_bytes=tier.capacity_bytes,
        blobs=tier.num_blobs if admin else None,
        evictions=tier.evictions if admin else None,
        errors=tier.errors if admin else None,
        available=tier.available,
        codec=codec.tiers.get(tier.name) if codec else None,
    )
