"""Draws a plan: how many sessions stay awake, sleep in memory and sleep on disk, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launch.calibrate.plot import whole_file
from launch.plan.capacity_plan import Plan
from launch.plan.machines import MachinePlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {
    "hot": "#d1495b", "ram": "#2e86ab", "disk": "#8d99ae", "redis": "#6a994e"
}  # fmt: skip
LABELS: Final = {
    "hot": "awake at once",
    "ram": "asleep in memory",
    "disk": "asleep on disk",
    "redis": "asleep in Redis",
}
Bars = Sequence[tuple[str, dict[str, int]]]  # a name, and sessions by tier


def bars_of(plan: Plan) -> Bars:
    """The bars of a plan: one group for each length of session."""
    return [
        (
            f"{x.context} tokens",
            {"hot": x.hot_sessions, **{tier.tier: tier.sessions for tier in x.served}},
        )
        for x in plan.contexts
    ]


def machine_bars(rows: Sequence[MachinePlan]) -> Bars:
    """The bars of several machines."""
    several = len({row.context for row in rows}) > 1
    return [
        (
            f"{row.machine}, {row.context} tokens" if several else row.machine,
            {"hot": row.hot, "ram": row.ram, "disk": row.disk},
        )
        for row in rows
        if not row.refused
    ]


def draw_bars(title: str, bars: Bars, path: Path) -> None:
    """Draw ``bars`` into ``path``. Raises ``LaunchError`` if it cannot be written."""
    from matplotlib.figure import Figure

    tiers = list(dict.fromkeys(tier for _, counts in bars for tier in counts))
    figure = Figure(figsize=(7.5, 1.2 + 0.22 * len(bars) * (len(tiers) + 1)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(tiers))
    for number, tier in enumerate(tiers):
        _draw_tier(axes, bars, tier, number, height)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    most = max((count for _, counts in bars for count in counts.values()), default=1)
    axes.set(xlabel="sessions", title=title, xlim=(0, 1.12 * max(1, most)))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, loc="outside lower center", ncols=max(1, len(tiers)))
    with whole_file(path) as file:
        figure.savefig(file, dpi=130)


def _draw_tier(axes: Axes, bars: Bars, tier: str, number: int, height: float) -> None:
    places = [i - 0.4 + height * (number + 0.5) for i in range(len(bars))]
    counts = [x.get(tier, 0) for _, x in bars]
    drawn = axes.barh(places, counts, height * 0.9, color=COLORS[tier], label=LABELS[tier])
    axes.bar_label(drawn, [f"{x:,}" for x in counts], fontsize=7, padding=2)
