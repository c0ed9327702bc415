"""One-bit sketches: the signs of projections onto random directions (QJL, arXiv 2406.03482).

A sketch of ``k`` is sign(S k) with S normal. sqrt(pi / 2) / m |k| S^T sign(S k) has ``k`` as its
mean over S, so products with a query come out unbiased; single ones are far off.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.pieces import half_columns
from kvstore.codecs.pieces.draws import normal_draws
from kvstore.codecs.pieces.seams import Quantiser
from kvstore.codecs.reader import Reader


def directions(width: int, num_signs: int) -> np.ndarray:
    """S, fp32 (num_signs, width)."""
    return normal_draws("sketch", num_signs, width).astype(np.float32)


def sign_size(width: int, num_signs: int) -> np.float32:
    """What one sign adds along its direction, for a row whose root mean square is one."""
    return np.float32(np.sqrt(np.pi / 2 * width) / num_signs)


class Sketch:
    """Implements ``Transform``: onto the directions, for ``Sign(1)`` behind it."""

    def __init__(self, width: int, num_signs: int) -> None:
        self._directions = directions(width, num_signs)
        self._size = sign_size(width, num_signs)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        return np.matmul(stack, self._directions.T), b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        restored: np.ndarray = np.matmul(stack, self._directions * self._size)
        return restored

    def note_nbytes(self, num_tokens: int) -> int:
        return 0


class SketchedResidual:
    """A quantiser, and a sketch of what it missed. Implements ``Quantiser``.

    Behind the codes of a row, which have the sign above the first's bits, come two columns of bytes
    with the residual's size.
    """

    def __init__(self, first: Quantiser, first_bits: int, width: int) -> None:
        self._first, self._first_bits = first, first_bits
        self._directions = directions(width, width)
        self._size = sign_size(width, width)

    @property
    def bits(self) -> np.ndarray:
        """Of every column of codes."""
        own = np.full(len(self._directions), self._first_bits + 1)
        return np.concatenate([own, half_columns.BITS])

    def quantise(self, components: np.ndarray) -> np.ndarray:
        coarse = self._first.quantise(components)
        missed = components - self._first.restore(coarse)
        signs = (np.matmul(missed, self._directions.T) > 0).astype(np.uint8)
        sizes = np.sqrt(np.mean(missed * missed, axis=2, keepdims=True))
        codes = coarse | signs << self._first_bits
        return np.concatenate([codes, half_columns.to_columns(sizes)], axis=2)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        width = len(self._directions)
        sizes = half_columns.from_columns(codes[:, :, width:])
        signs = 2 * (codes[:, :, :width] >> self._first_bits).astype(np.float32) - 1
        coarse = self._first.restore(codes[:, :, :width] & ((1 << self._first_bits) - 1))
        missed = np.matmul(signs, self._directions) * (self._size * sizes)
        restored: np.ndarray = coarse + missed
        return restored
