"""Follows ``capacity.sessions`` and ``.context``: budgets into the settings, and into words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import msgspec

from launch.errors import UsageError
from launch.plan.fit import Budgets, Rooms, choose_budgets, refusal, rooms_of, what_would
from launch.plan.needs import Needs, index_bytes, needs_of
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import Resolved, Settings
from launch.settings.units import show_bytes

ENGINES = ("mlx", "vllm")  # whose memory is ours to share out, and whose sessions can be counted


def with_capacity(effective: EffectiveSettings) -> EffectiveSettings:
    """The settings with budgets for the wished capacity; as they are where nothing is wished.

    Budgets that the operator set stay as they are.

    Raises:
        UsageError: this machine has no room for the wish; says how many sessions would fit.
        LaunchError: the model is not here, or its cache is not understood.
    """
    wish = effective.settings.capacity
    if not wish.sessions:
        return effective
    if effective.engine_kind not in ENGINES:
        raise UsageError(
            "capacity.sessions (--sessions) needs an engine that is started here, mlx or vllm, not"
            f" {effective.engine_kind}; give budgets in bytes instead (--hot, --ram, --disk)"
        )
    rooms = rooms_of(effective)
    needs_at = cache(lambda context: needs_of(effective, context))
    needs = needs_at(wish.context)
    if reason := refusal(needs, rooms, wish.sessions):
        ways = "; or ".join(what_would(needs_at, rooms, wish.sessions, wish.context))
        raise UsageError(
            f"{wish.sessions} sessions of {wish.context} tokens do not fit here: {reason}. What"
            f" would: {ways}"
        )
    budgets = choose_budgets(needs, rooms, wish.sessions)
    return dataclasses.replace(
        effective,
        resolved=_resolved(effective, rooms, budgets),
        capacity=tuple(_words(effective, needs, budgets)),
    )


def _resolved(effective: EffectiveSettings, rooms: Rooms, budgets: Budgets) -> Resolved:
    settings, origins = effective.settings, dict(effective.resolved.origins)
    wish = settings.capacity
    chosen = {
        "engine.hot_bytes": budgets.hot if rooms.given_hot is None else None,
        "store.ram_bytes": budgets.ram if rooms.given_ram is None else None,
        "store.disk_bytes": budgets.disk if rooms.given_disk is None else None,
        **_lists(effective),
    }
    values = {name: value for name, value in chosen.items() if value is not None}
    why = f"capacity: {wish.sessions} sessions of {wish.context} tokens"
    return Resolved(_replaced(settings, values), origins | dict.fromkeys(values, why))


def _lists(effective: EffectiveSettings) -> dict[str, int]:
    """Room in the lists of sessions, where their defaults have too little."""
    settings, wish = effective.settings, effective.settings.capacity
    rooms = {}
    listed = index_bytes(effective, wish.sessions, wish.context)
    if listed > settings.store.index_bytes:
        rooms["store.index_bytes"] = listed
    if wish.sessions > settings.scheduler.max_sessions:
        rooms["scheduler.max_sessions"] = wish.sessions
    return rooms


def _replaced(settings: Settings, values: Mapping[str, int]) -> Settings:
    for name, value in values.items():
        room, field = name.split(".")
        inner = msgspec.structs.replace(getattr(settings, room), **{field: value})
        settings = msgspec.structs.replace(settings, **{room: inner})
    return settings


def _words(effective: EffectiveSettings, needs: Needs, budgets: Budgets) -> list[str]:
    """A few lines for people: what was chosen, and by which figures."""
    settings = effective.settings
    num, context = settings.capacity.sessions, settings.capacity.context
    one = ", ".join(
        f"{show_bytes(x.nbytes)} in {tier} ({x.codec}{', planned' if x.planned else ''})"
        for tier, x in needs.asleep.items()
        if tier in budgets.num_held
    )
    held = ", ".join(
        f"{tier} {show_bytes(nbytes)} ({_share(budgets.num_held.get(tier, 0), num)} asleep)"
        for tier, nbytes in (("ram", budgets.ram), ("disk", budgets.disk))
        if nbytes
    )
    lines = [
        f"{num} sessions of {context} tokens: {show_bytes(needs.idle_bytes)} each awake, {one}",
        f"chosen: hot {show_bytes(budgets.hot)} ({_share(budgets.num_hot, num)} awake at once)"
        + (f", {held}" if held else ""),
    ]
    tier = max(budgets.num_held, key=lambda x: budgets.num_held[x])
    planned = needs.asleep[tier]
    if planned.planned:
        lines.append(
            f"the model was not measured yet: counted with {planned.codec}, which most models get;"
            f" until then, or if it is refused, {_share(budgets.num_at_first, num)} come back"
        )
    limit = settings.gateway.sessions_per_tenant
    if 0 < limit < num:
        lines.append(f"gateway.sessions_per_tenant = {limit} allows one tenant fewer than {num}")
    return lines


def _share(count: int, num: int) -> str:
    return "all" if count >= num else str(count)
