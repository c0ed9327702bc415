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

    def row_bytes(self, num_tokens: int) -> int:
        length = num_tokens + STEP
        windows = sum(nbytes * min(length, longest) for nbytes, longest in self.windows)
        return self.per_token * length + windows + self.fixed

    def tokens_within(self, nbytes: int, at_most: int) -> int:
        """The longest row, up to ``at_most`` tokens, whose bytes do not exceed ``nbytes``."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.row_bytes(middle) <= nbytes else (low, middle - 1)
        return low


def batch_bytes(cost: KVCost, batches: Iterable[tuple[int, int]]) -> int:
    """``batches`` are (rows, longest row in tokens)."""
    return sum(rows * cost.row_bytes(longest) for rows, longest in batches if rows)


def passing_bytes(cost: KVCost, batches: Iterable[tuple[int, int]]) -> int:
    """What a row joining or leaving takes on top, for a moment: it exists twice."""
    longest = max((longest for rows, longest in batches if rows), default=0)
    return cost.row_bytes(longest) if longest else 0


def longest_context(cost: KVCost, hot_bytes: int, at_most: int) -> int:
    """The longest context a lone row can have inside the budget."""
    return cost.tokens_within(hot_bytes // 2, at_most)
