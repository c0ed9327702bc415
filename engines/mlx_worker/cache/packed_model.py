"""Gives an mlx_lm model caches that are packed while they are in use (``engine.hot_codec``).

The fastest packer of this device that passes a check is used: before the first request, each
candidate packs and unpacks a few hundred rows, ordinary and extreme ones, and the results must
equal those of the definition in numpy, bit for bit.

If it is correct and faster, the model attends to packed rows without unpacking them. mlx_lm's
models import ``scaled_dot_product_attention`` by name and call it with the cache, after the cache
has returned keys and values. While the context ``attending`` is entered, that function is replaced
in the model's own module by one that calls a packed cache's own attention and passes all other
calls on. mlx_lm's other modules are not changed. ``attends_better`` tries both ways at the start.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engines.config import EngineConfig
from engines.kv_budget import HOT_CODECS, packed_cost
from engines.mlx_worker.cache.layout import CachePlan, Caches, CannotServe
from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.kv_cache import (
    BatchPackedKVCache,
    KVPackers,
    PackedKVCache,
    Seam,
)
from engines.mlx_worker.cache.packed.metal_packer import MetalRowPacker, has_metal_kernel
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import NeverCopied, RowKind, RowPacker
from kvstore.codecs import floats
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.shapes import DType, KVLayout

logger = logging.getLogger(__name__)

_NUM_ROWS = 320
_PROBE = [1, 2, 3, 2, 1]
# The allowed difference of logits, as a fraction of their spread. Rounding to 16 bits changes them
# by about a thousandth; if a model computes attention in its own way, they differ by about a half.
TOLERANCE: Final = 0.05
NAME: Final = "scaled_dot_product_attention"
PROMPT: Final = [x % 64 for x in range(256)]  # long enough that half of it is packed
NEXT: Final = (1, 2, 3)  # tokens fed after the prompt, each on its own
NUM_TOKENS: Final = 1024  # tokens in the caches while both ways are timed
NUM_ROUNDS: Final = 4


class NoPacker(Exception):
    """No packer on this device packs such rows as the cold store does."""


def choose_packer(kind: RowKind) -> RowPacker:
    """Return the fastest correct packer for one kind of rows. Call it on the owner thread.

    Raises:
        NoPacker: no packer on this device gives the right bytes.
    """
    for name, make in _candidates(kind):
        try:
            packer = make()
            if agrees(packer):
                logger.info("live KV rows of %d values are packed by %s", kind.dim, name)
                return packer
            reason = "it gives other bytes than the definition"
        except Exception as error:  # a compiler or driver may raise any kind
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
    """Return whether a packer gives the definition's bytes for sample rows."""
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
    """Return rows to check a packer with, as bit patterns, uint16 (num_rows, dim).

    Their channels differ widely in magnitude, and some rows cannot be packed.
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
    """A model that makes packed caches, through the methods that mlx_lm finds by name."""

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
        """Return whether attention should read packed rows directly, as tried on this machine."""
        heads = [layer.num_kv_heads for layer in layout.layers]
        return attends_better(self.model, self.make_cache(), heads)


def with_packed_caches(
    model: Any, plan: CachePlan, config: EngineConfig
) -> tuple[PackedCacheModel, CachePlan]:
    """Return a model with packed caches, and its new plan. Call it on the owner thread.

    Raises:
        CannotServe: this model's caches cannot be kept packed; the message says why.
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
        is_alike = _continues_alike(model, live)
    except (AttributeError, TypeError, ValueError) as error:  # it uses caches in its own way
        raise CannotServe(
            f"engine.hot_codec = {config.hot_codec} is refused: this model cannot use packed caches"
            f" ({error}); leave it empty"
        ) from error
    if not is_alike:
        raise CannotServe(
            f"engine.hot_codec = {config.hot_codec} is refused: with packed caches this model gives"
            " other answers; leave it empty"
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


def _continues_alike(model: Any, live: PackedCacheModel) -> bool:
    """Return whether both give the same logits after a few tokens, none of which is packed yet.

    This detects models that access the insides of their caches, unless they raise an error.
    """
    answers = []
    for each in (model, live):
        caches: Caches = make_prompt_cache(each)
        each(mx.array([_PROBE]), cache=caches)
        answers.append(each(mx.array([_PROBE[:1]]), cache=caches)[0, -1].astype(mx.float32))
    one, other = answers
    return bool(mx.all(mx.abs(one - other) <= TOLERANCE * (one.max() - one.min())).item())


# ---- attention to packed rows


class PackedAttention:
    """Stands in for mlx_lm's ``scaled_dot_product_attention`` in one module."""

    def __init__(self, plain: Callable[..., mx.array]) -> None:
        self.plain = plain

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        cache = kwargs["cache"] if "cache" in kwargs else args[0] if args else None
        if isinstance(cache, PackedKVCache | BatchPackedKVCache) and cache.is_waiting:
            scale = kwargs["scale"] if "scale" in kwargs else args[1]
            sinks = kwargs["sinks"] if "sinks" in kwargs else args[3] if len(args) > 3 else None
            if sinks is None:
                return cache.attended(queries, scale)
            keys, values = cache.fetched(keys.dtype)
        return self.plain(queries, keys, values, *args, **kwargs)


class AttentionSeam(NeverCopied):
    """The modules whose attention function may be replaced; caches ask it whether it is."""

    def __init__(self, model: Any) -> None:
        self.modules = modules_of(model)

    def is_open(self) -> bool:
        """True while ``attending`` is entered for this model."""
        return bool(self.modules) and all(
            isinstance(getattr(module, NAME), PackedAttention) for module in self.modules
        )


def modules_of(model: Any) -> tuple[ModuleType, ...]:
    """Return the modules of a model's layers that have imported mlx_lm's attention function."""
    names = dict.fromkeys(type(layer).__module__ for _, layer in model.named_modules())
    modules = (sys.modules[name] for name in names if name in sys.modules)
    return tuple(module for module in modules if _has_seam(module))


def _has_seam(module: ModuleType) -> bool:
    function = getattr(module, NAME, None)
    return module is not base and (
        function is getattr(base, NAME) or isinstance(function, PackedAttention)
    )


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Replace the attention function in a model's modules, and restore it at the end.

    A model that does not use the function is left unchanged: its caches unpack their rows. If
    entered twice, the function is replaced once.
    """
    replaced = []
    for module in modules_of(model):
        plain = getattr(module, NAME)
        if not isinstance(plain, PackedAttention):
            setattr(module, NAME, PackedAttention(plain))
            replaced.append((module, plain))
    try:
        yield
    finally:
        for module, plain in replaced:
            setattr(module, NAME, plain)


def attends_better(model: Any, caches: list[Any], num_kv_heads: list[int]) -> bool:
    """Return whether a model should attend to packed rows; log how the times compare.

    Call it on the owner thread.

    Args:
        caches: empty packed caches, one for each layer; they are filled and unusable afterwards.
        num_kv_heads: number of heads of each layer.
    """
    if not all(isinstance(x, PackedKVCache) for x in caches):
        return False
    if not says_the_same(model, caches):
        logger.warning("attending to packed rows gives other logits; this model unpacks its rows")
        return False
    _fill_with_noise(caches, num_kv_heads)
    restoring_s, attending_s = [], []
    for _ in range(NUM_ROUNDS):
        restoring_s.append(_step(model, caches)[1])
        with attending(model):
            attending_s.append(_step(model, caches)[1])
    share = min(attending_s) / min(restoring_s)
    logger.info(
        "live KV: this model %s; at %d tokens, attending takes %.2f of the time of unpacking",
        "attends to packed rows" if share < 1 else "unpacks its rows",
        NUM_TOKENS,
        share,
    )
    return share < 1


def says_the_same(model: Any, caches: list[Any]) -> bool:
    """Return whether attending and unpacking give the same logits; fills ``caches``."""
    step = len(PROMPT) // 2
    for at in range(0, len(PROMPT), step):
        model(mx.array([PROMPT[at : at + step]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        for cache in caches:
            cache.pack_old()
    alike = 0
    for token in NEXT:
        restored, _ = _step(model, caches, token)
        with attending(model):
            attended, _ = _step(model, caches, token)
        spread = restored.max() - restored.min()
        alike += bool((mx.abs(attended - restored).max() <= TOLERANCE * spread).item())
    return alike > len(NEXT) // 2


def _fill_with_noise(caches: list[Any], num_kv_heads: list[int]) -> None:
    for cache, heads in zip(caches, num_kv_heads, strict=True):
        num_tokens = NUM_TOKENS - cache.offset
        shapes = [(1, heads, num_tokens, packer.kind.dim) for packer in cache.packers]
        keys, values = (mx.random.normal(shape) for shape in shapes)
        cache.append(keys, values)
        mx.eval(cache.state)
        cache.pack_old()


def _step(model: Any, caches: list[Any], token: int = 1) -> tuple[mx.array, float]:
    """Return the logits after one more token and the time in seconds; ``caches`` do not change."""
    begin = time.perf_counter()
    logits = model(mx.array([[token]]), cache=[copy(cache) for cache in caches])[0, -1]
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    return logits, time.perf_counter() - begin
