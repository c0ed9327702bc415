"""``thermocline plan``: prints how many sessions fit on this machine or on others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.session import TIERS
from launch.cli import options
from launch.errors import UsageError
from launch.printing import print_json, print_table, say
from launch.settings.units import parse_bytes, show_bytes

if TYPE_CHECKING:
    from launch.plan.capacity_plan import CapacityPlan, ColdPlan, ContextPlan
    from launch.plan.machines import MachinePlan
    from launch.settings.effective_settings import EffectiveSettings

SERVED: Final = ("tokens", "tier", "codec", "bytes", "states", "vs live", "sessions")
MACHINES: Final = (
    "machine", "tokens", "alive", "without sleep", "reserve", "for KV", "awake", "in RAM",
    "on disk", "codec",
)  # fmt: skip
BAR_WIDTH: Final = 40
BAR: Final = "█"
RATIOS: Final = ("KV vs bf16", "all vs bf16")
LABELS: Final = {"hot": "awake at once"} | {x: f"asleep {y.place}" for x, y in TIERS.items()}


def plan(
    context: typer.Context,
    named: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.")
    ] = None,
    model: options.Models = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Show the budgets that this many sessions of --context need."
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--context", metavar="N,N", help="Tokens per session, such as 2048,8192."),
    ] = None,
    machines: Annotated[
        bool,
        typer.Option("--machines", help="Plan for a GB10, GPUs and Macs instead of this machine."),
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Size of the weights; default: that of their files."),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1,
            max=32,
            help="Assume weights of this many bits; default: as they are.",
        ),
    ] = None,
    hot: options.Hot = None,
    ram: options.Ram = None,
    disk: options.Disk = None,
    codec: options.Codec = None,
    profile: options.Profile = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
    as_json: options.Json = False,
) -> None:
    """Say beforehand how many sessions fit, from config.json alone."""
    from launch.plan.served_model import weights_at

    if named and model:
        raise UsageError("name the model once, as an argument or with --model")
    context.params["model"] = [named] if named else model
    if machines and sessions is not None:
        raise UsageError("--sessions is for this machine; leave it out with --machines")
    if sessions is not None:
        context.params["session_context"] = _one_length(lengths)
    if weights and bits:
        raise UsageError("--weights gives the size of the weights; leave --bits out")
    try:
        nbytes = parse_bytes(weights) if weights else None
    except ValueError as error:
        raise UsageError(f"--weights: {error}") from None
    if machines:
        _plan_machines(options.chosen(context, os.environ), lengths, nbytes, bits, as_json)
        return
    if nbytes or bits:
        asked = options.chosen(context, os.environ, as_profiled=True)
        if asked.engines:
            raise UsageError("--weights and --bits are for one model; name it with --model")
        nbytes = weights_at(asked, bits) if bits else nbytes
    fitted = options.fitted(context, os.environ, as_profiled=True, planned_weights=nbytes)
    _plan_here(fitted, lengths, as_json)


def _one_length(lengths: str | None) -> int:
    try:
        return int(lengths or "")
    except ValueError:
        raise UsageError("--sessions needs one length of session, such as --context 8192") from None


def _plan_here(effective: EffectiveSettings, lengths: str | None, as_json: bool) -> None:
    from launch.plan.capacity_plan import plan_of

    several = {x.entry.name: plan_of(x.effective, lengths) for x in effective.engines}
    found = several or {"": plan_of(effective, lengths)}
    if as_json:
        print_json(several or found[""])
        return
    if not any(x.refused for x in found.values()):
        for line in effective.capacity:
            say(line)
    loads = {x.entry.name: x.entry.load for x in effective.engines}
    for name, plan in found.items():
        if name:
            say(f"{name} ({loads[name]}), with its part of this machine:")
        print_plan(plan)


def _plan_machines(
    effective: EffectiveSettings,
    lengths: str | None,
    weights: int | None,
    bits: float | None,
    as_json: bool,
) -> None:
    """Print how many sessions of a model several usual machines would keep."""
    from launch.plan.machines import machine_plans

    if effective.engines:
        raise UsageError("--machines is for one model; name it with --model")
    try:
        contexts = [int(x) for x in lengths.split(",")] if lengths else None
    except ValueError as error:
        raise UsageError(f"--context: {error}") from None
    if contexts is not None and min(contexts) < 1:
        raise UsageError("--context: a session has one token or more")
    rows = machine_plans(effective, contexts, weights, bits)
    if as_json:
        print_json(rows)
        return
    name = Path(effective.settings.engine.model or "the sample model").name
    say(f"{name}: sessions that other machines would keep alive (counted, not measured)")
    estimated = ", estimated from config.json" if rows[0].weights_estimated else ""
    say(f"weights: {show_bytes(rows[0].weights_bytes)}{estimated}")
    print_table(MACHINES, [_machine(row) for row in rows], right=MACHINES[1:9])
    say(
        "alive: sessions that come back, awake or asleep. without sleep: those that the same memory"
        "\nholds live in bf16. reserve: beside weights and KV, for the system and for work."
    )


def _machine(row: MachinePlan) -> list[str]:
    if row.refused:
        return [row.machine, str(row.context), *[""] * 7, row.refused]
    sizes = [show_bytes(row.reserve_bytes), show_bytes(row.kv_bytes)]
    counts = [f"{x:,}" for x in (row.alive, row.hot_only, row.hot, row.ram, row.disk)]
    return [row.machine, str(row.context), *counts[:2], *sizes, *counts[2:], row.codec]


def print_plan(plan: CapacityPlan) -> None:
    if plan.refused:
        say(plan.refused)
        return
    for x in plan.contexts:
        say(
            f"alive: {x.alive:,} sessions of {x.context:,} tokens instead of {x.without_sleep:,}"
            " without sleep"
        )
    say(
        f"{plan.model} ({plan.model_type}): {plan.growing_layers} growing layers,"
        f" {show_bytes(plan.live_bytes_per_token)} per token live in {plan.dtype}"
    )
    if plan.state_bytes:
        say(
            f"and {show_bytes(plan.state_bytes)} of state that does not grow"
            f" ({plan.window_layers} sliding windows, {plan.state_layers} recurrent layers)"
        )
    if (memory := plan.memory) is not None:
        say(
            f"memory: {show_bytes(memory.free)} free here = {show_bytes(memory.reserve)} left to"
            f" the system and to work + {show_bytes(memory.weights)} weights +"
            f" {show_bytes(memory.kv)} KV"
        )
    say("budgets: " + ", ".join(f"{k} {show_bytes(v)}" for k, v in plan.budgets.items()))
    usable = f"usable context: {plan.usable_context} of {plan.wanted_context} tokens"
    if plan.usable_context < plan.wanted_context:
        usable += f"; all of them need --hot {-(-plan.wanted_hot_bytes >> 20)}MiB"
    say(usable)
    for note in plan.notes:
        say(f"note: {note}")
    say()
    _print_filled(SERVED, [x for context in plan.contexts for x in _served(context)], SERVED[2:])
    say()
    _print_bars(plan.contexts)
    say("\nwhat each codec would take:")
    tiers = [tier for tier in plan.budgets if tier != "hot"]
    columns = ("tokens", "kept", "KL", "bytes", "states", *RATIOS, "per GiB", "hot", *tiers)
    rows = [row for context in plan.contexts for row in _rows(context, tiers)]
    _print_filled(columns, rows, [x for x in columns if x != "kept"])
    refusals = {cold.codec: cold.refused for x in plan.contexts for cold in x.cold if cold.refused}
    for codec, reason in refusals.items():
        say(f"{codec}: {reason}")


def _print_filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    """Print a table without its empty columns."""
    filled = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    print_table(
        [columns[i] for i in filled], [[row[i] for i in filled] for row in rows], right=right
    )


def _print_bars(contexts: Sequence[ContextPlan]) -> None:
    """Print the numbers of sessions as bars with one common scale."""
    counts = [
        (
            f"{x.context} tokens",
            [("hot", x.hot_sessions), *((y.tier, y.sessions) for y in x.served)],
        )
        for x in contexts
    ]
    most = max([1, *(count for _, tiers in counts for _, count in tiers)])
    for name, tiers in counts:
        for number, (tier, count) in enumerate(tiers):
            bar = BAR * max(1 if count else 0, round(BAR_WIDTH * count / most))
            say(f"{name if number == 0 else '':<14} {LABELS[tier]:<17} {bar} {count}")


def _served(context: ContextPlan) -> list[list[str]]:
    """Return the rows of one length: the first for live KV, the others for the tiers."""
    nbytes, count = context.hot_bytes_per_session, context.hot_sessions
    rows = [[str(context.context), "hot", "", show_bytes(nbytes), "", "", str(count)]]
    for x in context.served:
        states = show_bytes(x.state_bytes) if x.state_bytes else ""
        size = [show_bytes(x.bytes_per_session), states, f"{x.times_smaller_than_live:.2f}x"]
        rows.append(["", x.tier, x.codec, *size, str(x.sessions)])
    return rows


def _rows(context: ContextPlan, tiers: list[str]) -> list[list[str]]:
    nbytes = context.hot_bytes_per_session
    live = ["live", "", show_bytes(nbytes), "", "", "", str((1 << 30) // max(1, nbytes))]
    first = [str(context.context), *live, str(context.hot_sessions), *[""] * len(tiers)]
    return [first, *(_cold_row(cold, tiers) for cold in context.cold)]


def _cold_row(cold: ColdPlan, tiers: list[str]) -> list[str]:
    if cold.refused:
        return ["", cold.codec, "", "refused", *[""] * (5 + len(tiers))]
    return [
        "",
        cold.codec,
        "" if cold.kl is None else f"{cold.kl:.4f}",
        show_bytes(cold.bytes_per_session),
        show_bytes(cold.state_bytes) if cold.state_bytes else "",
        f"{cold.kv_times_smaller_than_bf16:.2f}x",
        f"{cold.times_smaller_than_bf16:.2f}x",
        str(cold.sessions_per_gib),
        "",
        *(str(cold.sessions[tier]) for tier in tiers),
    ]
