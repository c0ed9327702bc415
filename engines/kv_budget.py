"""The caches of live KV: which can be served and kept cold, and the bytes that they take.

The engine inspects the caches that a model makes; ``thermocline plan`` predicts them from
config.json. Both refuse a model in the same words.

In a cache that is kept packed (``engine.hot_codec``), the first and the newest tokens of a session
stay in 16 bits; every other token takes, per head, a packed row of the row codec and its scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.codecs.base import NUM_SINKS
from kvstore.shapes import KVLayer

GROWING: Final = frozenset(("KVCache", "PackedKVCache"))
# Caches whose state cannot be cut back to an earlier token.
STATEFUL: Final = frozenset(("RotatingKVCache", "ArraysCache"))
# Reasons for refusing a model on vLLM.
LATENT_ON_CPU: Final = (
    "vLLM reuses no prefixes of models with latents (MLA) on this processor; choose the mlx engine"
)
INDEX_ON_VLLM: Final = (
    "beside its latents (MLA) the model keeps the keys of an index, in a form not known here"
)
NOTHING_GROWS_ON_VLLM: Final = (
    "no layer of the model keeps all tokens, so that little would be gained"
)
STEP = 256  # ``step`` of mlx_lm's caches
SMALLEST_CONTEXT = 64  # tokens; a budget too small for this is taken for a mistake
# Tokens for a model that states no limit (a pure state-space model), since memory is finite.
UNSTATED_CONTEXT = 32_768
# Bits per element of each ``engine.hot_codec``.
HOT_CODECS: Final[Mapping[str, int]] = {"tq3": 3, "tq4": 4}
# At least NUM_RECENT and less than NUM_RECENT + BLOCK of the newest tokens stay unpacked. The
# packed part ends at a multiple of BLOCK tokens, so a row's bytes do not depend on its batch.
NUM_RECENT: Final = 64
BLOCK: Final = 64
MOST_EXACT: Final = NUM_SINKS + NUM_RECENT + BLOCK  # unpacked tokens of a session between calls


def cannot_batch(class_name: str) -> str:
    """Return the sentence that refuses a model with a cache that mlx_lm cannot batch."""
    return (
        f"mlx_lm cannot batch the {class_name} of this model, so it cannot be served; choose"
        " another model"
    )


def cannot_keep(class_names: Iterable[str]) -> str:
    """Return why sessions of a model with these caches cannot be kept cold; "" if they can."""
    strange = sorted({*class_names} - GROWING - STATEFUL)
    return f"its caches of class {', '.join(strange)} are not known here" if strange else ""


@dataclass(frozen=True)
class KVCost:
    """The bytes that one row, which is one running sequence, takes in a model's caches."""

    per_token: int  # bytes per token of all layers that grow with every token
    windows: tuple[tuple[int, int], ...] = ()  # rotating layers: (bytes per token, most tokens)
    fixed: int = 0  # bytes of recurrent layers
    num_caches: int = 1  # caches that the bytes are spread over
    # Bytes taken only briefly: per token of the batch, and for the prefill step being computed.
    passing_per_token: int = 0
    passing: int = 0

    def row_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a running row, including its room to grow."""
        return self.idle_bytes(num_tokens + STEP)

    def idle_bytes(self, num_tokens: int) -> int:
        """Return the bytes of an idle row."""
        windows = sum(nbytes * min(num_tokens, longest) for nbytes, longest in self.windows)
        return self.per_token * num_tokens + windows + self.fixed


def batch_bytes(cost: KVCost, batches: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of batches, each given as (rows, tokens of the longest row)."""
    return sum(rows * cost.row_bytes(longest) for rows, longest in batches if rows)


def passing_bytes(cost: KVCost, batches: Iterable[tuple[int, int]]) -> int:
    """Return the extra bytes that are briefly needed when a row joins or leaves a batch.

    The row then exists twice, in its batch and alone, and the batch is copied one layer at a time.

    Args:
        batches: as for ``batch_bytes``.
    """
    alive = [(rows, longest) for rows, longest in batches if rows]
    row = max((cost.row_bytes(longest) for _, longest in alive), default=0)
    largest = max((rows * cost.row_bytes(longest) for rows, longest in alive), default=0)
    unpacked = max((rows * longest for rows, longest in alive), default=0) * cost.passing_per_token
    return row + largest // cost.num_caches + unpacked + (cost.passing if alive else 0)


def alone_bytes(cost: KVCost, num_tokens: int) -> int:
    """Return the bytes that a context of ``num_tokens`` needs when it is the only one running."""
    alone = [(1, num_tokens)]
    return batch_bytes(cost, alone) + passing_bytes(cost, alone)


def longest_context(cost: KVCost, hot_bytes: int, at_most: int) -> int:
    """Return the longest context, in tokens up to ``at_most``, that fits if it alone runs."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if alone_bytes(cost, middle) <= hot_bytes else (low, middle - 1)
    return low


def too_little(cost: KVCost, hot_bytes: int, wanted: int) -> str:
    """Return a sentence that says why the budget is too small to serve at all; "" if it is not.

    Args:
        wanted: the longest context that the settings ask for, in tokens.
    """
    smallest = min(wanted, SMALLEST_CONTEXT)
    least = alone_bytes(cost, smallest)
    if least <= hot_bytes:
        return ""
    return (
        f"hot_bytes = {hot_bytes} is too little for this model: a context of {smallest} tokens"
        f" needs {-(-least >> 20)} MiB while it runs; give it that or more (--hot)"
    )


def stated_context(config: Mapping[str, Any]) -> int | None:
    """Return the model's longest context, prompt and answer together, in tokens.

    Args:
        config: the model's config.json.

    Returns:
        None if the config does not state it.
    """
    text = config.get("text_config") or config
    for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "n_ctx"):
        if isinstance(text.get(key), int):
            return int(text[key])
    return None


def packed_cost(
    layers: Sequence[KVLayer], num_bits: int, itemsize: int, prefill_step: int
) -> KVCost:
    """Return the cost of a model whose layers all grow with every token and are all kept packed.

    Args:
        itemsize: bytes of one value in the engine's dtype, to which attention unpacks a layer.
        prefill_step: tokens of a prompt that are computed at once and then packed.
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
