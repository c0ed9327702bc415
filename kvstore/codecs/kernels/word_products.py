"""Products of rows of words and a matrix of them, as a numba function; see ``codecs.products``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvstore.codecs.kernels.compiled import SOURCES
from kvstore.codecs.kernels.dots import TILE_TOKENS
from kvstore.codecs.kernels.host_intrinsics import HOST, tile_of_rows
from kvstore.codecs.kernels.unit_parts import NBYTES, address_of
from kvstore.codecs.numba_functions import array_of, compiled

TOKENS, COLUMNS = TILE_TOKENS, HOST.tile_columns


def _products_with(sources: int) -> Any:
    """``sources`` is a part of the key of numba's cache, which knows of one file only."""

    def products(tiles: Any, panels: Any, sums: Any) -> None:
        """``tiles``: uint32 (tiles, pairs, TOKENS); ``panels``: uint32 (panels, pairs, COLUMNS);
        ``sums``: int32 (components, tokens), of no more tokens and components than those."""
        scratch = np.empty((TOKENS, COLUMNS), np.int32)
        zeros = np.zeros(COLUMNS, np.int32)
        num_pairs = np.int64(tiles.shape[1])
        for panel in range(panels.shape[0]):
            count = min(sums.shape[0] - panel * COLUMNS, COLUMNS)
            for tile in range(tiles.shape[0]):
                args = (
                    address_of(tiles[tile]),
                    address_of(panels[panel]),
                    address_of(zeros),
                    address_of(scratch),
                    num_pairs,
                    NBYTES * TOKENS,
                    NBYTES * COLUMNS,
                    NBYTES * COLUMNS,
                )
                tile_of_rows(sources, args)
                for column in range(count):
                    for token in range(min(sums.shape[1] - tile * TOKENS, TOKENS)):
                        place = tile * TOKENS + token
                        sums[panel * COLUMNS + column, place] = scratch[token, column]
        # numba frees an array behind its last use, and addresses are none
        scratch[0, 0], zeros[0] = 0, 0

    return products


products = compiled(
    types.void,
    _products_with(SOURCES),
    array_of(types.uint32, 3),
    array_of(types.uint32, 3),
    array_of(types.int32, 2),
)
