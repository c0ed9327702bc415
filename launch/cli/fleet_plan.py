"""``thermocline plan --fleet N``: what many users see of several machines, simulated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from launch.errors import UsageError
from launch.printing import print_json, print_table, say
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import parse_bytes, parse_duration, show_bytes

if TYPE_CHECKING:
    from launch.simulation.conditions import Conditions
    from launch.simulation.figures import FleetFigures, LostMachine, Seconds, SharedTier

MOST_MACHINES: Final = 1_000
MOST_USERS: Final = 100_000
CONTEXT: Final = 8192
FOR_DRAWING: Final = ("shared_bytes", "first_tokens", "lost_at_s")
_FLEET: Final = re.compile(r"(\d+)(?:\s*x\s*(.+))?")
NO_SHARED: Final = "no shared tier: name its speed with --bandwidth, such as 1.2GB (each second)"


@dataclass(frozen=True)
class Wanted:
    """The options of ``plan`` that are no settings, as they were given."""

    model: str | None
    sessions: int | None
    lengths: str | None
    machines: bool
    weights: str | None
    plot: Path | None
    as_json: bool
    fleet: str | None
    users: int | None
    think: str | None
    bandwidth: str | None
    prefill: float | None


def print_fleet(effective: EffectiveSettings, wanted: Wanted, fleet: str) -> None:
    """Simulate a fleet and print its figures. Raises ``UsageError``, ``LaunchError``."""
    from launch.simulation.figures import draw_fleet, simulate

    conditions = _conditions(effective, wanted, fleet)
    figures = simulate(conditions)
    names = ", ".join(x.name for x in conditions.models)
    title = f"{names}: {conditions.machines} machines, {conditions.users} users (simulated)"
    if wanted.as_json:
        tree = msgspec.to_builtins(figures)
        print_json({x: y for x, y in tree.items() if x not in FOR_DRAWING})
    else:
        say(title)
        _print(conditions, figures)
    if wanted.plot is not None:
        draw_fleet(title, figures, wanted.plot)


def _conditions(effective: EffectiveSettings, wanted: Wanted, fleet: str) -> Conditions:
    from launch.simulation.conditions import Habits, Speeds, conditions_of

    found = _FLEET.fullmatch(fleet.strip())
    if found is None or not 1 <= int(found[1]) <= MOST_MACHINES:
        raise UsageError(
            f"--fleet {fleet}: write a number of machines up to {MOST_MACHINES}, such as 8,"
            " or 8xGB10"
        )
    machines = int(found[1])
    users = machines * 50 if wanted.users is None else wanted.users
    if not 1 <= users <= MOST_USERS:
        raise UsageError(f"--users {users}: up to {MOST_USERS} can be simulated")
    try:
        habits = Habits(
            think_s=parse_duration(wanted.think or "60s"), context=int(wanted.lengths or CONTEXT)
        )
        speeds = Speeds(prefill_tokens_s=wanted.prefill or Speeds().prefill_tokens_s)
        bandwidth = parse_bytes(wanted.bandwidth) if wanted.bandwidth else 0
        if min(habits.think_s, habits.context - 1, speeds.prefill_tokens_s) <= 0:
            raise ValueError("numbers above 0 are taken")
    except ValueError as error:
        raise UsageError(f"--think, --context, --prefill or --bandwidth: {error}") from None
    return conditions_of(
        effective,
        machines,
        users,
        kind=found[2] or "",
        habits=habits,
        speeds=speeds,
        shared_bytes_s=bandwidth,
    )


def _print(conditions: Conditions, figures: FleetFigures) -> None:
    habits, speeds = conditions.habits, conditions.speeds
    say(
        f"assumed: {habits.turns} turns up to {habits.context} tokens, {habits.think_s:g} s of"
        f" thought before each, answers of {habits.answer_tokens} tokens at"
        f" {speeds.answer_tokens_s:g} a second; prefill {speeds.prefill_tokens_s:g} tokens a second"
    )
    for x in conditions.models:
        say(
            f"each machine: {x.name} with hot {show_bytes(x.hot_bytes)}, RAM"
            f" {show_bytes(x.ram_bytes)}, disk {show_bytes(x.disk_bytes)}"
        )
    say(
        f"\n{figures.hit_rate:.1%} of {figures.returns} returns found their KV,"
        f" {figures.token_hit_rate:.1%} of its tokens"
    )
    rows = [
        _row(source, figures.sources[source] / max(1, figures.returns), x)
        for source, x in figures.by_source.items()
    ]
    rows.append(_row("all returns", 1.0, figures.first_token))
    rows.append(_row("new conversations", None, figures.new_first_token))
    columns = ("KV from", "returns", "first token p50", "p99")
    print_table(columns, rows, right=columns[1:])
    turns = max(1, figures.turns)
    say(f"{figures.moves['load'] / turns:.1%} of turns went elsewhere since their home was busy")
    say(_shared(figures.shared) if figures.shared else NO_SHARED)
    if figures.lost is not None:
        say(_lost(figures.lost, conditions))


def _row(name: str, share: float | None, times: Seconds) -> list[str]:
    part = "" if share is None else f"{share:.1%}"
    return [name, part, f"{times.p50:.2f} s", f"{times.p99:.2f} s"]


def _shared(x: SharedTier) -> str:
    return (
        f"shared tier: {show_bytes(x.read_bytes_s)} read and {show_bytes(x.written_bytes_s)}"
        f" written a second, {show_bytes(x.peak_bytes_s)} at most: {x.used:.0%} of its speed; about"
        f" {x.full_at_users} such users would use all of it"
    )


def _lost(x: LostMachine, conditions: Conditions) -> str:
    where = ", ".join(f"{count} from {name}" for name, count in sorted(x.sources.items()))
    where = where.replace("from miss", "computed again")
    return (
        f"one of {conditions.machines} machines lost: {x.turns_cut} turns asked once more;"
        f" {x.sessions} sessions came back elsewhere ({where}), first token p50"
        f" {x.first_token.p50:.2f} s, p99 {x.first_token.p99:.2f} s, {x.extra_s:+.2f} s on average"
    )
