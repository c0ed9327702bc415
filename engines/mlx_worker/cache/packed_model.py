"""Gives a model of mlx_lm caches that are packed while they are in use (``engine.hot_codec``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engines.config import EngineConfig
from engines.kv_budget import HOT_CODECS, packed_cost
from engines.mlx_worker.cache.layout import CachePlan, Caches, CannotServe
from engines.mlx_worker.cache.packed.attention import AttentionSeam
from engines.mlx_worker.cache.packed.attention_choice import attends_better
from engines.mlx_worker.cache.packed.kv_cache import KVPackers, PackedKVCache, Seam
from engines.mlx_worker.cache.packed.packer_choice import NoPacker, choose_packer
from engines.mlx_worker.cache.packed.row_packer import RowKind
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.shapes import DType, KVLayout

_PROBE = [1, 2, 3, 2, 1]
# The share of the logits' spread that rounding an fp32 cache to bf16 may change.
TOLERANCE = 0.05


class PackedCacheModel:
    """The model, except for the caches it makes. mlx_lm asks a model for these by name."""

    def __init__(
        self, model: Any, layers: list[KVPackers], dtype: DType, seam: Seam | None = None
    ) -> None:
        self.model = model
        self._layers = layers
        self._dtype = dtype
        self._seam = seam

    def make_cache(self) -> Caches:
        return [PackedKVCache(packers, self._dtype, self._seam) for packers in self._layers]

    def __call__(self, tokens: mx.array, cache: Caches) -> Any:
        return self.model(tokens, cache=cache)

    def parameters(self) -> Any:
        return self.model.parameters()

    def attends_better(self, layout: KVLayout) -> bool:
        """Try whether attention should read packed rows as they are, on this machine."""
        heads = [layer.num_kv_heads for layer in layout.layers]
        return attends_better(self.model, self.make_cache(), heads)


def with_packed_caches(
    model: Any, plan: CachePlan, config: EngineConfig
) -> tuple[PackedCacheModel, CachePlan]:
    """Give a model packed caches; returns it and its new plan. Call it on the owner thread.

    Raises:
        CannotServe: this model's caches cannot be kept packed; says why.
    """
    layout, num_bits = _packable(model, plan, config.hot_codec), HOT_CODECS[config.hot_codec]
    stored: DType = "float16" if layout.dtype == "float16" else "bfloat16"
    dims = {dim for x in layout.layers for dim in (x.head_dim, x.value_dim)}
    try:
        packers = {d: choose_packer(RowKind(num_bits, d, stored)) for d in dims}
    except NoPacker as error:
        raise CannotServe(f"engine.hot_codec: {error}; leave it empty") from error
    layers = [(packers[x.head_dim], packers[x.value_dim]) for x in layout.layers]
    live = PackedCacheModel(model, layers, layout.dtype, AttentionSeam(model))
    try:
        goes_on = _goes_on_alike(model, live)
    except (AttributeError, TypeError, ValueError) as error:  # it asks caches for more than usual
        raise CannotServe(
            f"engine.hot_codec = {config.hot_codec} is refused: this model cannot use packed caches"
            f" ({error}); leave it empty"
        ) from error
    if not goes_on:
        raise CannotServe(
            f"engine.hot_codec = {config.hot_codec} is refused: with packed caches this model says"
            " something else; leave it empty"
        )
    packed = PackedLayout(num_bits=num_bits, **msgspec.structs.asdict(layout))
    names = tuple(PackedKVCache.__name__ for _ in layers)
    cost = packed_cost(layout.layers, num_bits, layout.numpy_dtype.itemsize, config.prefill_step)
    return live, replace(plan, class_names=names, cost=cost, layout=packed)


def _packable(model: Any, plan: CachePlan, hot_codec: str) -> KVLayout:
    refused = f"engine.hot_codec = {hot_codec} is refused: "
    if plan.layout is None:
        raise CannotServe(refused + plan.reason)
    caches: Caches = make_prompt_cache(model)
    if strange := sorted({type(x).__name__ for x in caches if type(x) is not KVCache}):
        raise CannotServe(
            f"{refused}only plain KV caches can be kept packed, and this model has"
            f" {', '.join(strange)}; leave it empty"
        )
    rows = RotatedRows(HOT_CODECS[hot_codec])
    for layer in plan.layout.layers:
        for dim in (layer.head_dim, layer.value_dim):
            if not rows.supports(dim):
                raise CannotServe(f"{refused}it cannot pack vectors of {dim} values")
    return plan.layout


def _goes_on_alike(model: Any, live: PackedCacheModel) -> bool:
    """True if both say the same after a few tokens, none of which is packed yet.

    A model that looks into its caches by itself is noticed here, or raises its own error.
    """
    answers = []
    for each in (model, live):
        caches: Caches = make_prompt_cache(each)
        each(mx.array([_PROBE]), cache=caches)
        answers.append(each(mx.array([_PROBE[:1]]), cache=caches)[0, -1].astype(mx.float32))
    one, other = answers
    return bool(mx.all(mx.abs(one - other) <= TOLERANCE * (one.max() - one.min())).item())
