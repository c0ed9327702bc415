"""Turns a wanted number of sessions into memory and disk budgets, or says how many would fit.

``Needs`` has the bytes of sessions of one length, awake and asleep. If the model was not measured
yet, sizes are those of the preset that most models get, and ``Asleep.planned`` is true.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvstore.codecs.names import USUAL
from kvstore.errors import CodecRefused, UnknownCodec
from kvstore.tiers.disk_budget import file_bytes_limit
from launch.errors import LaunchError, UsageError
from launch.families.cache_shape import NotUnderstood
from launch.machine.resources import free_disk
from launch.model.find import find_model
from launch.plan.capacity_plan import ColdPlan, plan_of
from launch.plan.cold_size import chunk_of, expected_choice, first_measurement
from launch.plan.served_model import hot_budget_of, served_cache, too_large_here
from launch.settings.budgets import DERIVED, DISK_SHARE
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import laid_over
from launch.settings.sources import Value
from launch.settings.units import show_bytes

HOT_SHARE = 0.5  # the share of the memory for KV up to which live KV comes before packed sessions
# Sessions are put to sleep above the high-water mark, which lies below the budget.
HEADROOM = 1.2
MARGIN = 1.02  # for blobs that are larger than planned and sessions that are being written
MIB = 1 << 20
_MAP_STEP = 1 << 16
# Memory of the store's index: for each session, and for each of its chunks (a name and a key).
_INDEX_SESSION_BYTES = 1536
_INDEX_BLOB_BYTES = 256


@dataclass(frozen=True)
class Asleep:
    """The size of a sleeping session, which is the same in every tier."""

    codec: str
    nbytes: int
    planned: bool  # the model was not measured yet, so ``codec`` is an assumption
    until_then: int = 0  # bytes in the codec that serves until the model is measured

    def of(self, meanwhile: bool) -> int:
        """Return the bytes; with ``meanwhile`` those until the model is measured."""
        return self.until_then if meanwhile and self.planned else self.nbytes


@dataclass(frozen=True)
class Needs:
    """The bytes of sessions of ``context`` tokens."""

    context: int
    running_bytes: int  # of a session while it is answered and no other one is
    idle_bytes: int  # of a hot session between its turns
    asleep: Asleep

    def hot_bytes(self, num_sessions: int) -> int:
        """Return the budget that keeps ``num_sessions`` hot while one of them is answered."""
        return self.running_bytes + max(0, num_sessions - 1) * self.idle_bytes

    def cold_bytes(self, tier: str, num_sessions: int, *, meanwhile: bool = False) -> int:
        """Return the budget of a tier that holds ``num_sessions`` asleep, in whole MiB."""
        nbytes = int((num_sessions + 1) * self.asleep.of(meanwhile) * MARGIN)
        if tier == "disk":  # its budget is the size of a file, which is never quite full
            nbytes = file_bytes_limit(nbytes) + 2 * _MAP_STEP
        return _up(nbytes)

    def num_hot(self, hot_bytes: int) -> int:
        """Return how many sessions ``hot_bytes`` keep hot while one of them is answered."""
        left = hot_bytes - self.running_bytes
        return 0 if left < 0 else 1 + left // self.idle_bytes

    def num_asleep(self, tier: str, budget: int, *, meanwhile: bool = False) -> int:
        """Return the largest number of sessions whose ``cold_bytes`` is within ``budget``."""
        most = budget // max(1, self.asleep.of(meanwhile))
        counts = range(1, most + 1)
        return bisect_right(
            counts, budget, key=lambda count: self.cold_bytes(tier, count, meanwhile=meanwhile)
        )


def with_capacity(effective: EffectiveSettings) -> EffectiveSettings:
    """Return the settings with budgets for ``capacity.sessions``; unchanged if that is not set.

    Budgets that the operator set are not changed.

    Raises:
        UsageError: so many sessions do not fit on this machine; says how many would.
        LaunchError: the model is not here, or its cache is not understood.
    """
    wish = effective.settings.capacity
    if not wish.sessions:
        return effective
    if not effective.is_ours:
        raise UsageError(
            "capacity.sessions (--sessions) needs an engine that is started here, mlx or vllm, not"
            f" {effective.engine_kind}; give budgets in bytes instead (--hot, --ram, --disk)"
        )
    space = space_of(effective)
    needs_at = cache(lambda context: needs_of(effective, context))
    needs = needs_at(wish.context)
    if reason := refusal(needs, space, wish.sessions):
        if heavy := too_large_here(effective):
            raise UsageError(heavy)
        ways = "; or ".join(what_would(needs_at, space, wish.sessions, wish.context))
        raise UsageError(
            f"{wish.sessions} sessions of {wish.context} tokens do not fit here: {reason}. What"
            f" would fit: {ways}"
        )
    budgets = choose_budgets(needs, space, wish.sessions)
    chosen = {
        "engine.hot_bytes": budgets.hot if space.given_hot is None else None,
        "store.ram_bytes": budgets.ram if space.given_ram is None else None,
        "store.disk_bytes": budgets.disk if space.given_disk is None else None,
    }
    listed = index_bytes(effective, wish.sessions, wish.context)
    if listed > effective.settings.store.index_bytes:  # its default has too little room
        chosen["store.index_bytes"] = listed
    why = f"capacity: {wish.sessions} sessions of {wish.context} tokens"
    layer = {name: Value(value, why) for name, value in chosen.items() if value is not None}
    return dataclasses.replace(
        effective,
        resolved=laid_over(effective.resolved, layer),
        capacity=tuple(_words(effective, needs, budgets)),
    )


def _words(effective: EffectiveSettings, needs: Needs, budgets: Budgets) -> list[str]:
    """Return lines for people that say which budgets were chosen, and from which sizes."""
    settings = effective.settings
    num, context = settings.capacity.sessions, settings.capacity.context
    planned = needs.asleep
    note = ", planned" if planned.planned else ""
    one = f"{show_bytes(planned.nbytes)} asleep ({planned.codec}{note})"
    held = ", ".join(
        f"{tier} {show_bytes(nbytes)} ({_share(budgets.num_held.get(tier, 0), num)} asleep)"
        for tier in ("ram", "disk")
        if (nbytes := budgets.of(tier))
    )
    lines = [
        f"{num} sessions of {context} tokens: {show_bytes(needs.idle_bytes)} each awake, {one}",
        f"chosen: hot {show_bytes(budgets.hot)} ({_share(budgets.num_hot, num)} awake at once)"
        + (f", {held}" if held else ""),
    ]
    if planned.planned:
        lines.append(
            f"the model was not measured yet: counted with {planned.codec}, which most models get;"
            f" until then, or if it is refused, {_share(budgets.num_at_first, num)} come back"
        )
    limit = settings.gateway.usual_limits.sessions
    if 0 < limit < num:
        lines.append(f"gateway.key_limits has sessions={limit}: one tenant has fewer than {num}")
    return lines


def _share(count: int, num: int) -> str:
    return "all" if count >= num else str(count)


@dataclass(frozen=True)
class Space:
    """The bytes within which budgets may be chosen.

    ``given_*``: a budget that the operator set, which is kept; None = it may be chosen.
    """

    hot: int  # the most for live KV
    ram: int  # the most for sleeping sessions in memory
    shared: int  # the most for both together; their sum if live KV is in a GPU's own memory
    disk: int
    given_hot: int | None = None
    given_ram: int | None = None
    given_disk: int | None = None
    awake: int = 16  # sessions for which there should be room to be answered at the same time


def space_of(effective: EffectiveSettings) -> Space:
    """Return the space on this machine: the default memory budgets, and half of the free disk."""
    engine, store = effective.settings.engine, effective.settings.store
    hot, ram = engine.hot_bytes, store.ram_bytes
    given_hot = _given(effective, "engine.hot_bytes", hot)
    given_ram = _given(effective, "store.ram_bytes", ram)
    shared = hot + ram
    apart = effective.hot_on_gpu
    most_hot = hot if apart or given_ram is not None else shared
    most_ram = ram if apart or given_hot is not None else shared
    folder = Path(store.disk_path) if store.disk_path else effective.folders.data
    return Space(
        hot=most_hot,
        ram=most_ram,
        shared=most_hot + most_ram if apart else shared,
        disk=int((free_disk(folder) + _held(folder)) * DISK_SHARE),
        given_hot=given_hot,
        given_ram=given_ram,
        given_disk=_given(effective, "store.disk_bytes", store.disk_bytes),
        awake=engine.max_batch,
    )


def _given(effective: EffectiveSettings, name: str, value: int) -> int | None:
    return None if effective.resolved.origin(name).startswith(DERIVED) else value


def _held(folder: Path) -> int:
    """Return the bytes of the disk tier's files in a folder; its budget may include them."""
    return sum(file.stat().st_size for file in folder.glob("**/cold/*.mdb"))


