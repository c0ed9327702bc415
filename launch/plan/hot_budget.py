"""The contexts that fit into the budget for live KV, by the shape of the live cache.

mlx_lm takes its working memory out of the same budget: a running row has room to grow, and exists
twice for a moment when it joins or leaves a batch. The other engines' pools hold only KV.

Both engines cut the model's context down to the longest that fits. But vLLM does not start when the
settings name a context that does not fit, so ``refusal`` reports it before vLLM is started.
"""

from __future__ import annotations

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
from kvstore.shapes import NUMPY_DTYPES, DType
from launch.families.cache_shape import CacheShape, ModelRefused
from launch.families.table import cache_shape
from launch.machine.resources import has_matrix_tiles
from launch.settings.effective_settings import EffectiveSettings

GPU_BLOCK_TOKENS: Final = 16  # vLLM's default


def served_cache(effective: EffectiveSettings, content: Mapping[str, Any]) -> CacheShape:
    """The cache of the model with this config.json (``content``), as the chosen engine keeps it.

    Raises:
        ModelRefused, NotUnderstood: see ``cache_shape``.
    """
    on_vllm = effective.engine_kind == "vllm"
    shape = cache_shape(content, "vllm" if on_vllm else "mlx")
    if on_vllm and shape.has_latents and effective.widens and not has_matrix_tiles():
        raise ModelRefused(LATENT_ON_CPU)
    return shape


def served_dtype(effective: EffectiveSettings, content: Mapping[str, Any]) -> DType:
    """The dtype of its elements, where they have no dtype of their own."""
    engine = effective.settings.engine
    dtype = live_dtype(engine, content, effective.widens)
    narrows = effective.engine_kind == "vllm" and engine.dtype == "auto" and not effective.widens
    # Of a float32 checkpoint vLLM makes what its device computes fastest.
    return "bfloat16" if narrows and dtype == "float32" else dtype


def live_dtype(engine: EngineConfig, content: Mapping[str, Any], widens: bool) -> DType:
    """The dtype of the live cache: the one that is set, else the platform's, else the model's."""
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
    """The budget for live KV (``engine.hot_bytes``) together with the KV that it has to hold."""

    shape: CacheShape
    itemsize: int  # bytes of one element of the live cache
    hot_bytes: int
    wanted_context: int  # tokens: the longest context that the model and the settings allow
    pays_for_work: bool  # the engine is mlx_lm
    context_is_set: bool = False  # ``wanted_context`` is a number out of the settings
    packed: KVCost | None = None  # cost of a live cache that is kept packed; None = it is not
    block_tokens: int = 0  # of vLLM's blocks; 0: there are none

    def idle_bytes(self, num_tokens: int) -> int:
        """Bytes of a session between its turns; at least 1."""
        if self.packed is not None:
            return max(1, self.packed.idle_bytes(num_tokens))
        return max(1, self.shape.hot_bytes(num_tokens, self.itemsize))

    def running_bytes(self, num_tokens: int) -> int:
        """Bytes of a session while it is answered alone."""
        if self.pays_for_work:
            return alone_bytes(self._cost, num_tokens)
        if size := self.block_tokens:  # whole blocks, and one that vLLM always keeps free
            num_tokens = (-(-num_tokens // size) + 1) * size
        return self.idle_bytes(num_tokens)

    def longest_context(self) -> int:
        """The longest prompt and answer together, in tokens, that the engine will accept."""
        return bisect_right(
            range(1, self.wanted_context + 1), self.hot_bytes, key=self.running_bytes
        )

    def sessions(self, num_tokens: int) -> int:
        """The number of sessions of this length that can be hot while one of them is answered."""
        left = self.hot_bytes - self.running_bytes(num_tokens)
        return 0 if left < 0 else 1 + left // self.idle_bytes(num_tokens)

    def refusal(self) -> str:
        """The reason why the engine would not start with this budget; "" if it would."""
        if self.pays_for_work:
            return too_little(self._cost, self.hot_bytes, self.wanted_context)
        smallest = (
            self.wanted_context
            if self.context_is_set
            else min(self.wanted_context, SMALLEST_CONTEXT)
        )
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
    """The budget that these settings give to the model of this config.json (``content``)."""
    engine = effective.settings.engine
    longest = stated_context(content) or UNSTATED_CONTEXT
    itemsize = NUMPY_DTYPES[served_dtype(effective, content)].itemsize
    bits = HOT_CODECS.get(engine.hot_codec)
    packed = bits and packed_cost(shape.growing, bits, itemsize, engine.prefill_step)
    return HotBudget(
        shape,
        itemsize,
        engine.hot_bytes,
        wanted_context=min(engine.max_context or longest, longest),
        pays_for_work=effective.engine_kind == "mlx",
        context_is_set=engine.max_context > 0,
        packed=packed or None,
        block_tokens=_block_tokens(effective),
    )


def _block_tokens(effective: EffectiveSettings) -> int:
    given = effective.settings.engine.vllm.block_tokens
    usual = CPU_BLOCK_TOKENS if effective.widens else GPU_BLOCK_TOKENS
    return given or usual if effective.engine_kind == "vllm" else 0
