"""Counts the bytes of a live cache that is kept packed (``engine.hot_codec``). Pure arithmetic.

The first and the newest tokens of a session stay unpacked, in 16 bits; every other token takes a
packed row of the row codec and its scale, per head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from engines.kv_budget import KVCost
from kvstore.codecs.base import NUM_SINKS
from kvstore.shapes import KVLayer

# Bits per element of each ``engine.hot_codec``.
HOT_CODECS: Final[Mapping[str, int]] = {"tq3": 3, "tq4": 4}

# At least NUM_RECENT and less than NUM_RECENT + BLOCK of the newest tokens stay unpacked. The
# packed part ends at a multiple of BLOCK tokens, so a row's bytes do not depend on its company.
NUM_RECENT: Final = 64
BLOCK: Final = 64
MOST_EXACT: Final = NUM_SINKS + NUM_RECENT + BLOCK  # tokens of one session, between two calls


def packed_cost(
    layers: Sequence[KVLayer], num_bits: int, itemsize: int, prefill_step: int
) -> KVCost:
    """Compute the cost of a model whose layers all grow and are all kept packed.

    Args:
        itemsize: bytes of one value in the engine's dtype, in which a layer is unpacked to be read.
        prefill_step: tokens of a prompt that are computed at once, and packed afterwards.
    """
    from kvstore.codecs.rows.payload import KEPT_DTYPE
    from kvstore.codecs.rows.rotated_rows import RotatedRows

    rows = RotatedRows(num_bits)
    sides = [(x.num_kv_heads, dim) for x in layers for dim in (x.head_dim, x.value_dim)]
    row_nbytes = [n * (rows.packed_nbytes(dim) + rows.scale_dtype.itemsize) for n, dim in sides]
    elements = sum(heads * dim for heads, dim in sides)
    exact = elements * KEPT_DTYPE.itemsize
    num_caches = max(1, len(layers))
    return KVCost(
        per_token=sum(row_nbytes),
        windows=((exact, MOST_EXACT),),
        num_caches=num_caches,
        # While rows are unpacked for attention, every value exists twice.
        passing_per_token=2 * elements * itemsize // num_caches,
        passing=prefill_step * exact,
    )
