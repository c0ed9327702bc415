"""Joins the reports of several replicas as if they were one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from engines.wire import EngineReport, TierReport, Welcome
from kvstore.stats import Repacking, most_different

_SUMS = (
    *("hot_bytes", "idle_hot_bytes", "hot_capacity_bytes", "active_bytes"),
    *("num_running", "num_waiting", "save_queue_bytes"),
)


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
        moves_budgets=False,
        limits_tenants=False,  # each of them is asked by itself
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
    tiers: dict[str, list[TierReport]] = {}
    for report in reports:
        for tier in report.tiers:
            tiers.setdefault(tier.name, []).append(tier)
    return msgspec.structs.replace(
        reports[0],
        **sums,
        tiers=[_joined_tier(x) for x in tiers.values()],
        counters=dict(Counter(counters)),
        requests=[y for x in reports for y in x.requests],
        repacking=_joined_repacking([x.repacking for x in reports]),
        members=most_different([x.members for x in reports]),
    )


def _joined_tier(tiers: Sequence[TierReport]) -> TierReport:
    return TierReport(
        tiers[0].name,
        sum(x.nbytes for x in tiers),
        sum(x.capacity_bytes for x in tiers),
        sum(x.num_blobs for x in tiers),
        sum(x.evictions for x in tiers),
        sum(x.errors for x in tiers),
        any(x.available for x in tiers),
    )


def _joined_repacking(parts: Sequence[Repacking]) -> Repacking:
    names = Repacking.__struct_fields__
    return Repacking(**{name: sum(getattr(x, name) for x in parts) for name in names})