@dataclass(frozen=True)
class Budgets:
    """The chosen budgets in bytes, and how many sessions they hold."""

    hot: int
    ram: int
    disk: int
    num_hot: int  # hot sessions while one of them is answered
    num_held: dict[str, int]  # sleeping sessions by tier
    num_at_first: int = 0  # sleeping sessions until the model is measured

    def of(self, tier: str) -> int:
        """Return the bytes of the tier "ram" or "disk"."""
        return {"ram": self.ram, "disk": self.disk}[tier]

    @property
    def most(self) -> int:
        """The number of sleeping sessions in the tier that holds most of them."""
        return max(self.num_held.values(), default=0)


def choose_budgets(needs: Needs, space: Space, num_sessions: int) -> Budgets:
    """Return the best budgets for ``num_sessions``; their ``most`` may be smaller than that."""
    hot, ram = _memory(needs, space, num_sessions)
    disk = space.given_disk
    if disk is None:  # large enough for all of them also until the model is measured, if possible
        wanted = max(needs.cold_bytes("disk", num_sessions, meanwhile=x) for x in (False, True))
        disk = min(wanted, _whole(space.disk))
    budgets = {"ram": ram, "disk": disk}
    held = {tier: needs.num_asleep(tier, nbytes) for tier, nbytes in budgets.items() if nbytes}
    at_first = [needs.num_asleep(tier, budgets[tier], meanwhile=True) for tier in held]
    return Budgets(hot, ram, disk, needs.num_hot(hot), held, max(at_first, default=0))


