"""Arguments that the kernels of units share: their types, counts, and addresses of arrays.

Addresses are read in batches: asking numpy for a single one takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit, types

from kvstore.codecs.loops.numba_functions import address_of, array_of, compiled, tuple_of
from kvstore.codecs.stages.integer_klt import MAX_BITS

BLOCK = 64  # tokens that a kernel processes together
BATCH = 8  # arrays per call
ANGLES = array_of(types.float32, 3)
# The RoPE table of each segment (0: none), half the channels that each table rotates, cosines,
# sines, and head_dim.
ROPE_TABLES = (array_of(types.int64, 2), array_of(types.int64, 1), ANGLES, ANGLES, types.int64)
# Addresses of the engine's arrays and bytes from token to token, (units, segments) each.
SEGMENTS = tuple_of(array_of(types.int64, 2), array_of(types.int64, 2))


@njit
def count_of(runs: Any) -> Any:
    """Return the numbers of planes and components of a unit.

    ``runs``: int64 (MAX_BITS + 1,), the number of components that have each number of bits.
    """
    planes, components = 0, 0
    for bits in range(1, MAX_BITS + 1):
        planes += bits * runs[bits]
        components += runs[bits]
    return planes, components


def _put_addresses(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, out: Any
) -> None:
    for number, array in enumerate((a, b, c, d, e, f, g, h)):
        out[number, 0] = address_of(array)
        out[number, 1], out[number, 2], out[number, 3] = array.strides


def _compiled_for(kind: Any) -> Any:
    array = types.Array(kind, 3, "A", readonly=True)
    return compiled(types.void, _put_addresses, *[array] * BATCH, array_of(types.int64, 2))


_PUT_ADDRESSES = {
    np.dtype(np.uint16): _compiled_for(types.uint16),
    np.dtype(np.float32): _compiled_for(types.float32),
}


def addresses_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return addresses and strides in bytes, int64 (num_arrays, 4).

    ``arrays``: uint16 or fp32, all of one dtype and of three axes.
    """
    found = np.empty((-(-len(arrays) // BATCH) * BATCH, 4), np.int64)
    for first in range(0, len(arrays), BATCH):
        batch = list(arrays[first : first + BATCH])
        batch += batch[:1] * (BATCH - len(batch))
        _PUT_ADDRESSES[arrays[0].dtype](*batch, found[first : first + BATCH])
    return found[: len(arrays)]
