"""``thermocline plan``: how many sessions fit here, or on other machines, in words and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from launch.capacity.machines import machine_plans
from launch.capacity.picture import bars_of, draw_bars, machine_bars
from launch.cli import options
from launch.cli.plan_table import print_machines, print_plan
from launch.cli.printing import print_json
from launch.errors import UsageError
from launch.plan.capacity_plan import plan_of
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


def run_plan(context: typer.Context, wanted: Wanted, environ: Mapping[str, str]) -> None:
    """Print the plan, and draw it where that is asked. Raises ``UsageError``, ``LaunchError``."""
    if wanted.plot is not None:
        from launch.calibrate.plot import check_path

        check_path(wanted.plot)
    if wanted.model and context.params["model"]:
        raise UsageError("name the model once, as an argument or with --model")
    context.params["model"] = wanted.model or context.params["model"]
    if wanted.machines and wanted.sessions is not None:
        raise UsageError("--sessions counts for this machine; leave it out with --machines")
    if wanted.sessions is not None:
        context.params["session_context"] = _one_length(wanted.lengths)
    if wanted.weights and not wanted.machines:
        raise UsageError("--weights is for --machines; this machine's files say what they take")
    if wanted.machines:
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
    if effective.engines and (wanted.as_json or wanted.plot):
        raise UsageError("--json and --plot are for one model; name it with --model")
    for x in effective.engines:
        typer.echo(f"{x.entry.name} ({x.entry.load}), with its part of this machine:")
        _print_plan(x.effective, wanted)
    if effective.engines:
        return
    found = plan_of(effective, wanted.lengths)
    if wanted.as_json:
        print_json(found)
    else:
        for line in effective.capacity:
            print(line)
        print_plan(found)
    if wanted.plot is not None:
        draw_bars(f"{found.model}: sessions on this machine", bars_of(found), wanted.plot)


def _print_machines(effective: EffectiveSettings, wanted: Wanted) -> None:
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
