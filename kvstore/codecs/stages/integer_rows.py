"""A transform in whole numbers, which restores the same bits on every host.

Packing multiplies rows of unit size, rounded to 16 bits, by rows of 16 bits. Restoring adds up
levels times other rows:

A component of small deviation has levels of a byte and a row of bytes, which processors multiply
fastest. Bytes would restore the few components of large deviation, the *wide* ones, too coarsely:
their levels and rows have 16 bits, and their sums are finer by a power of two. All sums have 32
bits and wrap around, so that their order does not matter; the sums of a packer's own output never
get that large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.stacks.int16_products import Int16Products
from kvstore.codecs.stacks.stage_protocols import WithoutNote

BYTE = 127
LARGEST_INPUT = 32767
LARGEST_SIZE = 30_000.0  # norm of a row when packing; gains have steps, so some rows are larger
ENCODE_NORM = 32000.0
# Number of rows converted to floats at a time. fp32 adds up so many products of two bytes exactly,
# and fp64 so many of two words; and they take megabytes, less than all learned rows would.
ROWS_AT_ONCE = 256


def input_scale(width: int) -> float:
    """Returns the factor for rows of unit size.

    A row whose size is all in a single channel then still fits 16 bits.
    """
    return float(2.0 ** np.floor(np.log2(LARGEST_SIZE) - np.log2(width) / 2))


@dataclass(frozen=True, eq=False)
class StepRows:
    """The integers of a stack's units: rows that give components, and rows that restore them.

    Components of a unit are in this order: wide ones, then those of bytes, then dead ones.

    ``encode``: int16 (units, components, width), and ``rates``: fp32 (units, components): the value
    of a one in its sums. ``wide``: int16 (units, most wide ones, width), ``rows``: int8 (units,
    most others, width), padded with zeros. ``counts``: int32 (units, 3): the number of wide ones,
    of others, and of bits by which the sums of wide ones are finer. ``scales``: fp32 (units,),
    powers of two: the value of a one in the other sums. Raises ``ValueError`` if the arrays are
    inconsistent.
    """

    encode: np.ndarray
    rates: np.ndarray
    wide: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    scales: np.ndarray

    def __post_init__(self) -> None:
        units, width = len(self.counts), self.rows.shape[2]
        matrices = {x.shape[::2] for x in (self.encode, self.wide, self.rows)}
        others = (self.rates.shape, self.scales.shape, self.counts.shape[1:])
        if matrices != {(units, width)} or others != (self.encode.shape[:2], (units,), (3,)):
            raise ValueError(f"rows of integers of shapes {matrices}, {others}")
        limits = (self.wide.shape[1], self.rows.shape[1], 15)
        if np.any(self.counts < 0) or np.any(self.counts > limits):
            raise ValueError("more rows of integers than there are")
        if np.any(self.live > self.encode.shape[1]):
            raise ValueError("rows of integers of components that there are not")

    @property
    def live(self) -> np.ndarray:
        """The number of components of each unit that are restored, int (units,)."""
        live: np.ndarray = self.counts[:, :2].sum(axis=1)
        return live


class IntegerRows(WithoutNote):
    """Maps rows to components and levels back, in whole numbers. Implements ``Transform``."""

    def __init__(self, rows: StepRows) -> None:
        """Keeps the rows for packing only once, in the order that kernels need."""
        self._products = Int16Products(rows.encode, rows.live)
        self._rates, self._live = rows.rates, rows.live.tolist()
        self._wide, self._rows = rows.wide, rows.rows
        self._counts, self._scales = rows.counts, rows.scales
        self._input_scale = np.float32(input_scale(rows.rows.shape[2]))

    @property
    def forward_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arguments of a kernel: panels, values of a one, components in use."""
        return self._products.panels, self._rates, np.array(self._live, np.int64)

    @property
    def input_scale(self) -> np.float32:
        """The factor of rows before they are rounded."""
        return self._input_scale

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        rows = np.rint(stack * self._input_scale)
        words = np.clip(rows, -LARGEST_INPUT, LARGEST_INPUT).astype(np.int16)
        # Components are contiguous in memory, which is the order of the coders.
        components = np.zeros((*self._rates.shape, stack.shape[1]), np.float32)
        for unit, live in enumerate(self._live):
            sums = self._products.sums(unit, words[unit])
            np.multiply(sums, self._rates[unit, :live, None], out=components[unit, :live])
        return components.swapaxes(1, 2), b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        """Restores rows, fp32 (units, tokens, width).

        ``stack``: int32 levels (units, tokens, components).
        """
        restored = np.empty((*stack.shape[:2], self._rows.shape[2]), np.float32)
        for unit, (wide, others, finer) in enumerate(self._counts.tolist()):
            levels = stack[unit]
            sums = _product(levels[:, :wide], self._wide[unit, :wide])
            sums = _wrapped(sums + ((1 << finer) >> 1)) >> finer
            rest = slice(wide, wide + others)
            sums += _product(levels[:, rest], self._rows[unit, :others])
            restored[unit] = _wrapped(sums).astype(np.float32) * self._scales[unit]
        return restored


def _wrapped(sums: np.ndarray) -> np.ndarray:
    return sums.astype(np.int32).astype(np.int64)


def _product(levels: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns exact products, int64, computed with floats because BLAS is fast for them."""
    small = rows.dtype == np.int8 and int(np.abs(levels).max(initial=0)) <= BYTE
    kind = np.float32 if small else np.float64
    sums = np.zeros((len(levels), rows.shape[1]), np.int64)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        sums += np.matmul(levels[:, part].astype(kind), rows[part].astype(kind)).astype(np.int64)
    return sums
