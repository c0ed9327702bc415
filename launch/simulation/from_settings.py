"""Makes the conditions of a simulation of settings: models, budgets and sizes of sessions."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.session import TIER_NAMES
from launch.capacity.machines import budgets_on
from launch.capacity.needs import Asleep, chunk_of, needs_of
from launch.errors import UsageError
from launch.settings.effective_settings import EffectiveSettings
from launch.simulation.conditions import Conditions, Habits, ModelSize, Speeds

MANY_USERS = 20_000  # are simulated in larger chunks and for fewer turns each
TURNS = 200_000  # of all users together, about
FEWEST_TURNS, MOST_TURNS = 2, 20


def conditions_of(
    effective: EffectiveSettings,
    machines: int,
    users: int,
    *,
    kind: str = "",
    habits: Habits,
    speeds: Speeds,
    shared_bytes_s: float,
    seed: int = 1,
) -> Conditions:
    """Describe a fleet whose machines all have these settings.

    Args:
        kind: of machine, as ``plan --machines`` names it; "" = like this one.

    Raises:
        UsageError, LaunchError: the model or the machine cannot be counted.
    """
    engines = [x.effective for x in effective.engines] or [effective]
    if kind and len(engines) > 1:
        raise UsageError(f"a machine like {kind} is counted for one model; name it with --model")
    scheduler, store = effective.settings.scheduler, effective.settings.store
    many = users > MANY_USERS
    return Conditions(
        models=tuple(_size(x, habits.context, kind) for x in engines),
        machines=machines,
        users=users,
        habits=habits,
        speeds=speeds,
        shared_bytes_s=shared_bytes_s,
        shared_bytes=store.redis_bytes * machines,
        idle_after_s=scheduler.idle_after_s,
        high_water=scheduler.high_water,
        low_water=scheduler.low_water,
        restore_deadline_s=store.restore_deadline_s,
        turns_per_user=min(max(TURNS // users, FEWEST_TURNS), MOST_TURNS),
        chunk_tokens=chunk_of(engines[0]),
        most_chunks=4 if many else 16,
        seed=seed,
    )


def _size(effective: EffectiveSettings, context: int, kind: str) -> ModelSize:
    settings = effective.settings
    name = settings.engine.served_model_name or settings.engine.model or "the sample model"
    name = name.rpartition("/")[2]
    if kind:
        found = budgets_on(effective, kind, context)
        needs, budgets = found.needs, found.budgets
        hot, ram, disk = budgets.hot, budgets.ram, budgets.disk
    else:
        needs, store = needs_of(effective, context), settings.store
        hot, ram, disk = settings.engine.hot_bytes, store.ram_bytes, store.disk_bytes
    if hot < needs.running_bytes:
        raise UsageError(f"{name}: a session of {context} tokens does not fit into live KV")
    return ModelSize(
        name=name,
        hot_bytes=hot,
        ram_bytes=ram,
        disk_bytes=disk,
        live_token_bytes=needs.idle_bytes / context,
        packed_token_bytes={x: _of(needs.asleep, x).nbytes / context for x in TIER_NAMES},
    )


def _of(asleep: Mapping[str, Asleep], tier: str) -> Asleep:
    return asleep.get(tier) or next(iter(asleep.values()))
