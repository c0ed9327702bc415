"""The conditions of a simulated fleet, made of settings: its machines, its models and its users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvstore.session import TIER_NAMES
from launch.errors import UsageError
from launch.plan.cold_size import chunk_of
from launch.plan.machines import budgets_on
from launch.plan.needs import Asleep, needs_of
from launch.settings.effective_settings import EffectiveSettings

Count = Annotated[int, msgspec.Meta(ge=1)]
PositiveRate = Annotated[float, msgspec.Meta(gt=0)]
SHARED_BYTES = 64 << 30  # of a Redis that machines share, for each of them
MANY_USERS = 20_000  # are simulated in larger chunks and for fewer turns each
TURNS = 200_000  # of all users together, about
FEWEST_TURNS, MOST_TURNS = 2, 20


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """One model as each machine of the fleet serves it. Budgets are its part of one machine."""

    name: str
    hot_bytes: int
    ram_bytes: int
    disk_bytes: int
    live_token_bytes: float  # of a token of live KV
    packed_token_bytes: dict[str, float]  # by tier


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of one engine."""

    prefill_tokens_s: PositiveRate = 2000.0
    answer_tokens_s: PositiveRate = 30.0  # of each answer
    unpack_bytes_s: PositiveRate = 1e9  # of packed bytes
    disk_bytes_s: PositiveRate = 1e9


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """The habits of each user: one conversation after the other, with a pause before each turn."""

    think_s: PositiveRate = 60.0  # on average; pauses are exponential
    context: Count = 8192  # tokens of a conversation at its end
    turns: Count = 8  # of a conversation
    answer_tokens: Count = 200

    @property
    def turn_tokens(self) -> int:
        """The tokens by which a turn makes a conversation longer, answer included."""
        return max(self.context // self.turns, self.answer_tokens + 1)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """All of a simulation."""

    models: tuple[ModelSize, ...]  # users are divided equally among them
    machines: Count
    users: Count
    habits: Habits = Habits()
    speeds: Speeds = Speeds()
    # Of the tier that all machines share, in both directions together; 0 = there is none.
    shared_bytes_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    shared_bytes: int = 0  # of all machines together
    idle_after_s: float = 120.0  # a session this quiet leaves live KV
    high_water: float = 0.85  # above it live KV is put to sleep, down to low water
    low_water: float = 0.65
    restore_deadline_s: float = 20.0  # a slower restore is given up for a prefill
    turns_per_user: Count = 6  # that are simulated, the first ones not counted
    chunk_tokens: Count = 128
    most_chunks: Count = 16  # of a session; longer ones have larger chunks than in reality
    loses_machine: bool = True  # after two thirds of all turns
    seed: int = 1

    @property
    def simulated_chunk(self) -> int:
        """Tokens of a chunk in the simulation."""
        size, longest = self.chunk_tokens, self.habits.context // self.most_chunks
        return size * max(1, -(-longest // size))


def conditions_of(
    effective: EffectiveSettings,
    machines: int,
    users: int,
    *,
    kind: str = "",
    habits: Habits,
    speeds: Speeds,
    shared_bytes_s: float,
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
        shared_bytes=SHARED_BYTES * machines,
        idle_after_s=scheduler.idle_after_s,
        high_water=scheduler.high_water,
        low_water=scheduler.low_water,
        restore_deadline_s=store.restore_deadline_s,
        turns_per_user=min(max(TURNS // users, FEWEST_TURNS), MOST_TURNS),
        chunk_tokens=chunk_of(engines[0]),
        most_chunks=4 if many else 16,
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
