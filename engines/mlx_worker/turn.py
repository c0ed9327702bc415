"""One request while the owner thread works on it.

A ``Turn`` is the request. Each of its ``n`` answers is a ``LiveRow``. A ``Prompt`` is a run of
tokens on its way into a cache, with the rows that start decoding once it is there: all rows of a
new turn at first, and a single row again if that one had to leave the batch for want of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from engines.mlx_worker.generation import Generation
from engines.mlx_worker.guard import Guard
from engines.mlx_worker.stream import EventStream
from kvstore.snapshot import Snapshot

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
    in_line: bool = True  # holds a place in the waiting line
    admitted: bool = False  # the client was told
    forgotten: bool = False  # the session was deleted meanwhile: keep nothing of it
    # The first so many tokens of its KV may come from a lossy copy. Only grows: rows that left
    # their batch begin again from whatever there is by then.
    lossy_tokens: int = 0
    # State at positions that a later turn may come back to; for the save at the end.
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def key(self) -> SessionKey | None:
        session = self.generation.session
        return (session.tenant, session.id) if session else None

    @property
    def tenant(self) -> str:
        return self.generation.session.tenant if self.generation.session else ""


@dataclass(eq=False)
class LiveRow:
    """One answer in the making. Its KV holds ``tokens``, except perhaps the last of them."""

    turn: Turn
    index: int
    guard: Guard
    tokens: list[int]  # the prompt and every token delivered so far
    remaining: int  # tokens it may still deliver
    entered: int = 0  # when it came into its batch: the youngest leaves first

    @property
    def emitted(self) -> Sequence[int]:
        return self.tokens[len(self.turn.generation.prompt) :]


@dataclass(eq=False)
class Prompt:
    """Tokens to feed before ``rows`` can decode; the last of them is fed by the first step."""

    turn: Turn
    rows: list[LiveRow]
    tokens: np.ndarray  # int32, (num_tokens,)
    caches: Caches = field(default_factory=list)
    done: int = 0  # tokens that ``caches`` hold
    reused: int = 0  # of these, how many did not have to be computed
    # Whether what was reused also rests in the cold store.
    saved: Future[bool] | None = None
    cuts: Sequence[int] = ()  # positions where a snapshot is due, ascending

    @property
    def target(self) -> int:
        """Tokens that must be in the cache before the rows can decode."""
        return len(self.tokens) - 1

    @property
    def next_stop(self) -> int:
        return next((x for x in self.cuts if x > self.done), self.target)


def split_turn(turn: Turn, max_tokens: int, rows_at_once: int) -> list[Prompt]:
    """Make the turn's rows, and the prompts that bring them into a batch, a few rows each."""
    generation = turn.generation
    turn.rows = [
        LiveRow(turn, i, Guard(row), list(generation.prompt), max_tokens)
        for i, row in enumerate(generation.rows)
    ]
    tokens = np.array(generation.prompt, np.int32)
    groups = range(0, len(turn.rows), rows_at_once)
    return [Prompt(turn, turn.rows[i : i + rows_at_once], tokens) for i in groups]
