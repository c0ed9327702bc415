"""Feeds prompts into their caches, a chunk of each in turn.

Prompts are fed alone, not as a padded batch: an uneven batch computes padding, a short prompt
would wait for a long one, and a defect in one would take down all. The decode steps of running
sequences go between two chunks, so a chunk must not take long.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.cache import kv_arrays

# Every chunk pays for reading the weights and, on a crowded machine, for waiting on the other
# threads of the BLAS: measured, a chunk of 32 tokens then took as long as one of 128. So a slow
# machine must not be answered with ever smaller chunks.
SMALLEST_BUSY_CHUNK = 32
SMALLEST_QUIET_CHUNK = 128
# Longest pause that one chunk may put between two decode steps, and between two looks at the
# command queue when nothing decodes.
BUSY_CHUNK_S = 0.4
QUIET_CHUNK_S = 1.0


class ChunkSizer:
    """Chooses chunk sizes (powers of two) from the measured speed of this machine."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._seconds_per_token = 0.0

    def chunk(self, busy: bool, step_s: float = 0.0) -> int:
        """The number of tokens to feed next.

        Args:
            busy: sequences are waiting to decode.
            step_s: how long a step of theirs takes; a chunk may take as long, or a prompt would
                wait for one slow step after another.
        """
        chunk = SMALLEST_BUSY_CHUNK if busy else SMALLEST_QUIET_CHUNK
        limit_s = min(max(BUSY_CHUNK_S, step_s), QUIET_CHUNK_S) if busy else QUIET_CHUNK_S
        while self._seconds_per_token and 2 * chunk * self._seconds_per_token <= limit_s:
            chunk *= 2
        return min(chunk, self._largest)

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk. Tiny ones are ignored: they pay for reading the weights."""
        if num_tokens >= SMALLEST_BUSY_CHUNK:
            now, before = seconds / num_tokens, self._seconds_per_token or seconds / num_tokens
            self._seconds_per_token = 0.7 * before + 0.3 * now


class Prefiller:
    """Holds every prefill task between its admission and its batch, and feeds those that are ready.

    A task is *admitted* first, while its prefix is looked for, and *ready* once its caches are
    there. Both count as memory in use. Belongs to the owner thread.
    """

    def __init__(self, model: Any, largest_chunk: int, state_step: int) -> None:
        """Make one for a model.

        Args:
            state_step: its state is taken at multiples of so many tokens. 0 = its caches can be cut
                back, and none is taken.
        """
        self._model = model
        self._chunks = ChunkSizer(largest_chunk)
        self._state_step = state_step
        self.admitted: dict[PrefillTask, None] = {}  # oldest first; on their way, ready or not
        self.ready: deque[PrefillTask] = deque()  # can be fed; whose turn it is comes first
        self.step_s = 0.0  # of the last decode step

    def admit(self, task: PrefillTask) -> None:
        """Count the task as on its way; its prefix is being looked for."""
        self.admitted[task] = None
        task.request.num_fed = task.num_cached

    def start(self, task: PrefillTask) -> None:
        """Make an admitted task ready: ``task.caches`` hold what could be reused, or are empty."""
        if not task.caches:
            task.caches = make_prompt_cache(self._model)
        if self._state_step and task.request.generation.session is not None:
            task.state_positions = state_positions(task, self._state_step)
        task.request.num_fed = task.num_cached
        self.ready.append(task)

    def remove(self, task: PrefillTask) -> None:
        """Forget a task, wherever it is: it is done, or not wanted any more."""
        self.admitted.pop(task, None)
        if task in self.ready:
            self.ready.remove(task)

    def next(self) -> PrefillTask | None:
        """The task whose turn it is to be fed a chunk; None if all have been fed.

        They take turns, so a short prompt waits for one chunk of each long one.
        """
        for _ in range(len(self.ready)):
            self.ready.rotate(-1)
            if self.ready[-1].num_cached < self.ready[-1].target:
                return self.ready[-1]
        return None

    def feed(self, task: PrefillTask, busy: bool) -> None:
        """Feed one chunk of it, up to its next stop at most; ``busy`` = sequences wait to decode.

        Raises all that the model raises; the task's caches are then of no use.
        """
        started = time.perf_counter()
        size = self._chunks.chunk(busy, self.step_s)
        chunk = task.tokens[task.num_cached : min(task.num_cached + size, task.next_stop)]
        self._model(mx.array(chunk)[None], cache=task.caches)
        # Only the caches: the logits of these positions are never computed.
        mx.eval([cache.state for cache in task.caches])
        kv_arrays.pack_old(task.caches)
        mx.clear_cache()
        task.num_cached += len(chunk)
        task.request.num_fed = task.num_cached
        self._chunks.took(len(chunk), time.perf_counter() - started)


def state_positions(task: PrefillTask, step: int) -> list[int]:
    """Return the positions at which to take the state of a cache that cannot be cut, ascending.

    Two at most, both multiples of ``step``, the size of the store's chunks: the last one within the
    first boundary (a system prompt, which other sessions share: the store keeps it where they do),
    and the last one before the answer, which begins after the last boundary, or after a prompt that
    has none. Each is a copy in memory until the turn ends.
    """
    generation = task.request.generation
    last = min(len(generation.prompt) - 1, task.target)
    ahead = [x for x in generation.boundaries if x <= last] or [last]
    ends = {x - x % step for x in (min(ahead), max(ahead))}
    return sorted(x for x in ends if x > task.num_cached)
