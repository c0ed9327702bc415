"""Where arrays lie, many at a time: asking numpy for one address takes a microsecond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from kvstore.codecs.kernels.unit_parts import address_of
from kvstore.codecs.numba_functions import array_of, compiled

BATCH = 8


def _places(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, out: Any) -> None:
    for number, array in enumerate((a, b, c, d, e, f, g, h)):
        out[number, 0] = address_of(array)
        out[number, 1], out[number, 2], out[number, 3] = array.strides


def _for(kind: Any) -> Any:
    array = types.Array(kind, 3, "A", readonly=True)
    return compiled(types.void, _places, *[array] * BATCH, array_of(types.int64, 2))


_PLACES = {np.dtype(np.uint16): _for(types.uint16), np.dtype(np.float32): _for(types.float32)}


def places_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Addresses and strides of arrays of three axes and one dtype, int64 (arrays, 4)."""
    places = np.empty((-(-len(arrays) // BATCH) * BATCH, 4), np.int64)
    for first in range(0, len(arrays), BATCH):
        batch = list(arrays[first : first + BATCH])
        batch += batch[:1] * (BATCH - len(batch))
        _PLACES[arrays[0].dtype](*batch, places[first : first + BATCH])
    return places[: len(arrays)]