def _memory(needs: Needs, space: Space, num_sessions: int) -> tuple[int, int]:
    """Return the bytes for live KV and for sleeping sessions in memory.

    Live KV first gets enough to run, then the sleeping sessions get theirs, then live KV the rest.
    """
    all_hot = _up(int(needs.hot_bytes(num_sessions) * HEADROOM))
    awake = int(needs.hot_bytes(min(num_sessions, space.awake)) * HEADROOM)
    floor = _up(max(needs.running_bytes, min(awake, int(space.shared * HOT_SHARE), space.hot)))
    ram = space.given_ram
    if ram is None:
        left = space.ram if space.given_hot is not None else min(space.ram, space.shared - floor)
        ram = min(needs.cold_bytes("ram", num_sessions), _whole(left))
    hot = space.given_hot
    if hot is None:
        hot = min(all_hot, _whole(min(space.hot, max(floor, space.shared - ram))))
    return hot, max(0, ram)


def refusal(needs: Needs, space: Space, num_sessions: int) -> str:
    """Return the reason, with figures, why so many sessions cannot be kept; "" if they can."""
    found = choose_budgets(needs, space, num_sessions)
    if found.hot < needs.running_bytes:
        return (
            f"one session of {needs.context} tokens needs {show_bytes(needs.running_bytes)} of live"
            f" KV while it is answered, and only {show_bytes(found.hot)} may be used"
        )
    if found.most >= num_sessions:
        return ""
    parts = [
        f"{show_bytes(needs.cold_bytes(tier, num_sessions))} of {tier} ({needs.asleep.codec};"
        f" {show_bytes(found.of(tier))} may be used)"
        for tier in found.num_held
    ]
    return f"asleep they need {' or '.join(parts)}" if parts else "there is no tier to sleep in"


