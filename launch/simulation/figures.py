"""The figures of a simulated fleet, and their picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec

from launch.calibrate.plot import drawing, finish
from launch.simulation.conditions import Conditions
from launch.simulation.machine import SOURCES
from launch.simulation.simulation import Simulation, Turn
from launch.simulation.sized_tier import WINDOW_S, Link

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


class Seconds(msgspec.Struct, frozen=True):
    """Times to the first token."""

    p50: float = 0.0
    p99: float = 0.0
    mean: float = 0.0


class SharedTier(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of the link to the shared tier."""

    read_bytes_s: float
    written_bytes_s: float
    peak_bytes_s: float  # in the busiest ten seconds
    used: float  # of the link, on average, 0 to 1
    full_at_users: int  # as many users of the same habits would use all of it


class LostMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the loss of one machine."""

    sessions: int  # that had their home there, and came back
    sources: dict[str, int]  # where their next turns found them
    turns_cut: int  # that were being answered, and were asked once more
    first_token: Seconds  # of the next turns of these sessions
    extra_s: float  # by which these waited longer than other returns, on average


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. ``returns`` are turns of sessions of which something had been stored."""

    machines: int
    users: int
    turns: int
    seconds: float  # that were simulated
    returns: int
    sources: dict[str, int]  # of returns
    hit_rate: float  # of returns, those that found their KV, or some of it, 0 to 1
    token_hit_rate: float  # of the tokens that returns could have reused
    first_token: Seconds  # of returns
    by_source: dict[str, Seconds]
    new_first_token: Seconds  # of the first turns of conversations
    moves: dict[str, int]
    shared: SharedTier | None
    lost: LostMachine | None
    # For the picture: each ten seconds' bytes, and the times of returns in order.
    shared_bytes: list[int]
    first_tokens: dict[str, list[float]]
    lost_at_s: float | None


def simulate(conditions: Conditions) -> FleetFigures:
    """Run a simulation, and return its figures."""
    turns: list[Turn] = []
    simulation = Simulation(conditions, turns.append)
    simulation.run()
    return figures_of(conditions, simulation, turns)


def figures_of(
    conditions: Conditions, simulation: Simulation, turns: Sequence[Turn]
) -> FleetFigures:
    """Count what the turns of a simulation show."""
    counted = [x for x in turns if x.counted]
    returns = [x for x in counted if x.is_return and not x.lost_home and not x.was_cut]
    times = {source: [] for source in SOURCES}  # type: dict[str, list[float]]
    for turn in returns:
        times[turn.source].append(turn.first_token_s)
    could = sum(_reusable(x, conditions) for x in returns)
    return FleetFigures(
        machines=conditions.machines,
        users=conditions.users,
        turns=len(turns),
        seconds=simulation.seconds,
        returns=len(returns),
        sources={name: len(x) for name, x in times.items()},
        hit_rate=_share(sum(x.is_hit for x in returns), len(returns)),
        token_hit_rate=_share(sum(x.reused_tokens for x in returns), could),
        first_token=_seconds(x.first_token_s for x in returns),
        by_source={name: _seconds(x) for name, x in times.items() if x},
        new_first_token=_seconds(x.first_token_s for x in counted if not x.is_return),
        moves=dict(simulation.num_moves),
        shared=_shared(conditions, simulation) if conditions.shared_bytes_s else None,
        lost=_lost(counted, returns) if simulation.lost_at_s is not None else None,
        shared_bytes=_windows(simulation.link, simulation.seconds),
        first_tokens={name: sorted(x) for name, x in times.items() if x},
        lost_at_s=simulation.lost_at_s,
    )


def _reusable(turn: Turn, conditions: Conditions) -> int:
    habits = conditions.habits
    return turn.prompt_tokens - (habits.turn_tokens - habits.answer_tokens)


def _shared(conditions: Conditions, simulation: Simulation) -> SharedTier:
    link, first = simulation.link, int(simulation.warm_s / WINDOW_S) + 1
    seconds = max(simulation.seconds - first * WINDOW_S, WINDOW_S)
    read = sum(x for i, x in link.read_bytes.items() if i >= first)
    written = sum(x for i, x in link.written_bytes.items() if i >= first)
    used = (read + written) / seconds / conditions.shared_bytes_s
    return SharedTier(
        read_bytes_s=read / seconds,
        written_bytes_s=written / seconds,
        peak_bytes_s=max(_windows(link, simulation.seconds)[first:], default=0) / WINDOW_S,
        used=used,
        full_at_users=int(conditions.users / used) if used else 0,
    )


def _windows(link: Link, seconds: float) -> list[int]:
    both = Counter(link.read_bytes) + Counter(link.written_bytes)
    return [both[i] for i in range(int(seconds / WINDOW_S) + 1)]


def _lost(counted: Sequence[Turn], returns: Sequence[Turn]) -> LostMachine:
    cut = [x for x in counted if x.was_cut]
    theirs = [x for x in counted if x.lost_home]
    first_token = _seconds(x.first_token_s for x in theirs)
    others = fmean(x.first_token_s for x in returns) if returns else 0.0
    return LostMachine(
        sessions=len(theirs),
        sources=dict(Counter(x.source for x in theirs)),
        turns_cut=len(cut),
        first_token=first_token,
        extra_s=first_token.mean - others if theirs else 0.0,
    )


def _seconds(times: Iterable[float]) -> Seconds:
    ordered = sorted(times)
    if not ordered:
        return Seconds()
    last = len(ordered) - 1
    return Seconds(ordered[last // 2], ordered[round(last * 0.99)], fmean(ordered))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def draw_fleet(title: str, figures: FleetFigures, path: Path) -> None:
    """Draw one simulation. Raises ``LaunchError`` if the file cannot be written."""
    with drawing(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2)
        _draw_waits(left, figures)
        _draw_link(right, figures)
        figure.suptitle(title, fontsize=10)


def _draw_waits(axes: Axes, figures: FleetFigures) -> None:
    for source, times in figures.first_tokens.items():
        few = _few(times)
        shares = [(i + 1) / len(few) for i in range(len(few))]
        label = f"{source} ({len(times) / max(1, figures.returns):.0%})"
        axes.plot([max(x, LEAST_S) for x in few], shares, color=COLORS[source], label=label)
    axes.set(xscale="log", xlabel="seconds to the first token", ylabel="share of these returns")
    axes.set_title("returns, by where their KV was", fontsize=10)
    finish(axes)


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
    finish(axes)
