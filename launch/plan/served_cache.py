"""The shape and the dtype of the live cache, for the chosen engine and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from engines.cache_classes import LATENT_ON_CPU
from engines.config import EngineConfig
from kvstore.shapes import DType
from launch.families.cache_shape import CacheShape, ModelRefused
from launch.families.table import cache_shape
from launch.machine.processor import has_matrix_tiles
from launch.settings.effective_settings import EffectiveSettings


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
