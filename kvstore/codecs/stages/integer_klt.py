"""A KLT and its levels in small integers: every machine restores a payload to the same bits.

Rows of unit size become 16-bit integers, and so does the basis; their products add up exactly, in
any order and on any host. Restoring multiplies levels of a byte by a basis of bytes, which every
processor does several times faster than with floats. Rounding adds only a small part of the error
that quantising causes, because for each component the two bytes share the range between them (see
``rate_integers``).
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.stacks.pipeline import WithoutNote, gain_factors

MAX_WIDTH = 1024  # for which sums of products of bytes stay below 2^24
LARGEST_INPUT = 32767
MAX_BITS = 6
NUM_MAGNITUDES = 1 << (MAX_BITS - 1)


def input_scale(width: int) -> int:
    """Return the factor for rows of unit size: a scaled row has a norm of at most 2^13."""
    return 1 << (13 - (width - 1).bit_length() // 2 - (width - 1).bit_length() % 2)


class IntegerKlt(WithoutNote):
    """Maps rows onto integer components, and integer levels back. Implements ``Transform``."""

    def __init__(self, encode: np.ndarray, decode: np.ndarray, scales: np.ndarray) -> None:
        """``encode``: int16 and ``decode``: int8, both (units, components, width).

        ``scales``: fp32 (units,), powers of two: what 1 stands for in a product of the two. Raises
        ``ValueError`` for rows of more than ``MAX_WIDTH`` values.
        """
        if encode.shape[2] > MAX_WIDTH:
            raise ValueError(f"rows of {encode.shape[2]} values")
        self._encode, self._decode, self._scales = encode, decode, scales
        self._input_scale = np.float32(input_scale(encode.shape[2]))

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        rows = np.rint(stack * self._input_scale)
        rows = np.clip(rows, -LARGEST_INPUT, LARGEST_INPUT).astype(np.float64)
        components = np.matmul(self._encode.astype(np.float64), rows.swapaxes(1, 2))
        return components.astype(np.int32).swapaxes(1, 2), b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        """Restore rows; sums stay below 2^24, so that fp32 holds them in any order."""
        sums = np.matmul(stack.astype(np.float32), self._decode.astype(np.float32))
        return sums * self._scales[:, None, None]


class IntegerLevels:
    """Maps integer components to codes, and codes to integer levels. Implements ``Quantiser``.

    A code's highest bit means that the value is positive. In the bits below, sizes count
    upwards for positive values and downwards for negative ones: codes are in the order of values.
    """

    def __init__(
        self,
        bits: np.ndarray,
        bounds: np.ndarray,
        levels: np.ndarray,
        units: np.ndarray,
        rates: np.ndarray,
    ) -> None:
        """``bits``: (units, components), 0 to ``MAX_BITS``.

        ``bounds``: int32 (units, components, NUM_MAGNITUDES), ascending, of sizes; from the last
        that the bits allow, they are never reached. ``levels``: uint8 of the same shape.
        ``units``, ``rates``: fp32 (units, components): what 1 stands for in a level, a component.
        """
        self._bits = bits.astype(np.int64)
        self._bounds, self._levels = bounds, levels
        self._units, self._rates = units, rates

    def quantise(self, components: np.ndarray) -> np.ndarray:
        sizes, halves = np.abs(components), (1 << self._bits[:, None]) >> 1
        counts = np.zeros(components.shape, np.int64)
        for k in range(NUM_MAGNITUDES - 1):
            counts += sizes > self._bounds[:, None, :, k]
        codes = np.where(components >= 0, halves + counts, halves - 1 - counts)
        return np.maximum(codes, 0).astype(np.uint8)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Return int32 levels (units, tokens, components); zero for components without bits."""
        halves = ((1 << self._bits[:, None]) >> 1).astype(np.int64)
        above = codes.astype(np.int64) - halves
        sizes = np.where(above >= 0, above, -1 - above) % NUM_MAGNITUDES
        unit, component = np.ogrid[: len(self._bits), : self._bits.shape[1]]
        levels = self._levels[unit[:, None], component[:, None], sizes].astype(np.int32)
        return np.where(above >= 0, levels, -levels) * (self._bits > 0)[:, None]

    def fit_gains(self, components: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return the factors of gains that fit restored rows best, fp32 (units, tokens, 1).

        ``components``: int32 (units, tokens, components); ``codes``: uint8 of the same shape.
        """
        levels = self.restore(codes).astype(np.float32)
        along, energy = np.zeros((2, *components.shape[:2]), np.float32)
        for k in range(components.shape[2]):  # in this order, which is part of the format
            restored = levels[:, :, k] * self._units[:, None, k]
            exact = components[:, :, k].astype(np.float32) * self._rates[:, None, k]
            along += exact * restored
            energy += restored * restored
        return gain_factors(along, energy)
