"""Allots bits to components.

Entropy-coded presets do not need it: one step for all components is already the optimal allocation.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvstore.codecs.rows.lloyd_max import gauss_error


def greedy_bits(variances: np.ndarray, total: int, most: int = 8) -> np.ndarray:
    """Gives one bit after another to the component whose error shrinks most by it.

    ``variances``: floats of any shape, times the weight of errors. Returns int64 of that shape,
    each 0 to ``most``, with the sum ``total``. Raises ``ValueError`` if that is impossible.
    """
    errors = [gauss_error(1 << bits) for bits in range(most + 1)]
    gains = [before - after for before, after in zip(errors, errors[1:], strict=False)]
    flat = np.asarray(variances, np.float64).reshape(-1)
    if total > most * len(flat):
        raise ValueError(f"{total} bits for {len(flat)} components of {most} at most")
    bits = np.zeros(len(flat), np.int64)
    heap = [(-value * gains[0], number) for number, value in enumerate(flat)]
    heapq.heapify(heap)
    for _ in range(total):
        _, number = heap[0]
        bits[number] += 1
        if bits[number] == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-flat[number] * gains[bits[number]], number))
    return bits.reshape(np.shape(variances))
