"""The conditions of a simulated fleet: its machines, its models and its users. Frozen."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
PositiveRate = Annotated[float, msgspec.Meta(gt=0)]


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
