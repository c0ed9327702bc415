"""Whole levels times whole rows: how a transform is undone with the same bits on every host.

A component of small deviation has levels of a byte and a row of bytes, which processors multiply
fastest. The few of large deviation, the *wide* ones, would be restored too coarsely by bytes: their
levels and rows have 16 bits, and their sums are finer by a power of two. All sums are of 32 bits
and wrap around, so that their order does not matter; sums of what a packer writes never get there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.pieces.seams import Transform
from kvstore.codecs.reader import Reader

BYTE = 127
# As many products of two bytes as fp32 adds up exactly.
EXACT_IN_FP32 = 1024


@dataclass(frozen=True, eq=False)
class StepRows:
    """Of the units of a stack. Components of a unit: wide ones, then those of bytes, then none.

    ``wide``: int16 (units, most wide ones, width), ``rows``: int8 (units, most others, width),
    zeros behind what a unit has. ``counts``: int32 (units, 3): wide ones, others, and by how many
    bits the sums of wide ones are finer. ``scales``: fp32 (units,), powers of two: what a one in
    the other sums is worth.
    """

    wide: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    scales: np.ndarray

    def __post_init__(self) -> None:
        units, width = len(self.counts), self.rows.shape[2]
        shapes = (self.wide.shape[::2], self.rows.shape[::2], self.scales.shape)
        if shapes != ((units, width), (units, width), (units,)) or self.counts.shape[1:] != (3,):
            raise ValueError(f"rows of integers of shapes {shapes}")
        limits = (self.wide.shape[1], self.rows.shape[1], 15)
        if np.any(self.counts < 0) or np.any(self.counts > limits):
            raise ValueError("more rows of integers than there are")


class IntegerRows:
    """Implements ``Transform``: ``forward`` transforms one after another, undone by integers."""

    def __init__(self, forward: Sequence[Transform], rows: StepRows) -> None:
        self._forward, self._rows = forward, rows

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        for transform in self._forward:
            stack, _ = transform.forward(stack, first_token)
        return stack, b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        """``stack``: int32 levels."""
        known = self._rows
        restored = np.empty((*stack.shape[:2], known.rows.shape[2]), np.float32)
        for unit, (wide, others, finer) in enumerate(known.counts.tolist()):
            levels = stack[unit]
            sums = _product(levels[:, :wide], known.wide[unit, :wide])
            sums = _wrapped(sums + ((1 << finer) >> 1)) >> finer
            behind = slice(wide, wide + others)
            sums += _product(levels[:, behind], known.rows[unit, :others])
            restored[unit] = _wrapped(sums).astype(np.float32) * known.scales[unit]
        return restored

    def note_nbytes(self, num_tokens: int) -> int:
        return 0


def _wrapped(sums: np.ndarray) -> np.ndarray:
    return sums.astype(np.int32).astype(np.int64)


def _product(levels: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Exact, int64; by floats, for which BLAS is quick."""
    small = rows.dtype == np.int8 and int(np.abs(levels).max(initial=0)) <= BYTE
    kind, most = (np.float32, EXACT_IN_FP32) if small else (np.float64, max(len(rows), 1))
    sums = np.zeros((len(levels), rows.shape[1]), np.int64)
    for first in range(0, len(rows), most):
        part = slice(first, first + most)
        sums += np.matmul(levels[:, part].astype(kind), rows[part].astype(kind)).astype(np.int64)
    return sums
