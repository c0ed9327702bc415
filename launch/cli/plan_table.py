"""Prints the plan of ``thermocline plan`` as a table."""

from __future__ import annotations

from launch.cli.printing import print_table
from launch.plan.capacity_plan import ColdPlan, ContextPlan, Plan
from launch.settings.units import show_bytes


def print_plan(plan: Plan) -> None:
    print(
        f"{plan.model} ({plan.model_type}): {plan.growing_layers} growing layers,"
        f" {show_bytes(plan.live_bytes_per_token)} per token live in {plan.dtype}"
    )
    if plan.state_bytes:
        print(
            f"and {show_bytes(plan.state_bytes)} of state that does not grow"
            f" ({plan.window_layers} sliding windows)"
        )
    print("budgets: " + ", ".join(f"{k} {show_bytes(v)}" for k, v in plan.budgets.items()))
    print(_usable(plan))
    for note in plan.notes:
        print(f"note: {note}")
    print()
    tiers = [tier for tier in plan.budgets if tier != "hot"]
    columns = ("tokens", "kept", "KL", "bytes", "vs bf16", "per GiB", "hot", *tiers)
    rows = [row for context in plan.contexts for row in _rows(context, tiers)]
    print_table(columns, rows, right=[x for x in columns if x != "kept"])
    refusals = {cold.codec: cold.refused for x in plan.contexts for cold in x.cold if cold.refused}
    for codec, reason in refusals.items():
        print(f"{codec}: {reason}")


def _usable(plan: Plan) -> str:
    words = f"usable context: {plan.usable_context} of {plan.wanted_context} tokens"
    if plan.usable_context == plan.wanted_context:
        return words
    mib = -(-plan.wanted_hot_bytes >> 20)
    return f"{words}; all of them need --hot {mib}MiB"


def _rows(context: ContextPlan, tiers: list[str]) -> list[list[str]]:
    nbytes = context.hot_bytes_per_session
    live = ["live", "", show_bytes(nbytes), "", str((1 << 30) // max(1, nbytes))]
    first = [str(context.context), *live, str(context.hot_sessions), *("" for _ in tiers)]
    return [first, *(_cold_row(cold, tiers) for cold in context.cold)]


def _cold_row(cold: ColdPlan, tiers: list[str]) -> list[str]:
    if cold.refused:
        return ["", cold.codec, "", "refused", *("" for _ in range(3 + len(tiers)))]
    return [
        "",
        cold.codec,
        "" if cold.kl is None else f"{cold.kl:.4f}",
        show_bytes(cold.bytes_per_session),
        f"{cold.times_smaller_than_bf16:.2f}x",
        str(cold.sessions_per_gib),
        "",
        *(str(cold.sessions[tier]) for tier in tiers),
    ]
