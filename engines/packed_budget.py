"""What a live cache takes that is kept packed (``engine.hot_codec``). Pure arithmetic.

The first tokens of a session and its newest ones stay as they are, in 16 bits; all others take a
row codec's packed row and its scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from engines.kv_budget import KVCost
from kvstore.codecs.payload import KEPT_DTYPE, NUM_SINKS
from kvstore.codecs.rotated_rows import RotatedRows
from kvstore.shapes import KVLayer

# Bits per element of each ``engine.hot_codec``.
HOT_CODECS: Final[Mapping[str, int]] = {"tq3": 3, "tq4": 4}

# The newest tokens stay as they are: at least so many, and less than that and a block more. What is
# packed ends where a block of the session's tokens does, so that it ends with a chunk of the cold
# store, or before: what that keeps as it is (a session's tail) has then never been packed.
NUM_RECENT: Final = 64
BLOCK: Final = 64
MOST_EXACT: Final = NUM_SINKS + NUM_RECENT + BLOCK  # tokens of one session, between two calls


def packed_cost(
    layers: Sequence[KVLayer], num_bits: int, itemsize: int, prefill_step: int
) -> KVCost:
    """The cost of a model whose layers all grow and are all kept packed.

    Args:
        itemsize: bytes of one value in the engine's dtype, in which a layer is unpacked to be read.
        prefill_step: tokens of a prompt that are computed at once, and packed afterwards.
    """
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
        # On the way from its rows into attention every value exists twice.
        passing_per_token=2 * elements * itemsize // num_caches,
        passing=prefill_step * exact,
    )
