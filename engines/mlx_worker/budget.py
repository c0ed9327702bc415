"""How many bytes of KV a row takes, and what a set of running batches will take.

Memory of a batch is rows x longest: mlx_lm pads it. Its arrays grow by ``STEP`` tokens at a time,
from wherever they happen to be full, so up to that many tokens of room are counted in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STEP = 256  # ``step`` of mlx_lm's caches


@dataclass(frozen=True)
class KVCost:
    """Bytes that one row takes in the caches of one model."""

    per_token: int  # layers that grow with every token
    windows: tuple[tuple[int, int], ...] = ()  # rotating layers: (bytes per token, longest)
    fixed: int = 0  # recurrent layers
    num_caches: int = 1  # that the bytes are spread over

    def row_bytes(self, num_tokens: int) -> int:
        length = num_tokens + STEP
        windows = sum(nbytes * min(length, longest) for nbytes, longest in self.windows)
        return self.per_token * length + windows + self.fixed


def batch_bytes(cost: KVCost, batches: Iterable[tuple[int, int]]) -> int:
    """``batches`` are (rows, longest row in tokens)."""
    return sum(rows * cost.row_bytes(longest) for rows, longest in batches if rows)


def passing_bytes(cost: KVCost, batches: Iterable[tuple[int, int]]) -> int:
    """What a row joining or leaving takes on top, for a moment.

    The row exists twice, in its batch and alone; and the batch is copied, one layer at a time.
    """
    alive = [(rows, longest) for rows, longest in batches if rows]
    row = max((cost.row_bytes(longest) for _, longest in alive), default=0)
    largest = max((rows * cost.row_bytes(longest) for rows, longest in alive), default=0)
    return row + largest // cost.num_caches


def longest_context(cost: KVCost, hot_bytes: int, at_most: int) -> int:
    """The longest context that a lone row can have inside the budget."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        needed = batch_bytes(cost, [(1, middle)]) + passing_bytes(cost, [(1, middle)])
        low, high = (middle, high) if needed <= hot_bytes else (low, middle - 1)
    return low
