"""``thermocline plan``: how many sessions fit here, or on other machines, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from kvstore.session import TIERS
from launch.cli import options
from launch.errors import UsageError
from launch.plan.capacity_plan import CapacityPlan, ColdPlan, ContextPlan, plan_of
from launch.plan.machines import MachinePlan, machine_plans
from launch.plan.weights import weights_at
from launch.printing import print_json, print_table, say
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import parse_bytes, show_bytes

SERVED: Final = ("tokens", "tier", "codec", "bytes", "states", "vs live", "sessions")
MACHINES: Final = (
    "machine", "tokens", "alive", "without sleep", "reserve", "for KV", "awake", "in RAM",
    "on disk", "codec",
)  # fmt: skip
BAR_WIDTH: Final = 40
BAR: Final = "█"
RATIOS: Final = ("KV vs bf16", "all vs bf16")
LABELS: Final = {"hot": "awake at once"} | {x: f"asleep {y.place}" for x, y in TIERS.items()}


@dataclass(frozen=True)
class PlanOptions:
    """The command line of ``thermocline plan``, but for settings."""

    model: str | None
    sessions: int | None
    lengths: str | None
    machines: bool
    weights: str | None
    bits: float | None
    as_json: bool


Bars = Sequence[tuple[str, dict[str, int]]]  # a name, and sessions by tier


def alive(alive: int, num_tokens: int, instead: int) -> str:
    """Say in one sentence how many sessions stay alive, and how many would without sleep."""
    return (
        f"alive: {alive:,} sessions of {num_tokens:,} tokens instead of {instead:,} without sleep"
    )


def print_plan(plan: CapacityPlan) -> None:
    if plan.refused:
        say(plan.refused)
        return
    for x in plan.contexts:
        say(alive(x.alive, x.context, x.without_sleep))
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
    say(_usable(plan))
    for note in plan.notes:
        say(f"note: {note}")
    say()
    tiers = [tier for tier in plan.budgets if tier != "hot"]
    _print_filled(SERVED, [x for context in plan.contexts for x in _served(context)], SERVED[2:])
    say()
    print_bars(bars_of(plan))
    say("\nwhat each codec would take:")
    columns = ("tokens", "kept", "KL", "bytes", "states", *RATIOS, "per GiB", "hot", *tiers)
    rows = [row for context in plan.contexts for row in _rows(context, tiers)]
    _print_filled(columns, rows, [x for x in columns if x != "kept"])
    refusals = {cold.codec: cold.refused for x in plan.contexts for cold in x.cold if cold.refused}
    for codec, reason in refusals.items():
        say(f"{codec}: {reason}")


def _print_filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    """Print a table without the columns in which nothing stands."""
    filled = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    print_table(
        [columns[i] for i in filled], [[row[i] for i in filled] for row in rows], right=right
    )


def bars_of(plan: CapacityPlan) -> Bars:
    """The bars of a plan: one group for each length of session."""
    return [
        (
            f"{x.context} tokens",
            {"hot": x.hot_sessions, **{tier.tier: tier.sessions for tier in x.served}},
        )
        for x in plan.contexts
    ]


def print_bars(bars: Bars) -> None:
    """Print sessions as bars, all to one scale: a tier with few of them is a sliver."""
    most = max((count for _, counts in bars for count in counts.values()), default=0)
    for name, counts in bars:
        for number, (tier, count) in enumerate(counts.items()):
            bar = BAR * max(1 if count else 0, round(BAR_WIDTH * count / max(1, most)))
            say(f"{name if number == 0 else '':<14} {LABELS[tier]:<17} {bar} {count}")


def print_machines(model: str, rows: Sequence[MachinePlan]) -> None:
    """Print what several machines would keep of a model's sessions."""
    say(f"{model}: sessions that other machines would keep alive (counted, not measured)")
    if rows:
        estimated = ", estimated from config.json" if rows[0].weights_estimated else ""
        say(f"weights: {show_bytes(rows[0].weights_bytes)}{estimated}")
    print_table(MACHINES, [_machine(row) for row in rows], right=MACHINES[1:9])
    say(
        "alive: sessions that come back, awake or asleep. without sleep: those that the same memory"
        "\nholds live in bf16. reserve: beside weights and KV, for the system and for work."
    )


