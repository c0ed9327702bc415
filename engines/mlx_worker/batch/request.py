"""One request while the owner thread works on it.

A ``Request`` has ``n`` answers, and each of them is a ``Sequence``. A ``PrefillTask`` is a run of
tokens on its way into a cache, with the sequences that decode once it is there: those of a new
request at first, and a single one again if it had to leave its batch, with its KV (parked) or
without.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engines.mlx_worker.batch.sampling_guard import SamplingGuard
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.event_queue import EventQueue
from engines.mlx_worker.generation import Generation
from engines.mlx_worker.sessions.hot_sessions import SessionKey
from kvstore.blobs.snapshot import Snapshot


@dataclass(eq=False)
class Request:
    """A request from its arrival to its last event."""

    generation: Generation
    events: EventQueue
    sequences: list[Sequence] = field(default_factory=list)  # those that have not ended
    is_waiting: bool = True  # counts against the limit of the waiting queue
    admitted: bool = False  # the client was informed
    num_fed: int = 0  # tokens of its prompt that are in a cache; any thread may read it
    forgotten: bool = False  # the session was deleted meanwhile: keep nothing of it
    # The first so many tokens of its KV may come from a lossy copy. Only grows: sequences that left
    # their batch begin again from the KV that is there by then.
    lossy_tokens: int = 0
    lossy_state: int = 0  # the same of its state: the position of a lossy copy
    # State at positions that a later turn may come back to; for the save at the end.
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def key(self) -> SessionKey | None:
        """The session it is a turn of; None for a request without a session."""
        session = self.generation.session
        return (session.tenant, session.id) if session else None

    @property
    def tenant(self) -> str:
        return self.generation.payer

    def note_lossy(self, num_tokens: int, state: int) -> None:
        """Remember that its KV may come from a lossy copy.

        That is the first ``num_tokens``, and its state, if it goes on from one at ``state`` tokens.
        """
        self.lossy_tokens = max(self.lossy_tokens, num_tokens)
        self.lossy_state = max(self.lossy_state, state)


@dataclass(eq=False)
class Sequence:
    """One answer in the making. Its KV holds ``tokens``, except perhaps the last of them."""

    request: Request
    index: int  # of its request's answers
    guard: SamplingGuard
    tokens: list[int]  # the prompt and every token delivered so far
    remaining: int  # tokens it may still deliver
    entered: int = 0  # when it came into its batch: the youngest is preempted first
    run: int = 0  # tokens since then
    is_guest: bool = False  # runs beyond the places, until it was served a quantum

    @property
    def emitted(self) -> list[int]:
        """The tokens of the answer so far."""
        return self.tokens[len(self.request.generation.prompt) :]


@dataclass(eq=False)
class PrefillTask:
    """Tokens to feed before ``sequences`` can decode; the first decode step feeds the last one."""

    request: Request
    sequences: list[Sequence]
    tokens: np.ndarray  # int32, (num_tokens,)
    caches: Caches = field(default_factory=list)
    num_cached: int = 0  # tokens that ``caches`` hold
    num_reused: int = 0  # of these, how many did not have to be computed
    # Whether what was reused also rests in the cold store.
    saved: Future[bool] | None = None
    snapshot_positions: list[int] = field(default_factory=list)  # ascending
    parked_bytes: int = 0  # of ``caches``, while it waits with them
    # What its tenant had been served, in tokens, when it began to wait.
    waits_from: float = 0.0
    run: int = 0  # tokens fed since it was let in
    made_way: bool = False  # it was let in before

    @property
    def target(self) -> int:
        """The number of tokens that must be in the cache before the sequences can decode."""
        return len(self.tokens) - 1

    @property
    def next_stop(self) -> int:
        """The position that the next chunk may reach at most: a snapshot's, or the target."""
        return next((x for x in self.snapshot_positions if x > self.num_cached), self.target)

    def reuse(self, caches: Caches, num_tokens: int, saved: Future[bool]) -> None:
        """Start from ``caches``, which hold the first ``num_tokens`` tokens."""
        self.caches, self.saved = caches, saved
        self.num_cached = self.num_reused = num_tokens

    def let_go(self) -> None:
        """Begin from nothing the next time: the caches belong to another sequence, or to none."""
        self.caches, self.saved = [], None
        self.num_cached = self.num_reused = self.parked_bytes = 0

    def drop(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Take these out of the task, as far as they are in it; returns the ones taken."""
        leaving = [x for x in self.sequences if x in sequences]
        self.sequences = [x for x in self.sequences if x not in leaving]
        return leaving


def split_request(request: Request, max_tokens: int, at_once: int) -> list[PrefillTask]:
    """Make the request's sequences, and a prefill task for each ``at_once`` of them."""
    generation = request.generation
    request.sequences = [
        Sequence(request, i, SamplingGuard(sampling), list(generation.prompt), max_tokens)
        for i, sampling in enumerate(generation.sampling)
    ]
    tokens = np.array(generation.prompt, np.int32)
    groups = range(0, len(request.sequences), at_once)
    return [PrefillTask(request, request.sequences[i : i + at_once], tokens) for i in groups]
