"""The levels that rotated rows are quantised to."""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.rows.lloyd_max import gauss_table, sphere_table

MOST_BITS = 8


@functools.cache
def codebook(bits: int, dim: int | None = None) -> np.ndarray:
    """Returns the ``2 ** bits`` best levels for rotated rows, fp32, ascending, read-only.

    Rows have a root mean square of one. ``dim`` None: the levels for a normal variable, which all
    methods here use. Otherwise the exact ones for rows of ``dim`` values: an element of a random
    direction has a Beta law, which tends to the normal one. They are computed once and kept.

    Raises:
        ValueError: ``bits`` is not 1 to 8, or ``dim`` below 4.
    """
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits; 1 to {MOST_BITS} are possible")
    table = gauss_table(1 << bits) if dim is None else sphere_table(1 << bits, dim)
    levels = table.all_levels()
    levels.setflags(write=False)
    return levels
