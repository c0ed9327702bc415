"""What is served, and what is refused at start and why; on vLLM's own configuration objects."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import torch
from transformers import Qwen2_5_VLConfig
from vllm.config import ModelConfig, WeightTransferConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from engines.vllm_plugin.blocks.block_layout import UnknownLayout
from engines.vllm_plugin.groups import Groups, StateGroup
from engines.vllm_plugin.scheduler.welcome import sees_images
from engines.vllm_plugin.support import Unsupported, check
from engines.vllm_plugin.worker.worker_side import attention_cache
from tests.vllm.conftest import model_path

pytestmark = pytest.mark.vllm

BLOCK = 32
HEADS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=100)
RECURRENT = MambaSpec(
    block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
)

LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)

FORM = "((4, 4),) (torch.float32,)"  # which distinguishes states


def cache_config(*specs: Any, **fields: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], x) for i, x in enumerate(specs)]
    return KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups, **fields)


PARALLEL = {  # fields, and what their refusal names
    "pipeline_parallel_size": "pipeline parallelism",
    "data_parallel_size": "data parallelism",
    "nnodes": "one machine",
    "decode_context_parallel_size": "context parallelism",
    "prefill_context_parallel_size": "context parallelism",
}


@dataclass
class Engine:
    """The fields of vLLM's configuration that are read."""

    parallel: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    speculative: Any = None
    sleep: bool = False
    weight_transfer: Any = None

    @property
    def config(self) -> Any:
        one = dict.fromkeys(PARALLEL, 1)
        cache = {"enable_prefix_caching": True, "block_size": BLOCK}
        transfer = {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"}
        return SimpleNamespace(
            parallel_config=SimpleNamespace(**(one | self.parallel)),
            cache_config=SimpleNamespace(**(cache | self.cache)),
            kv_transfer_config=SimpleNamespace(**(transfer | self.transfer)),
            speculative_config=self.speculative,
            model_config=SimpleNamespace(enable_sleep_mode=self.sleep),
            weight_transfer_config=self.weight_transfer,
        )


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ([FULL], Groups(0, ("layer.0",))),
        ([LATENT], Groups(0, ("layer.0",))),
        ([UniformTypeKVCacheSpecs(BLOCK, {"layer.0": LATENT})], Groups(0, ("layer.0",))),
        (
            [WINDOW, FULL],
            Groups(1, ("layer.1",), (StateGroup(0, ("layer.0",), 4, False),)),
        ),
        (
            [FULL, RECURRENT],
            Groups(0, ("layer.0",), (StateGroup(1, ("layer.1",), 1, True, FORM),)),
        ),
    ],
)
def test_what_can_be_served(specs, groups):
    assert check(Engine().config, cache_config(*specs)) == groups


def test_windows_among_layers_that_keep_all_anyway():
    """A layer with a window keeps all tokens, too, if vLLM's hybrid allocator is off."""
    kept = replace(FULL, sliding_window=100)
    uniform = UniformTypeKVCacheSpecs(BLOCK, {"layer.0": kept, "other": FULL})
    assert check(Engine().config, cache_config(uniform)).states == ()


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (33, 1), (34, 2), (1024, 32)])
def test_how_far_a_window_reaches(window, blocks):
    groups = check(Engine().config, cache_config(replace(WINDOW, sliding_window=window), FULL))
    assert groups.states[0].num_blocks == blocks


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([WINDOW], "no layer of the model keeps all tokens"),
        ([replace(RECURRENT, mamba_cache_mode="all"), FULL], "--mamba-cache-mode to align"),
        ([FULL, FULL, WINDOW], "form 2 groups .*--disable-hybrid-kv-cache-manager"),
        ([ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64), FULL], "ChunkedLocal"),
        ([replace(FULL, dtype=torch.float8_e4m3fn)], "quantised"),
        ([replace(FULL, dtype=torch.uint8), WINDOW], "quantised"),
        ([replace(WINDOW, block_size=64), FULL], "different numbers of tokens"),
    ],
)
def test_models_that_cannot(specs, reason):
    with pytest.raises(Unsupported, match=f"cold sessions are not possible here: .*{reason}"):
        check(Engine().config, cache_config(*specs))


@pytest.mark.parametrize(
    "fields",
    [{"is_index_group_leader": True}, {"model_version": "deepseek_v4"}, {"alignment": 576}],
)
def test_latents_with_an_index_are_refused_in_one_sentence(fields):
    with pytest.raises(Unsupported, match="the keys of an index") as refused:
        check(Engine().config, cache_config(replace(LATENT, **fields)))
    assert "\n" not in str(refused.value)


def test_latents_are_refused_where_vllm_reuses_no_prefixes_of_them():
    without = Engine(cache={"enable_prefix_caching": False})
    with pytest.raises(Unsupported, match="no prefixes of models with latents"):
        check(without.config, cache_config(LATENT))


def test_ranks_may_share_latents_but_no_heads():
    """Each rank has all latents, live and cold."""
    assert check(Engine().config, cache_config(LATENT, kv_tp_replicas=2)).layers
    with pytest.raises(Unsupported, match="tensor parallel size up to the KV heads"):
        check(Engine().config, cache_config(FULL, kv_tp_replicas=2))


def test_hashes_finer_than_blocks():
    with pytest.raises(Unsupported, match="different numbers of tokens"):
        check(Engine().config, cache_config(WINDOW, FULL, hash_block_size=16))


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        *((Engine(parallel={name: 2}), reason) for name, reason in PARALLEL.items()),
        (Engine(speculative=object()), "speculative decoding"),
        (Engine(sleep=True), "leave sleep mode off"),
        (Engine(weight_transfer=WeightTransferConfig()), "leave weight transfer off"),
        (Engine(cache={"enable_prefix_caching": False}), "leave prefix caching on"),
        (Engine(transfer={"kv_role": "kv_producer"}), "set kv_role to kv_both"),
        (Engine(transfer={"kv_load_failure_policy": "fail"}), "kv_load_failure_policy"),
    ],
)
def test_engines_that_cannot(engine, reason):
    with pytest.raises(Unsupported, match=reason) as refused:
        check(engine.config, cache_config(FULL))
    assert "\n" not in str(refused.value)


def test_a_backend_that_cuts_blocks_into_smaller_ones():
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=64))
    with pytest.raises(UnknownLayout, match=r"blocks of 64 tokens into ones of 32;.*another"):
        attention_cache(config, {"layer.0": torch.zeros(4, 2, 32, 128)}, ["layer.0"])


# ---- whether a model sees images: vLLM itself says so, by its class and by its settings


def test_a_model_of_text_sees_nothing() -> None:
    assert not sees_images(ModelConfig(model=model_path(), max_model_len=512))
    assert not sees_images(object())


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="models that see need torchvision"
)
def test_a_model_sees_images_unless_its_limit_is_zero(tmp_path: Path) -> None:
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(model_path()) / name).read_bytes())
    for limit, sees in (({}, True), ({"image": 2}, True), ({"image": 0}, False)):
        made = ModelConfig(
            model=str(tmp_path), max_model_len=512, dtype="float32", limit_mm_per_prompt=limit
        )
        assert sees_images(made) is sees
