"""``thermocline plan``: how many sessions fit here, or on other machines, in words and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from launch.capacity.machines import machine_plans
from launch.capacity.picture import Bars, bars_of, draw_bars, machine_bars
from launch.cli import options
from launch.cli.plans.fleet_plan import FleetWanted, print_fleet
from launch.cli.plans.plan_table import print_machines, print_plan
from launch.cli.printing import print_json
from launch.errors import UsageError
from launch.plan.capacity_plan import Plan, plan_of
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import parse_bytes


@dataclass(frozen=True)
class Wanted:
    """The wishes of a plan that are no settings."""

    model: str | None
    sessions: int | None
    lengths: str | None
    machines: bool
    weights: str | None
    plot: Path | None
    as_json: bool
    fleet: FleetWanted


def run_plan(context: typer.Context, wanted: Wanted, environ: Mapping[str, str]) -> None:
    """Print the plan, and draw it where that is asked. Raises ``UsageError``, ``LaunchError``."""
    if wanted.plot is not None:
        from launch.calibrate.plot import check_path

        check_path(wanted.plot)
    if wanted.model and context.params["model"]:
        raise UsageError("name the model once, as an argument or with --model")
    context.params["model"] = [wanted.model] if wanted.model else context.params["model"]
    if wanted.machines and wanted.sessions is not None:
        raise UsageError("--sessions counts for this machine; leave it out with --machines")
    if wanted.sessions is not None:
        context.params["session_context"] = _one_length(wanted.lengths)
    if wanted.weights and not wanted.machines:
        raise UsageError("--weights is for --machines; this machine's files say what they take")
    of_fleet = (
        wanted.fleet.users,
        wanted.fleet.think,
        wanted.fleet.bandwidth,
        wanted.fleet.prefill,
    )
    if any(x is not None for x in of_fleet) and not wanted.fleet.fleet:
        raise UsageError("--users, --think, --bandwidth and --prefill are for --fleet")
    if wanted.fleet.fleet:
        if wanted.machines or wanted.sessions is not None:
            raise UsageError("--fleet simulates users; leave out --machines and --sessions")
        effective = options.fitted(context, environ, as_profiled=True)
        print_fleet(effective, wanted.fleet, wanted.plot, wanted.as_json)
    elif wanted.machines:
        _print_machines(options.chosen(context, environ), wanted)
    else:
        _print_plan(options.fitted(context, environ, as_profiled=True), wanted)


def _one_length(lengths: str | None) -> int:
    try:
        return int(lengths or "")
    except ValueError:
        raise UsageError(
            "--sessions wants one length of session beside it, such as --context 8192"
        ) from None


def _print_plan(effective: EffectiveSettings, wanted: Wanted) -> None:
    several = {x.entry.name: plan_of(x.effective, wanted.lengths) for x in effective.engines}
    found = several or {"": plan_of(effective, wanted.lengths)}
    if wanted.as_json:
        print_json(several or found[""])
    else:
        for line in effective.capacity:
            print(line)
        loads = {x.entry.name: x.entry.load for x in effective.engines}
        for name, plan in found.items():
            if name:
                typer.echo(f"{name} ({loads[name]}), with its part of this machine:")
            print_plan(plan)
    if wanted.plot is not None:
        names = ", ".join(several or [found[""].model])
        draw_bars(f"{names}: sessions on this machine", _bars(found), wanted.plot)


def _bars(plans: Mapping[str, Plan]) -> Bars:
    """The bars of one plan, or of several, each with its name."""
    return [
        (f"{name}, {context}" if name else context, counts)
        for name, plan in plans.items()
        for context, counts in bars_of(plan)
    ]


def _print_machines(effective: EffectiveSettings, wanted: Wanted) -> None:
    if effective.engines:
        raise UsageError("--machines counts for one model; name it with --model")
    try:
        weights = parse_bytes(wanted.weights) if wanted.weights else None
        lengths = [int(x) for x in wanted.lengths.split(",")] if wanted.lengths else None
    except ValueError as error:
        raise UsageError(f"--weights or --context: {error}") from None
    if lengths is not None and min(lengths) < 1:
        raise UsageError("--context: a session has one token or more")
    rows = machine_plans(effective, lengths, weights)
    name = Path(effective.settings.engine.model or "the sample model").name
    if wanted.as_json:
        print_json(rows)
    else:
        print_machines(name, rows)
    if wanted.plot is not None:
        draw_bars(f"{name}: sessions kept alive (counted)", machine_bars(rows), wanted.plot)
