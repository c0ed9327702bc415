"""Feeds prompts into their caches, a chunk of each in turn.

Prompts are fed singly, not as a padded batch: an uneven batch computes padding, a short prompt
would wait for a long one, and an error in one would fail all. Running sequences decode between two
chunks, so a chunk must not take long.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.cache import kv_arrays

# Every chunk costs a read of the weights and, on a busy machine, a wait for the other threads of
# the BLAS; as measured there, a chunk of 32 tokens took as long as one of 128. So chunks must not
# become ever smaller on a slow machine.
SMALLEST_BUSY_CHUNK = 32
SMALLEST_QUIET_CHUNK = 128
# Longest time of a chunk: between two decode steps, and between two checks of the command queue
# when nothing decodes.
BUSY_CHUNK_S = 0.4
QUIET_CHUNK_S = 1.0


class ChunkSizer:
    """Chooses chunk sizes (powers of two) from the measured speed of this machine."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._seconds_per_token = 0.0

    def chunk(self, busy: bool, step_s: float = 0.0) -> int:
        """Return the number of tokens to feed next.

        Args:
            busy: sequences are waiting to decode.
            step_s: time of a decode step; a chunk may take as long, or a prompt would wait for one
                slow step after another.
        """
        chunk = SMALLEST_BUSY_CHUNK if busy else SMALLEST_QUIET_CHUNK
        limit_s = min(max(BUSY_CHUNK_S, step_s), QUIET_CHUNK_S) if busy else QUIET_CHUNK_S
        while self._seconds_per_token and 2 * chunk * self._seconds_per_token <= limit_s:
            chunk *= 2
        return min(chunk, self._largest)

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk's time; tiny chunks are ignored, as they mostly read the weights."""
        if num_tokens >= SMALLEST_BUSY_CHUNK:
            now, before = seconds / num_tokens, self._seconds_per_token or seconds / num_tokens
            self._seconds_per_token = 0.7 * before + 0.3 * now


class Prefiller:
    """Holds prefill tasks from their admission until they join a batch, and feeds them.

    A task is first *admitted*, while its reusable prefix is searched for, and *ready* once it has
    its caches. Both count as memory in use. Belongs to the owner thread.
    """

    def __init__(self, model: Any, largest_chunk: int, state_step: int) -> None:
        """Make a prefiller for a model.

        Args:
            largest_chunk: most tokens of a chunk.
            state_step: states are taken at multiples of this many tokens; 0 = none are taken, since
                the model's caches can be cut back.
        """
        self._model = model
        self._chunks = ChunkSizer(largest_chunk)
        self._state_step = state_step
        self.admitted: dict[PrefillTask, None] = {}  # all tasks here, oldest first
        self.ready: deque[PrefillTask] = deque()  # those that can be fed, the next one first
        self.step_s = 0.0  # time of the last decode step

    def admit(self, task: PrefillTask) -> None:
        """Add a task, whose prefix is being searched for."""
        self.admitted[task] = None
        task.request.num_fed = task.num_cached

    def start(self, task: PrefillTask) -> None:
        """Make an admitted task ready; ``task.caches`` hold the reused prefix, or are empty."""
        if not task.caches:
            task.caches = make_prompt_cache(self._model)
        if self._state_step and task.request.generation.session is not None:
            task.state_positions = state_positions(task, self._state_step)
        task.request.num_fed = task.num_cached
        self.ready.append(task)

    def remove(self, task: PrefillTask) -> None:
        """Remove a task that is done or cancelled."""
        self.admitted.pop(task, None)
        if task in self.ready:
            self.ready.remove(task)

    def next(self) -> PrefillTask | None:
        """Return the task to feed a chunk of next; None if all have been fed.

        Tasks take turns, so a short prompt waits for only one chunk of each long one.
        """
        for _ in range(len(self.ready)):
            self.ready.rotate(-1)
            if self.ready[-1].num_cached < self.ready[-1].target:
                return self.ready[-1]
        return None

    def feed(self, task: PrefillTask, busy: bool) -> None:
        """Feed one chunk of a task, not beyond its next stop; ``busy`` = sequences wait to decode.

        Raises whatever the model raises; the task's caches are then unusable.
        """
        started = time.perf_counter()
        size = self._chunks.chunk(busy, self.step_s)
        chunk = task.tokens[task.num_cached : min(task.num_cached + size, task.next_stop)]
        self._model(mx.array(chunk)[None], cache=task.caches)
        # Only the caches are evaluated: the logits of these positions are never computed.
        mx.eval([cache.state for cache in task.caches])
        kv_arrays.pack_old(task.caches)
        mx.clear_cache()
        task.num_cached += len(chunk)
        task.request.num_fed = task.num_cached
        self._chunks.took(len(chunk), time.perf_counter() - started)


def state_positions(task: PrefillTask, step: int) -> list[int]:
    """Return the positions at which to take the state of a cache that cannot be cut, ascending.

    There are at most two, both multiples of ``step``, the size of the store's chunks: the last one
    within the first boundary (a system prompt, which sessions may share), and the last one before
    the last boundary, where the answer begins; without boundaries, before the prompt's end. Each
    state is a copy in memory until the turn ends.
    """
    generation = task.request.generation
    last = min(len(generation.prompt) - 1, task.target)
    ahead = [x for x in generation.boundaries if x <= last] or [last]
    ends = {x - x % step for x in (min(ahead), max(ahead))}
    return sorted(x for x in ends if x > task.num_cached)
