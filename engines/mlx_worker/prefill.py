"""Feeds prompts into their caches, one chunk of one prompt at a time.

Prompts are fed alone, not as a padded batch: an uneven batch computes padding, a short prompt
would wait for a long one, and a defect in one would take down all. The decode steps of running
rows go between two chunks, so a chunk must not take long.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from engines.mlx_worker import parking
from engines.mlx_worker.turn import Prompt

# Every chunk pays for reading the weights and, on a crowded machine, for waiting on the other
# threads of the BLAS: measured, a chunk of 32 tokens then took as long as one of 128. So a slow
# machine must not be answered with ever smaller chunks.
SMALLEST_BUSY_CHUNK = 32
SMALLEST_QUIET_CHUNK = 128
# Longest pause that one chunk may put between two decode steps, and between two looks at the
# command queue when nothing decodes.
BUSY_CHUNK_S = 0.4
QUIET_CHUNK_S = 1.0
# Every so many chunks the oldest prompt goes before the shortest.
OLDEST_EVERY = 4


class Pace:
    """Chooses chunk sizes (powers of two) from the measured speed of this machine."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._seconds_per_token = 0.0

    def chunk(self, busy: bool) -> int:
        """``busy`` = rows are waiting to decode."""
        chunk = SMALLEST_BUSY_CHUNK if busy else SMALLEST_QUIET_CHUNK
        limit_s = BUSY_CHUNK_S if busy else QUIET_CHUNK_S
        while self._seconds_per_token and 2 * chunk * self._seconds_per_token <= limit_s:
            chunk *= 2
        return min(chunk, self._largest)

    def took(self, num_tokens: int, seconds: float) -> None:
        """Tiny chunks say nothing about speed: they pay for reading the weights."""
        if num_tokens >= SMALLEST_BUSY_CHUNK:
            now, before = seconds / num_tokens, self._seconds_per_token or seconds / num_tokens
            self._seconds_per_token = 0.7 * before + 0.3 * now


class Feeder:
    """All prompts that have a place in a batch but are not in a cache yet."""

    def __init__(self, model: Any, largest_chunk: int) -> None:
        self._model = model
        self._pace = Pace(largest_chunk)
        self._prompts: list[Prompt] = []  # oldest first
        self._num_chunks = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def prompts(self) -> list[Prompt]:
        return list(self._prompts)

    def add(self, prompt: Prompt) -> None:
        """``prompt.caches`` hold its first ``done`` tokens."""
        self._prompts.append(prompt)

    def discard(self, prompt: Prompt) -> None:
        if prompt in self._prompts:
            self._prompts.remove(prompt)

    def next(self) -> Prompt:
        """Shortest first, so that a restored session need not wait for a new long one; but every
        few chunks the oldest, so that the long one is not starved."""
        self._num_chunks += 1
        if self._num_chunks % OLDEST_EVERY == 0:
            return self._prompts[0]
        return min(self._prompts, key=lambda x: x.target - x.done)

    def feed(self, prompt: Prompt, busy: bool) -> None:
        """One chunk of it, up to its next stop at most; ``busy`` = rows are waiting to decode.

        Raises whatever the model raises; the prompt's caches are then of no use.
        """
        started = time.perf_counter()
        size = self._pace.chunk(busy)
        chunk = prompt.tokens[prompt.done : min(prompt.done + size, prompt.next_stop)]
        self._model(mx.array(chunk)[None], cache=prompt.caches)
        # Only the caches: what the head would say of these positions is never computed.
        mx.eval([cache.state for cache in prompt.caches])
        parking.pack_old(prompt.caches)
        mx.clear_cache()
        prompt.done += len(chunk)
        self._pace.took(len(chunk), time.perf_counter() - started)
