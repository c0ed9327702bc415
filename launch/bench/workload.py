"""Describes who asks what and when: phases of users, who have conversations, which have steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from launch.errors import UsageError

MOST_STEPS: Final = 100_000
MOST_USERS: Final = 1000
MOST_WORDS: Final = 200_000
_WORDS: Final = """
river stone market winter garden engine letter bridge summer harbour window forest music doctor
silver travel kitchen morning village science painter history island captain ocean mountain paper
question answer teacher machine yellow quiet storm planet bottle animal story number color street
castle dinner friend voice corner coffee library journey
""".split()  # noqa: SIM905 - prose reads better as prose
Wrong = Literal["", "roles", "model"]


def prose(seed: str, num_words: int) -> str:
    """English words in an order that no other seed has: prompts share nothing by chance."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


@dataclass(frozen=True)
class Step:
    """One turn of a conversation: a pause, a message, the longest answer that is asked for."""

    words: int
    answer_tokens: int
    think_s: float = 0.0
    wrong: Wrong = ""  # asked wrongly on purpose: the server has to refuse it, and go on


@dataclass(frozen=True)
class Conversation:
    """A conversation; those with the same ``system`` text share their beginning."""

    name: str
    steps: tuple[Step, ...]
    system: str = ""


@dataclass(frozen=True)
class Phase:
    """Users who ask at the same time; each has conversations, one after the other."""

    name: str
    users: tuple[tuple[Conversation, ...], ...]


@dataclass(frozen=True)
class Workload:
    """Phases, one after the other."""

    name: str
    phases: tuple[Phase, ...] = field(default=())

    def __post_init__(self) -> None:
        steps = list(self.steps())
        if any(len(phase.users) > MOST_USERS for phase in self.phases):
            raise UsageError(f"--users: at most {MOST_USERS} at once")
        if len(steps) > MOST_STEPS:
            raise UsageError(f"{len(steps)} requests in one run; take at most {MOST_STEPS}")
        if any(not 1 <= step.words <= MOST_WORDS for step in steps):
            raise UsageError(f"--words: 1 to {MOST_WORDS} words in a message")
        if any(step.answer_tokens < 1 for step in steps):
            raise UsageError("--answer: one token or more")

    def steps(self) -> Iterator[Step]:
        for phase in self.phases:
            for conversations in phase.users:
                for conversation in conversations:
                    yield from conversation.steps


@dataclass(frozen=True)
class Habits:
    """The habits of simulated users, as the command line says them."""

    words: int = 60  # of a message
    answer_tokens: int = 32
    turns: int = 3  # of a conversation
    think_s: float = 0.0  # before each turn but the first
    system_words: int = 0  # shared by all users

    def conversation(self, name: str, turns: int = 0) -> Conversation:
        steps = tuple(
            Step(self.words, self.answer_tokens, self.think_s if i else 0.0)
            for i in range(turns or self.turns)
        )
        return Conversation(name, steps, prose("system", self.system_words))
