"""Draws what a benchmark found: throughput and first tokens against users, or sessions kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launch.bench.capacity import Found
from launch.bench.figures import PhaseFigures, Report
from launch.bench.presets import crowd_name
from launch.calibrate.output_files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE: Final = "#2e86ab"
RED: Final = "#d1495b"


def draw_report(report: Report, path: Path) -> None:
    """Draw a run. Raises ``LaunchError`` if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    crowds = [x for x in report.phases if x.name == crowd_name(x.users)]
    if len(crowds) > 1:
        _draw_speed(left, crowds)
    else:
        _draw_phases(left, report.phases)
    _draw_sources(right, report)
    figure.suptitle(f"{report.workload}: {report.model}", fontsize=10)
    with whole_file(path) as file:
        figure.savefig(file, dpi=130)


def draw_found(found: Found, path: Path) -> None:
    """Draw sessions that came back against sessions that were open."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    opened = [0, *(x.opened for x in found.rounds)]
    axes.plot(opened, opened, color="#999", lw=1, ls="--", label="all of them")
    axes.plot(opened, [0, *(x.kept for x in found.rounds)], "o-", color=BLUE, label="came back")
    axes.set(
        xlabel="sessions opened", ylabel="sessions that came back", title=f"{found.model}: capacity"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with whole_file(path) as file:
        figure.savefig(file, dpi=130)


def _draw_speed(axes: Axes, crowds: Sequence[PhaseFigures]) -> None:
    users = [x.users for x in crowds]
    axes.plot(users, [x.tokens_per_s for x in crowds], "o-", color=BLUE, label="all users")
    axes.plot(users, [x.tokens_per_s_user for x in crowds], "s-", color=RED, label="each user")
    axes.set(xlabel="users at once", ylabel="tokens of answers per second", ylim=(0, None))
    axes.set_title("throughput", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_phases(axes: Axes, phases: Sequence[PhaseFigures]) -> None:
    axes.barh([x.name for x in phases], [x.tokens_per_s for x in phases], color=BLUE)
    axes.invert_yaxis()
    axes.set(xlabel="tokens of answers per second")
    axes.set_title("throughput", fontsize=10)
    axes.grid(axis="x", alpha=0.3)


def _draw_sources(axes: Axes, report: Report) -> None:
    shown = [x for x in report.sources if x.ttft_s.p50 is not None]
    names = [f"{x.source} ({x.requests})" for x in shown]
    middle = [x.ttft_s.p50 or 0.0 for x in shown]
    slow = [max(0.0, (x.ttft_s.p90 or 0.0) - (x.ttft_s.p50 or 0.0)) for x in shown]
    axes.barh(names, middle, color=BLUE, xerr=[[0.0] * len(shown), slow], ecolor="#555", capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="seconds to the first token: median, and 90th percentile")
    axes.set_title("by where the prompt's KV came from", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
