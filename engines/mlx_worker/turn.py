"""One request while the owner thread works on it.

A ``Turn`` is the request. Each of its ``n`` answers is a ``LiveRow``. A ``Prompt`` is a run of
tokens on its way into a cache, with the rows that start decoding once it is there: all rows of a
new turn at first, and a single row again if that one had to leave the batch for want of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engines.mlx_worker.generation import Generation
from engines.mlx_worker.guard import Guard
from engines.mlx_worker.stream import EventStream

# One mlx_lm cache object per layer of the model, all of one sequence.
Caches: TypeAlias = list[Any]
# (tenant, session id)
SessionKey: TypeAlias = tuple[str, str]


@dataclass(eq=False)
class Turn:
    """A request from submit to its last event."""

    generation: Generation
    stream: EventStream
    rows: list[LiveRow] = field(default_factory=list)  # those that have not ended
    admitted: bool = False
    forgotten: bool = False  # the session was deleted meanwhile: keep nothing of it

    @property
    def key(self) -> SessionKey | None:
        session = self.generation.session
        return (session.tenant, session.id) if session else None


@dataclass(eq=False)
class LiveRow:
    """One answer in the making. Its KV holds ``tokens``, except perhaps the last of them."""

    turn: Turn
    index: int
    guard: Guard
    tokens: list[int]  # the prompt and every token delivered so far
    remaining: int  # tokens it may still deliver

    @property
    def emitted(self) -> Sequence[int]:
        return self.tokens[len(self.turn.generation.prompt) :]


@dataclass(eq=False)
class Prompt:
    """Tokens to feed before ``rows`` can decode; the last of them is fed by the first step."""

    turn: Turn
    rows: list[LiveRow]
    tokens: list[int]
    caches: Caches = field(default_factory=list)
    done: int = 0  # tokens that ``caches`` hold
    reused: int = 0  # of these, how many did not have to be computed

    @property
    def target(self) -> int:
        """Tokens that must be in the cache before the rows can decode."""
        return len(self.tokens) - 1