def what_would(
    needs_at: Callable[[int], Needs], space: Space, num_sessions: int, context: int
) -> list[str]:
    """Return options that would fit this machine, or make it fit; the most similar first."""
    needs = needs_at(context)
    found = choose_budgets(needs, space, num_sessions)
    ways = []
    if found.hot >= needs.running_bytes and found.most:
        ways.append(f"--sessions {found.most} --context {context}")
    if shorter := _longest(needs_at, space, num_sessions, context):
        ways.append(f"--sessions {num_sessions} --context {shorter}")
    on_disk = f"--disk {_size(needs.cold_bytes('disk', num_sessions))}"
    if found.hot < needs.running_bytes:
        ways.append(f"--hot {_size(needs.running_bytes)}, if that is free")
    elif space.given_disk is not None and space.given_disk < space.disk:
        ways.append(on_disk)
    else:
        ways.append(f"{on_disk} in a folder with room for it (store.disk_path)")
    return ways


def _longest(
    needs_at: Callable[[int], Needs], space: Space, num_sessions: int, context: int
) -> int:
    """Return the most tokens, in steps of 64, that so many sessions may have; 0 = not even 64."""
    steps = range(64, context + 1, 64)
    return 64 * bisect_left(
        steps, True, key=lambda tokens: bool(refusal(needs_at(tokens), space, num_sessions))
    )


def _size(nbytes: int) -> str:
    return f"{-(-nbytes // MIB)}MiB" if nbytes < 10 << 30 else f"{-(-nbytes // (1 << 30))}GiB"


def _whole(nbytes: int) -> int:
    return max(0, nbytes // MIB * MIB)


def _up(nbytes: int) -> int:
    return -(-nbytes // MIB) * MIB


def needs_of(effective: EffectiveSettings, context: int) -> Needs:
    """Return the bytes of sessions of ``context`` tokens with these settings.

    Raises:
        UsageError: the context is too long, or ``serve`` would refuse the settings.
        LaunchError: the model's cache is not understood.
    """
    longest = effective.settings.engine.max_context
    if 0 < longest < context:
        raise UsageError(
            f"sessions of {context} tokens exceed engine.max_context = {longest}; raise it, or"
            " lower capacity.context (--context)"
        )
    (plan,) = plan_of(effective, str(context)).contexts
    content = find_model(effective.settings.engine.model, effective.folders.cache).config()
    hot = hot_budget_of(effective, content, served_cache(effective, content))
    cold = {x.codec: x for x in plan.cold if not x.refused}
    return Needs(
        context, hot.running_bytes(context), hot.idle_bytes(context), _asleep(effective, cold)
    )


def _asleep(effective: EffectiveSettings, cold: dict[str, ColdPlan]) -> Asleep:
    try:
        choice = expected_choice(effective)
    except (CodecRefused, UnknownCodec, NotUnderstood) as error:
        raise UsageError(f"store.codec cannot serve this model: {error}") from error
    planned = first_measurement(effective).will_be and USUAL in cold
    # ``cold`` names a codec of whole sessions by both parts, "ROWS+STATES".
    names = [x for x in cold if x == choice.name or x.partition("+")[0] == choice.name]
    if not names:
        raise LaunchError(
            f"the size of sessions with codec {choice.name} is not known for this model"
        )
    now = cold[names[0]].bytes_per_session
    if choice.unmeasured and planned:
        return Asleep(USUAL, cold[USUAL].bytes_per_session, planned=True, until_then=now)
    return Asleep(choice.name, now, planned=False)


def index_bytes(effective: EffectiveSettings, num_sessions: int, context: int) -> int:
    """Return the bytes of memory that the store's index of ``num_sessions`` takes."""
    num_blobs = context // chunk_of(effective) + 4
    each = _INDEX_SESSION_BYTES + _INDEX_BLOB_BYTES * num_blobs
    return num_sessions * each
