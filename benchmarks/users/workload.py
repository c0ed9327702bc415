"""Workloads: phases of users with conversations, and the presets of them.

The preset ``users`` gives a table of throughput against users at once, up to 25; ``stress`` has 67
requests of seven kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from benchmarks.stacks.product_stack import prose
from launch.errors import UsageError

MOST_STEPS: Final = 100_000
MOST_USERS: Final = 1000
MOST_WORDS: Final = 200_000
Wrong = Literal["", "roles", "model"]
USERS: Final = (1, 3, 6, 11, 16, 20, 25)
STRESS_REQUESTS: Final = 67


@dataclass(frozen=True)
class Step:
    """One turn of a conversation: a pause, a message, and the most tokens of its answer."""

    words: int
    answer_tokens: int
    think_s: float = 0.0
    wrong: Wrong = ""  # the mistake in this request, which the server must refuse


@dataclass(frozen=True)
class Conversation:
    """A conversation; those with the same ``system`` text share their beginning."""

    name: str
    steps: tuple[Step, ...]
    system: str = ""


@dataclass(frozen=True)
class Phase:
    """Users at the same time; each has conversations, one after the other."""

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

    @property
    def num_steps(self) -> int:
        """The number of requests."""
        return sum(1 for _ in self.steps())

    def steps(self) -> Iterator[Step]:
        talks = (talk for phase in self.phases for user in phase.users for talk in user)
        return (step for talk in talks for step in talk.steps)


@dataclass(frozen=True)
class Habits:
    """The habits of simulated users, from the command line."""

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


def workload_of(preset: str, habits: Habits, num_users: int, rounds: int = 1) -> Workload:
    """Return the workload of a preset. Raises ``UsageError`` with the known names.

    Args:
        num_users: users at once, in presets without a number of their own.
        rounds: conversations that each user has, one after the other.
    """
    if preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}; there are: {', '.join(PRESETS)}")
    if num_users < 1 or habits.turns < 1 or rounds < 1:
        raise UsageError("--users, --turns and --rounds: one or more")
    return Workload(preset, PRESETS[preset](habits, num_users, rounds))


def chat(habits: Habits, num_users: int, rounds: int) -> tuple[Phase, ...]:
    """Return one phase: users who chat, pause and continue."""
    users = (
        tuple(habits.conversation(f"chat-{user}-{i}") for i in range(rounds))
        for user in range(num_users)
    )
    return (Phase("chat", tuple(users)),)


def users(habits: Habits, num_users: int, rounds: int) -> tuple[Phase, ...]:
    """Return phases of more and more users at once, each with one short conversation."""
    return tuple(
        Phase(
            "1 user" if count == 1 else f"{count} users",
            tuple((habits.conversation(f"users-{count}-{i}", turns=2),) for i in range(count)),
        )
        for count in USERS
    )


def stress(habits: Habits, num_users: int, rounds: int) -> tuple[Phase, ...]:
    """Return phases with 67 requests of seven kinds; the last kind has mistakes on purpose."""
    words, answer = habits.words, habits.answer_tokens
    short, usual, long = Step(words, answer), Step(words, 2 * answer), Step(20 * words, answer)
    hasty = Step(8, max(1, answer // 4))
    mixed = (long if i % 4 == 0 else short for i in range(8))
    error = [Step(1, 1, wrong="roles"), short, Step(1, 1, wrong="model"), short]
    return (
        Phase("sustained load", (_apart("sustained", [usual] * 20),)),
        Phase("concurrent burst", tuple(_apart(f"burst-{i}", [short]) for i in range(8))),
        Phase("long context", (_apart("long", [long] * 5),)),
        Phase("rapid fire", (_apart("rapid", [hasty] * 10),)),
        Phase("multi-turn", tuple((Conversation(f"multi-{i}", (short,) * 4),) for i in range(3))),
        Phase("mixed", tuple(_apart(f"mixed-{i}", [x]) for i, x in enumerate(mixed))),
        Phase("error recovery", (_apart("error", error),)),
    )


def _apart(name: str, steps: list[Step]) -> tuple[Conversation, ...]:
    """Return conversations with one step each."""
    return tuple(Conversation(f"{name}-{i}", (step,)) for i, step in enumerate(steps))


def seeds(habits: Habits, num_users: int, rounds: int) -> tuple[Phase, ...]:
    """Return the phases of ``users`` and ``stress``, as in the first prototypes' tables."""
    return (*users(habits, num_users, rounds), *stress(habits, num_users, rounds))


PRESETS: Final[Mapping[str, Callable[[Habits, int, int], tuple[Phase, ...]]]] = {
    "chat": chat,
    "users": users,
    "stress": stress,
    "seeds": seeds,
}
