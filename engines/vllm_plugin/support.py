"""What the plug-in can serve, decided at start and said in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from engines.vllm_env import SUPPORTED


class Unsupported(ValueError):
    """Why this engine cannot have cold sessions, and what to do."""


def check_version(version: str) -> None:
    if not version.startswith(SUPPORTED):
        raise Unsupported(
            f"thermocline's plug-in is made for vLLM {SUPPORTED}*, this is {version}: its interface"
            f" changes between releases; install vllm=={SUPPORTED}*, or start vLLM without it"
        )


def check(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Raises ``Unsupported`` for anything that would be, or might be, silently wrong."""
    for reason in _reasons(vllm_config, kv_cache_config):
        raise Unsupported(f"cold sessions are not possible here: {reason}")


def _reasons(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        yield "a failed restore must cost a recompute; set kv_load_failure_policy to recompute"
    if transfer.kv_role != "kv_both":
        yield "sessions are both stored and loaded; set kv_role to kv_both"
    if not cache.enable_prefix_caching:
        yield "blocks are named by vLLM's prefix cache; leave prefix caching on"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism is not supported; use tensor parallelism"
    if parallel.data_parallel_size > 1:
        yield "data parallelism is not supported inside one engine; start one engine per replica"
    if getattr(parallel, "nnodes", 1) > 1:
        yield "the workers must be on one machine"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        yield "decode context parallelism splits blocks over ranks"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding writes tokens that may be taken back"
    yield from _cache_reasons(kv_cache_config, cache.block_size)


def _cache_reasons(config: KVCacheConfig, block_size: int) -> Iterator[str]:
    specs = [spec for group in config.kv_cache_groups for spec in _layer_specs(group.kv_cache_spec)]
    if any(isinstance(x, MambaSpec) for x in specs):
        yield (
            "the model has recurrent layers, whose state vLLM hands out at few boundaries only"
            " (docs/decisions: hybrid models on vLLM)"
        )
    if any(isinstance(x, MLAAttentionSpec) for x in specs):
        yield "the model keeps one latent vector per token (MLA), which has no heads to pack"
    if any(not isinstance(x, FullAttentionSpec) for x in specs):
        kinds = sorted({type(x).__name__ for x in specs})
        yield f"layers of kind {', '.join(kinds)} do not keep all tokens"
    if len(config.kv_cache_groups) != 1:
        yield f"the model's layers form {len(config.kv_cache_groups)} groups of blocks, not one"
    if config.hash_block_size not in (None, block_size):
        yield f"hashes cover {config.hash_block_size} tokens, blocks {block_size}"
    if config.kv_tp_replicas != 1:
        yield "several ranks hold the same heads; use a tensor parallel size up to the KV heads"


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]
