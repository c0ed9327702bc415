"""Products of rows of 16-bit words and a matrix, in numba; see ``stacks.int16_products``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvstore.codecs.kernels.emit.dots import TILE_TOKENS
from kvstore.codecs.kernels.units.kernel_parts import HOST, tile_of_rows
from kvstore.codecs.loops.numba_functions import NBYTES, address_of, array_of, compiled, sources_of

SOURCES = sources_of(__file__)

TOKENS, COLUMNS = TILE_TOKENS, HOST.tile_columns


def _products_function(sources: int) -> Any:
    """Make the function; ``sources`` is part of numba's cache key, which covers one file only."""

    def products(tiles: Any, panels: Any, sums: Any) -> None:
        """Multiply and put the products into ``sums``, int32 (components, tokens).

        ``tiles``: uint32 (tiles, pairs, TOKENS), ``panels``: uint32 (panels, pairs, COLUMNS), of
        two words each; both may be padded beyond the size of ``sums``.
        """
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
                        target = tile * TOKENS + token
                        sums[panel * COLUMNS + column, target] = scratch[token, column]
        # numba frees an array after its last use; its address does not count as a use
        scratch[0, 0], zeros[0] = 0, 0

    return products


products = compiled(
    types.void,
    _products_function(SOURCES),
    array_of(types.uint32, 3),
    array_of(types.uint32, 3),
    array_of(types.int32, 2),
)