def _machine(row: MachinePlan) -> list[str]:
    if row.refused:
        return [row.machine, str(row.context), *("" for _ in range(7)), row.refused]
    counts = [f"{x:,}" for x in (row.hot, row.ram, row.disk)]
    return [
        row.machine,
        str(row.context),
        f"{row.alive:,}",
        f"{row.hot_only:,}",
        show_bytes(row.reserve_bytes),
        show_bytes(row.kv_bytes),
        *counts,
        row.codec,
    ]


def _usable(plan: CapacityPlan) -> str:
    words = f"usable context: {plan.usable_context} of {plan.wanted_context} tokens"
    if plan.usable_context == plan.wanted_context:
        return words
    mib = -(-plan.wanted_hot_bytes >> 20)
    return f"{words}; all of them need --hot {mib}MiB"


def _served(context: ContextPlan) -> list[list[str]]:
    """One row for live KV, and one for each tier."""
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
    first = [str(context.context), *live, str(context.hot_sessions), *("" for _ in tiers)]
    return [first, *(_cold_row(cold, tiers) for cold in context.cold)]


def _cold_row(cold: ColdPlan, tiers: list[str]) -> list[str]:
    if cold.refused:
        return ["", cold.codec, "", "refused", *("" for _ in range(5 + len(tiers)))]
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


def run_plan(context: typer.Context, given: PlanOptions, environ: Mapping[str, str]) -> None:
    """Print the plan. Raises ``UsageError``, ``LaunchError``."""
    if given.model and context.params["model"]:
        raise UsageError("name the model once, as an argument or with --model")
    context.params["model"] = [given.model] if given.model else context.params["model"]
    if given.machines and given.sessions is not None:
        raise UsageError("--sessions counts for this machine; leave it out with --machines")
    if given.sessions is not None:
        context.params["session_context"] = _one_length(given.lengths)
    if given.weights and given.bits:
        raise UsageError("--weights says what the weights take; leave --bits out")
    if given.machines:
        _print_machines(options.chosen(context, environ), given)
    else:
        weights = _planned_weights(context, given, environ)
        _print_plan(
            options.fitted(context, environ, as_profiled=True, planned_weights=weights), given
        )


def _planned_weights(
    context: typer.Context, given: PlanOptions, environ: Mapping[str, str]
) -> int | None:
    """Bytes of weights that the options ask to be counted; None = those that are here."""
    if not (given.weights or given.bits):
        return None
    effective = options.chosen(context, environ, as_profiled=True)
    if effective.engines:
        raise UsageError("--weights and --bits count for one model; name it with --model")
    return weights_at(effective, given.bits) if given.bits else _bytes_of(given.weights or "")


def _bytes_of(weights: str) -> int:
    try:
        return parse_bytes(weights)
    except ValueError as error:
        raise UsageError(f"--weights: {error}") from None


def _one_length(lengths: str | None) -> int:
    try:
        return int(lengths or "")
    except ValueError:
        raise UsageError(
            "--sessions wants one length of session beside it, such as --context 8192"
        ) from None


def _print_plan(effective: EffectiveSettings, given: PlanOptions) -> None:
    several = {x.entry.name: plan_of(x.effective, given.lengths) for x in effective.engines}
    found = several or {"": plan_of(effective, given.lengths)}
    if given.as_json:
        print_json(several or found[""])
    else:
        if not any(x.refused for x in found.values()):
            for line in effective.capacity:
                say(line)
        loads = {x.entry.name: x.entry.load for x in effective.engines}
        for name, plan in found.items():
            if name:
                say(f"{name} ({loads[name]}), with its part of this machine:")
            print_plan(plan)


def _print_machines(effective: EffectiveSettings, given: PlanOptions) -> None:
    if effective.engines:
        raise UsageError("--machines counts for one model; name it with --model")
    weights = _bytes_of(given.weights) if given.weights else None
    try:
        lengths = [int(x) for x in given.lengths.split(",")] if given.lengths else None
    except ValueError as error:
        raise UsageError(f"--context: {error}") from None
    if lengths is not None and min(lengths) < 1:
        raise UsageError("--context: a session has one token or more")
    rows = machine_plans(effective, lengths, weights, given.bits)
    name = Path(effective.settings.engine.model or "the sample model").name
    if given.as_json:
        print_json(rows)
    else:
        print_machines(name, rows)
