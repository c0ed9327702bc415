"""Gives a model of mlx_lm caches that are packed while they are in use (``engine.hot_codec``).

What packs them is the fastest on this device that proves itself: before the first request each
candidate packs and unpacks a few hundred rows, ordinary and strange ones, and everything has to be
what the definition in numpy makes of them, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engines.config import EngineConfig
from engines.kv_budget import HOT_CODECS, packed_cost
from engines.mlx_worker.cache.layout import CachePlan, Caches, CannotServe
from engines.mlx_worker.cache.packed.attention import AttentionSeam, attends_better
from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.kv_cache import KVPackers, PackedKVCache, Seam
from engines.mlx_worker.cache.packed.metal_packer import MetalRowPacker, has_metal_kernel
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import RowKind, RowPacker
from kvstore.codecs import floats
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.shapes import DType, KVLayout

logger = logging.getLogger(__name__)

_NUM_ROWS = 320
_PROBE = [1, 2, 3, 2, 1]
# The share of the logits' spread that rounding an fp32 cache to bf16 may change.
TOLERANCE = 0.05


class NoPacker(Exception):
    """Nothing on this device packs such rows as the cold store does."""


def choose_packer(kind: RowKind) -> RowPacker:
    """Choose the packer of one kind of rows. Call it on the owner thread.

    Raises:
        NoPacker: nothing on this device gives the right bytes.
    """
    for name, make in _candidates(kind):
        try:
            packer = make()
            if agrees(packer):
                logger.info("live KV rows of %d values are packed by %s", kind.dim, name)
                return packer
            reason = "it gives other bytes than the definition"
        except Exception as error:  # of a compiler, a driver: any kind
            reason = f"{type(error).__name__}: {error}"
        logger.warning("%s cannot pack live KV rows of %d values: %s", name, kind.dim, reason)
    raise NoPacker(f"nothing on this device packs rows of {kind.dim} values as the cold store does")


def _candidates(kind: RowKind) -> Iterator[tuple[str, Callable[[], RowPacker]]]:
    """Yield the packers that this device may have, fastest first."""
    if mx.default_device().type == mx.DeviceType.cpu:
        yield "the host's kernels", lambda: HostRowPacker(kind)
    elif mx.metal.is_available() and has_metal_kernel(kind):
        yield "Metal kernels", lambda: MetalRowPacker(kind)
    yield "mlx operations", lambda: MlxRowPacker(kind)
    yield "plain mlx operations", lambda: MlxRowPacker(kind, butterflies="plain")


def agrees(packer: RowPacker) -> bool:
    """True if a packer gives the definition's bytes."""
    kind, form = packer.kind, packer.kind.format
    stored = sample_rows(kind)
    codes, scales = form.pack(floats.widen(stored, kind.stored))
    packed = packer.pack(mx.array(stored).view(kind.dtype))
    got_codes, got_scales = (np.array(x) for x in packed)
    whole = scales != 0
    if not np.array_equal(got_scales, scales) or not np.array_equal(got_codes[whole], codes[whole]):
        return False
    values = floats.narrow(form.unpack(codes, scales, kind.dim), kind.stored)
    unpacked = packer.unpack(mx.array(codes), mx.array(scales))
    got = np.array(unpacked.view(mx.uint16))
    right = floats.to_stored(values, kind.stored)
    return np.array_equal(got[whole], right[whole]) and not np.any(got[~whole] & 0x7FFF)


def sample_rows(kind: RowKind) -> np.ndarray:
    """Rows to try a packer with, as bit patterns, uint16 (num_rows, dim).

    Their channels have very different sizes, and some rows cannot be packed.
    """
    ramp = np.arange(_NUM_ROWS * kind.dim, dtype=np.float64).reshape(_NUM_ROWS, kind.dim)
    values = np.sin(ramp * ramp) * np.exp(3 * np.sin(np.arange(kind.dim) * 1.7))
    values[-1] = 0
    values[-2] *= 1e-30
    values[-3, 1] = np.inf
    values[-4, 2] = np.nan
    values[-5] *= 1e-7
    with np.errstate(all="ignore"):
        if kind.stored == "float16":
            return floats.to_stored(values.astype(np.float16), "float16")
        return floats.round_to_bf16(values.astype(np.float32))


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
