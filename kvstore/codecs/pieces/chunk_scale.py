"""Smoothing: every channel over the root of its largest value in the chunk (VecInfer, 2510.06175).

VecInfer learns the factors; taken from the chunk they cost two bytes for each channel of it, and
need no profile.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks import StackShape
from kvstore.errors import Corrupt

SMALLEST, LARGEST = np.float32(2.0**-10), np.float32(2.0**10)


class ChunkScale:
    """Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        self._shape = (shape.num_units, 1, shape.width)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        with np.errstate(all="ignore"):
            sizes = np.abs(np.where(np.isfinite(stack), stack, 0)).max(axis=1, keepdims=True)
            scales = np.clip(np.sqrt(sizes), SMALLEST, LARGEST).astype("<f2")
            return stack / scales.astype(np.float32), scales.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        scales = reader.take("<f2", *self._shape).astype(np.float32)
        if not np.all((scales >= SMALLEST) & (scales <= LARGEST)):
            raise Corrupt("a channel's scale is none that was written")
        return scales

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        restored: np.ndarray = stack * note
        return restored

    def note_nbytes(self, num_tokens: int) -> int:
        return 2 * self._shape[0] * self._shape[2]
