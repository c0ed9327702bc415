"""The model as the engine will serve it: its weights, its cache, and whether it will be refused.

``HotBudget`` computes which contexts fit into the budget for live KV. With mlx_lm that budget also
has to hold working memory: a running sequence has spare capacity, and is copied when it joins or
leaves a batch. The other engines' pools hold only KV. All of them reduce the model's context to the
longest that fits, but vLLM does not start if the settings name a context that does not fit.

``serve``, ``plan`` and ``doctor`` use these checks. They refuse only models and settings that
certainly cannot work, judged by config.json; the engine inspects the real caches and decides.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from engines.config import CPU_BLOCK_TOKENS, EngineConfig
from engines.kv_budget import (
    HOT_CODECS,
    LATENT_ON_CPU,
    SMALLEST_CONTEXT,
    UNSTATED_CONTEXT,
    KVCost,
    alone_bytes,
    packed_cost,
    stated_context,
    too_little,
)
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.config import AUTO
from kvstore.errors import UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, DType
from launch.errors import UsageError
from launch.families.cache_shape import CacheShape, ModelRefused, NotUnderstood
from launch.families.table import cache_shape
from launch.families.weights import estimated_weights
from launch.machine.resources import has_matrix_tiles
from launch.model.find import Model, find_model
from launch.settings.budgets import weights_bytes
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import show_bytes

INDEX: Final = "model.safetensors.index.json"
GPU_BLOCK_TOKENS: Final = 16  # vLLM's default


def served_cache(effective: EffectiveSettings, content: Mapping[str, Any]) -> CacheShape:
    """Return the shape of the model's cache in the chosen engine; ``content`` is its config.json.

    Raises:
        ModelRefused, NotUnderstood: see ``cache_shape``.
    """
    on_vllm = effective.engine_kind == "vllm"
    shape = cache_shape(content, "vllm" if on_vllm else "mlx")
    if on_vllm and shape.has_latents and effective.widens and not has_matrix_tiles():
        raise ModelRefused(LATENT_ON_CPU)
    return shape


def served_dtype(effective: EffectiveSettings, content: Mapping[str, Any]) -> DType:
    """Return the dtype of the served model's live cache, states that are always fp32 excepted."""
    engine = effective.settings.engine
    dtype = live_dtype(engine, content, effective.widens)
    narrows = effective.engine_kind == "vllm" and engine.dtype == "auto" and not effective.widens
    # vLLM converts a float32 checkpoint to the dtype that its device computes fastest.
    return "bfloat16" if narrows and dtype == "float32" else dtype


def live_dtype(engine: EngineConfig, content: Mapping[str, Any], widens: bool) -> DType:
    """Return the dtype of the live cache: the one that is set, else float32 if the engine widens
    weights, else the model's.
    """
    if engine.dtype != "auto":
        return engine.dtype
    if widens:
        return "float32"
    text = content.get("text_config") or content
    stored = text.get("dtype") or text.get("torch_dtype") or content.get("torch_dtype")
    names: tuple[DType, ...] = get_args(DType)
    return next((name for name in names if name == stored), "bfloat16")


