"""Decides at the start whether the plug-in can serve an engine; if not, gives the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from engines.kv_budget import INDEX_ON_VLLM, LATENT_ON_CPU, NOTHING_GROWS_ON_VLLM
from engines.vllm_environment.environment import is_supported, supported_releases
from engines.vllm_plugin.blocks.paging import DTYPES
from engines.vllm_plugin.groups import Groups, StateGroup

_ALL_KEEP_ALL: Final = (
    "start vLLM with --disable-hybrid-kv-cache-manager, and layers with windows keep all tokens too"
)


_KNOWN: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)


class Unsupported(ValueError):
    """This engine cannot have cold sessions; the message gives the reason and the fix."""


def check_version(version: str) -> None:
    """Raise ``Unsupported`` for a release of vLLM that the plug-in was not made for."""
    if not is_supported(version):
        raise Unsupported(
            f"thermocline's plug-in is not made for vLLM {version}, whose interface changes between"
            f" releases; install {supported_releases()}, or start vLLM without the plug-in"
        )


def check(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Groups:
    """Return an engine's groups of layers, if it can be served.

    Raises ``Unsupported`` if results might be silently wrong.
    """
    for reason in _reasons(vllm_config, kv_cache_config):
        raise Unsupported(f"cold sessions are not possible here: {reason}")
    return groups_of(kv_cache_config)


def groups_of(config: KVCacheConfig) -> Groups:
    """Return the groups of layers in a configuration that ``check`` accepts."""
    full, states = 0, []
    for i, group in enumerate(config.kv_cache_groups):
        spec, layers = layer_specs(group.kv_cache_spec)[0], tuple(group.layer_names)
        if isinstance(spec, MambaSpec):
            states.append(StateGroup(i, layers, 1, True, f"{spec.shapes} {spec.dtypes}"))
        elif isinstance(spec, SlidingWindowSpec):
            # A token attends to itself and to ``sliding_window - 1`` tokens before it.
            num_blocks = -(-(spec.sliding_window - 1) // spec.block_size)
            states.append(StateGroup(i, layers, num_blocks, False))
        else:
            full = i
    return Groups(full, tuple(config.kv_cache_groups[full].layer_names), tuple(states))


def _reasons(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        yield "a failed restore must cost a recompute; set kv_load_failure_policy to recompute"
    if transfer.kv_role != "kv_both":
        yield "sessions are both stored and loaded; set kv_role to kv_both"
    if not cache.enable_prefix_caching:
        if any(map(_keeps_latents, kv_cache_config.kv_cache_groups)):
            yield LATENT_ON_CPU  # vLLM itself turns prefix caching off there
        yield "blocks are named by vLLM's prefix cache; leave prefix caching on"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism is not supported; use tensor parallelism"
    if parallel.data_parallel_size > 1:
        yield "data parallelism is not supported inside one engine; start one engine per replica"
    if getattr(parallel, "nnodes", 1) > 1:
        yield "the workers must be on one machine"
    for kind in ("decode", "prefill"):
        if getattr(parallel, f"{kind}_context_parallel_size", 1) > 1:
            yield f"{kind} context parallelism splits blocks over ranks; use tensor parallelism"
    if vllm_config.model_config.enable_sleep_mode:
        yield "a sleeping engine gives up the memory that is being saved; leave sleep mode off"
    if vllm_config.weight_transfer_config is not None:
        yield "stored KV would not match replaced weights; leave weight transfer off"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding writes tokens that may be taken back"
    yield from _cache_reasons(kv_cache_config, cache.block_size)


def _cache_reasons(config: KVCacheConfig, block_size: int) -> Iterator[str]:
    specs = [spec for group in config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    for spec in specs:
        yield from _layer_reasons(spec)
    if not any(map(_keeps_all, config.kv_cache_groups)):
        yield NOTHING_GROWS_ON_VLLM
    for reason in _group_reasons(config, {block_size, *(x.block_size for x in specs)}):
        recurrent = any(isinstance(x, MambaSpec) for x in specs)
        yield reason if recurrent else f"{reason}; {_ALL_KEEP_ALL}"
    # Latents are an exception: any number of ranks may serve, and each keeps all of them, live and
    # cold.
    if config.kv_tp_replicas != 1 and not all(isinstance(x, MLAAttentionSpec) for x in specs):
        yield "several ranks hold the same heads; use a tensor parallel size up to the KV heads"


def _group_reasons(config: KVCacheConfig, sizes: set[int]) -> Iterator[str]:
    num_full = sum(map(_keeps_all, config.kv_cache_groups))
    if num_full > 1:
        yield f"the layers that keep all tokens form {num_full} groups of blocks, not one"
    if config.hash_block_size is not None:
        sizes = sizes | {config.hash_block_size}
    if len(sizes) > 1:
        yield f"blocks and their hashes cover different numbers of tokens: {sorted(sizes)}"


def _layer_reasons(spec: KVCacheSpec) -> Iterator[str]:
    """Yield the reasons against a kind of layer.

    Types are compared exactly: a subclass may keep fewer tokens, or other bytes, than its base.
    """
    if type(spec) is MLAAttentionSpec and _has_index(spec):
        yield INDEX_ON_VLLM
    elif type(spec) not in _KNOWN:
        yield f"layers of kind {type(spec).__name__} keep tokens in a way that is not known here"
    if isinstance(spec, AttentionSpec) and spec.dtype not in DTYPES:
        yield f"the KV cache is quantised ({spec.dtype}); leave --kv-cache-dtype at auto"
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        yield "recurrent states are restored at boundaries; set --mamba-cache-mode to align"


def _has_index(spec: MLAAttentionSpec) -> bool:
    """Return whether a layer's latents are selected by an index, or it holds that index's keys."""
    fields = (spec.is_index_group_leader, spec.model_version, spec.alignment, spec.tokens_per_state)
    return fields != (False, None, None, 1) or spec.cache_role != SparseCacheRole.SPARSE


def _keeps_latents(group: KVCacheGroupSpec) -> bool:
    return isinstance(layer_specs(group.kv_cache_spec)[0], MLAAttentionSpec)


def _keeps_all(group: KVCacheGroupSpec) -> bool:
    return isinstance(layer_specs(group.kv_cache_spec)[0], FullAttentionSpec)


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specifications of a group's layers; vLLM may bundle several kinds in one group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]
