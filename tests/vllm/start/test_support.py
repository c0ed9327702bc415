"""What is refused at start, on the cache configurations that vLLM itself makes of a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from engines.vllm_plugin.support import Unsupported, check

pytestmark = pytest.mark.vllm
BLOCK = 16

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def engine(**parallel: int) -> SimpleNamespace:
    """The fields of ``VllmConfig`` that are read, for an engine that can be served."""
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 2}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=BLOCK),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        speculative_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        weight_transfer_config=None,
    )


def cache(*specs: KVCacheSpec, **more: int) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, **more)


def test_dense_models_are_served():
    check(engine(), cache(FULL))


@pytest.mark.parametrize(
    "config",
    [
        cache(LATENT),
        cache(UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"layer0": LATENT})),
        cache(LATENT, kv_tp_replicas=2),  # each rank holds all, live and cold
    ],
    ids=["one kind", "uniform", "two ranks"],
)
def test_latents_are_served(config):
    assert check(engine(), config).layers


@pytest.mark.parametrize(
    "fields",
    [{"is_index_group_leader": True}, {"model_version": "deepseek_v4"}, {"alignment": 576}],
)
def test_latents_with_an_index_are_refused_in_one_sentence(fields):
    with pytest.raises(Unsupported, match="the keys of an index") as refused:
        check(engine(), cache(replace(LATENT, **fields)))
    assert "\n" not in str(refused.value)


def test_latents_are_refused_where_vllm_reuses_no_prefixes_of_them():
    without = engine()
    without.cache_config.enable_prefix_caching = False
    with pytest.raises(Unsupported, match="no prefixes of models with latents"):
        check(without, cache(LATENT))


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(Unsupported, match="tensor parallel size up to the KV heads"):
        check(engine(), cache(FULL, kv_tp_replicas=2))


@pytest.mark.parametrize("kind", ["pipeline", "data"])
def test_other_kinds_of_parallelism_are_refused(kind):
    with pytest.raises(Unsupported, match=f"{kind} parallelism"):
        check(engine(**{f"{kind}_parallel_size": 2}), cache(FULL))
