"""Draws what a simulated fleet did: waits by where KV came from, and the shared tier's link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launch.calibrate.output_files import whole_file
from launch.simulation.figures import FleetFigures
from launch.simulation.link import WINDOW_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {
    "hot": "#d1495b",
    "ram": "#2e86ab",
    "disk": "#8d99ae",
    "redis": "#6a994e",
    "miss": "#222222",
}
LEAST_S: Final = 0.001
MOST_POINTS: Final = 500  # of a line


def draw_fleet(title: str, figures: FleetFigures, path: Path) -> None:
    """Draw one simulation. Raises ``LaunchError`` if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_waits(left, figures)
    _draw_link(right, figures)
    figure.suptitle(title, fontsize=10)
    with whole_file(path) as file:
        figure.savefig(file, dpi=130)


def _draw_waits(axes: Axes, figures: FleetFigures) -> None:
    for source, times in figures.first_tokens.items():
        few = _few(times)
        shares = [(i + 1) / len(few) for i in range(len(few))]
        label = f"{source} ({len(times) / max(1, figures.returns):.0%})"
        axes.plot([max(x, LEAST_S) for x in few], shares, color=COLORS[source], label=label)
    axes.set(xscale="log", xlabel="seconds to the first token", ylabel="share of these returns")
    axes.set_title("returns, by where their KV was", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _few(times: Sequence[float]) -> list[float]:
    step = max(1, len(times) // MOST_POINTS)
    return [*times[::step], times[-1]]


def _draw_link(axes: Axes, figures: FleetFigures) -> None:
    places = [i * WINDOW_S for i in range(len(figures.shared_bytes))]
    speeds = [x / WINDOW_S / 1e6 for x in figures.shared_bytes]
    axes.plot(places, speeds, color=COLORS["redis"], label="read and written")
    if figures.lost_at_s is not None:
        axes.axvline(figures.lost_at_s, color=COLORS["hot"], ls="--", label="a machine is lost")
    axes.set(xlabel="seconds", ylabel="MB each second, all machines", ylim=(0, None))
    axes.set_title("the shared tier", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