@dataclass(frozen=True)
class HotBudget:
    """The budget for live KV (``engine.hot_bytes``), and the sizes of the KV that it holds."""

    shape: CacheShape
    itemsize: int  # bytes of one element of the live cache
    hot_bytes: int
    wanted_context: int  # tokens: the longest context that the model and the settings allow
    pays_for_work: bool  # working memory counts, too: the engine is mlx_lm
    context_is_set: bool = False  # ``wanted_context`` comes from the settings
    packed: KVCost | None = None  # cost of a live cache that is kept packed; None = not packed
    block_tokens: int = 0  # tokens of vLLM's blocks; 0 = the engine has no blocks

    def idle_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a session between its turns; at least 1."""
        if self.packed is not None:
            return max(1, self.packed.idle_bytes(num_tokens))
        return max(1, self.shape.hot_bytes(num_tokens, self.itemsize))

    def running_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a session while it is answered and no other one is."""
        if self.pays_for_work:
            return alone_bytes(self._cost, num_tokens)
        if size := self.block_tokens:  # whole blocks, and one that vLLM always keeps free
            num_tokens = (-(-num_tokens // size) + 1) * size
        return self.idle_bytes(num_tokens)

    def longest_context(self) -> int:
        """Return the most tokens, prompt and answer together, that the engine will accept."""
        return bisect_right(
            range(1, self.wanted_context + 1), self.hot_bytes, key=self.running_bytes
        )

    def sessions(self, num_tokens: int) -> int:
        """Return how many sessions of this length can be hot while one of them is answered."""
        left = self.hot_bytes - self.running_bytes(num_tokens)
        return 0 if left < 0 else 1 + left // self.idle_bytes(num_tokens)

    def refusal(self) -> str:
        """Return the reason why the engine would not start with this budget; "" if it would."""
        if self.pays_for_work:
            return too_little(self._cost, self.hot_bytes, self.wanted_context)
        smallest = self.wanted_context
        if not self.context_is_set:
            smallest = min(smallest, SMALLEST_CONTEXT)
        least = self.running_bytes(smallest)
        if least <= self.hot_bytes:
            return ""
        return (
            f"hot_bytes = {self.hot_bytes} is too little: one context of {smallest} tokens takes"
            f" {-(-least >> 20)} MiB of vLLM's pool; give it that or more (--hot)"
            + (", or lower engine.max_context" if self.context_is_set else "")
        )

    @property
    def _cost(self) -> KVCost:
        return self.packed or self.shape.cost(self.itemsize)


def hot_budget_of(
    effective: EffectiveSettings, content: Mapping[str, Any], shape: CacheShape
) -> HotBudget:
    """Return the hot budget of these settings for a model; ``content`` is its config.json."""
    engine = effective.settings.engine
    longest = stated_context(content) or UNSTATED_CONTEXT
    itemsize = NUMPY_DTYPES[served_dtype(effective, content)].itemsize
    bits = HOT_CODECS.get(engine.hot_codec)
    packed = bits and packed_cost(shape.growing, bits, itemsize, engine.prefill_step)
    block_tokens = 0
    if effective.engine_kind == "vllm":
        usual = CPU_BLOCK_TOKENS if effective.widens else GPU_BLOCK_TOKENS
        block_tokens = engine.vllm.block_tokens or usual
    return HotBudget(
        shape,
        itemsize,
        engine.hot_bytes,
        wanted_context=min(engine.max_context or longest, longest),
        pays_for_work=effective.engine_kind == "mlx",
        context_is_set=engine.max_context > 0,
        packed=packed or None,
        block_tokens=block_tokens,
    )


def check_served(effective: EffectiveSettings, model: Model) -> None:
    """Check the model's cache and the budget for it. Raises ``UsageError``; says why."""
    check_family(effective, model)
    check_hot_codec(effective, model)
    shape = _known_cache(effective, model)
    if shape and (refusal := hot_budget_of(effective, model.config(), shape).refusal()):
        raise UsageError(f"engine.{refusal}")


def check_family(effective: EffectiveSettings, model: Model) -> None:
    """Refuse a model that the engine cannot serve. Raises ``UsageError``; says why."""
    try:
        _known_cache(effective, model)
    except ModelRefused as error:
        raise UsageError(f"{model.name} cannot be served: {error}") from error


def check_hot_codec(effective: EffectiveSettings, model: Model) -> None:
    """Refuse an ``engine.hot_codec`` that cannot be used. Raises ``UsageError``; says why."""
    engine, store = effective.settings.engine, effective.settings.store
    if not engine.hot_codec:
        return
    refused = f"engine.hot_codec = {engine.hot_codec} is refused: "
    if effective.engine_kind != "mlx":
        raise UsageError(
            f"{refused}only the mlx engine can keep live KV packed, not {effective.engine_kind};"
            " leave it empty"
        )
    from kvstore.codecs.rows.packed_codec import packed_codec

    layout = PackedLayout(dtype="bfloat16", layers=(), num_bits=HOT_CODECS[engine.hot_codec])
    if store.codec != AUTO:  # with "auto", sessions sleep in the codec of the live cache
        try:
            packed_codec(codec_by_name(store.codec), layout)
        except UnknownCodec as error:
            raise UsageError(f"{refused}{error} (store.codec)") from error
    shape = _known_cache(effective, model)
    if shape is not None and (reason := _unfit(shape, engine.hot_codec)):
        raise UsageError(f"{refused}{reason}; leave it empty")


def _unfit(shape: CacheShape, hot_codec: str) -> str:
    """Return the reason why this cache cannot be kept packed; "" if none is known."""
    from kvstore.codecs.rows.rotated_rows import RotatedRows

    if shape.needs_state:
        return "only plain KV caches can be kept packed, and this model has windows or states"
    if shape.has_latents:
        return "only plain KV caches can be kept packed, and this model keeps latents"
    rows = RotatedRows(HOT_CODECS[hot_codec])
    dims = {dim for x in shape.growing for dim in (x.head_dim, x.value_dim)}
    if strange := sorted(x for x in dims if not rows.supports(x)):
        return f"it cannot pack vectors of {strange[0]} values"
    return shape.exact_only


def _known_cache(effective: EffectiveSettings, model: Model) -> CacheShape | None:
    """Return the model's cache, None if only the engine knows it. Raises ``ModelRefused``."""
    if model.folder is None or not effective.is_ours:
        return None
    try:
        return served_cache(effective, model.config())
    except ModelRefused:
        raise
    except NotUnderstood:
        return None


def known_weights(model: Model) -> int | None:
    """Return the bytes of a model's weights, from its files or their index; None if unknown."""
    if model.folder is None:
        return None
    if found := weights_bytes(model.folder, widened=False):
        return found
    try:
        total = json.loads((model.folder / INDEX).read_text("utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(total) if isinstance(total, int | float) and total > 0 else None


def too_large(weights: int, room: int) -> str:
    """Return the reason why weights do not fit into ``room`` bytes; "" if they fit."""
    if weights < room:
        return ""
    return f"does not fit: {show_bytes(weights)} of weights, {show_bytes(room)} here"


def too_large_here(effective: EffectiveSettings) -> str:
    """Return the reason why the model of these settings cannot be loaded here; "" if it can.

    The weights are counted with their stored size; an engine that widens them needs more.
    """
    if not effective.is_ours or effective.assumes_gpu:
        return ""
    if effective.planned_weights is not None:
        return too_large(effective.planned_weights, effective.room)
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    weights = known_weights(model) or estimated_weights(model.config()) or 0
    return too_large(weights, effective.room)


def weights_at(effective: EffectiveSettings, bits: float) -> int:
    """Estimate the bytes of the model's weights if they were quantised to ``bits`` bits.

    Raises ``UsageError`` if they are already quantised, or cannot be estimated.
    """
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    content = model.config()
    if any(isinstance(content.get(x), dict) for x in ("quantization", "quantization_config")):
        raise UsageError(f"{model.name} is quantised, as its config.json says: leave --bits out")
    found = estimated_weights({**content, "quantization": {"bits": bits}})
    if found is None:
        raise UsageError(
            f"the weights of {model.name} cannot be counted from its config.json: give their bytes,"
            " for instance --weights 18GiB"
        )
    return found
