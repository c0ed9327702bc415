"""Known models by the numbers of their published config.json: their caches and weights."""

from __future__ import annotations

from typing import Any

import pytest

from engines.kv_budget import stated_context
from launch.families.cache_shape import ModelRefused, NotUnderstood
from launch.families.table import FAMILIES, NESTED, ON_VLLM, REFUSED, cache_shape
from launch.families.weights import estimated_weights
from tests.fields import fields
from tests.unit.launch.plan.published import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GPT_OSS_20B,
    LLAMA_8B,
    MAMBA2_3B,
    QWEN3_32B,
    QWEN3_NEXT_80B,
)

GEMMA3_4B = {  # nested, and silent about its heads
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [(LLAMA_8B, 128 << 10), (QWEN3_32B, 256 << 10), (DEEPSEEK_V3, 61 * 576 * 2)],
)
def test_bytes_per_token_in_bf16(config, bytes_per_token):
    shape = cache_shape(config)
    assert shape.hot_bytes(1000, 2) == 1000 * bytes_per_token
    assert not shape.needs_state


def test_only_latents_with_an_index_are_kept_exact():
    assert cache_shape(DEEPSEEK_V3).has_latents
    assert not cache_shape(DEEPSEEK_V3).exact_only
    sparse = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128}
    assert "index" in cache_shape(sparse).exact_only
    assert not cache_shape(LLAMA_8B).has_latents


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "type None are not known"),
        ({"model_type": "brand_new"}, "brand_new are not known here"),
        ({**LLAMA_8B, "model_type": "llama4"}, "cannot batch the ChunkedKVCache"),
        ({**LLAMA_8B, "num_hidden_layers": None}, "num_hidden_layers = None"),
        ({**LLAMA_8B, "num_key_value_heads": -8}, "num_key_value_heads = -8"),
        ({**LLAMA_8B, "num_attention_heads": True}, "num_attention_heads = True"),
        ({**LLAMA_8B, "num_hidden_layers": 32.0}, r"num_hidden_layers = 32\.0"),
        ({**QWEN3_32B, "head_dim": None}, "head_dim = None"),
        ({**LLAMA_8B, "layer_types": ["strange"] * 32}, "layer_types has strange"),
        ({**LLAMA_8B, "layer_types": ["full_attention"]}, "names 1 of 32"),
        ({**GPT_OSS_20B, "sliding_window": None}, "sliding_window = None"),
    ],
)
def test_a_config_that_is_not_understood_gets_the_reason(config, words):
    with pytest.raises(NotUnderstood, match=words):
        cache_shape(config)


def test_no_type_is_both_known_and_refused():
    assert not set(FAMILIES) & set(REFUSED)
    assert set(NESTED.values()) <= set(FAMILIES)
    assert set(FAMILIES) == set(ON_VLLM)


def test_windows_that_mlx_lm_lacks_are_kept_whole():
    shape = cache_shape({**QWEN3_32B, "use_sliding_window": True})
    assert shape.hot_bytes(1000, 2) == cache_shape(QWEN3_32B).hot_bytes(1000, 2)
    assert "every token of its sliding windows" in shape.notes[0]


def test_the_same_model_may_be_kept_otherwise_by_vllm():
    """mlx_lm unfolds the latents of DeepSeek V2, and all K and V rows can be packed."""
    shape = cache_shape(DEEPSEEK_V2_LITE)
    assert shape.elements_per_token == 27 * 16 * (192 + 128)
    assert not shape.exact_only
    on_vllm = cache_shape(DEEPSEEK_V2_LITE, "vllm")
    assert on_vllm.has_latents
    assert on_vllm.elements_per_token == 27 * (512 + 64)
    gemma = {**LLAMA_8B, "model_type": "gemma2", "sliding_window": 4096}
    assert len(cache_shape(gemma).windows) == 0
    assert len(cache_shape(gemma, "vllm").windows) == 16


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({**LLAMA_8B, "model_type": "gemma3_text", "sliding_window": 512}, "sliding_attention"),
        (QWEN3_NEXT_80B, "linear_attention"),
    ],
)
def test_vllm_goes_by_the_types_of_layers(config, others):
    num_layers = config["num_hidden_layers"]
    types = [others, "full_attention"] * (num_layers // 2)
    shape = cache_shape({**config, "layer_types": types}, "vllm")
    assert len(shape.growing) == num_layers // 2 > len(cache_shape(config, "vllm").growing)
    assert len(shape.windows) + shape.num_states == num_layers // 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128}, "keys of an index"),
        (MAMBA2_3B, "no layer of the model keeps all tokens"),
    ],
)
def test_a_cache_that_vllm_cannot_keep_is_refused(config, words):
    cache_shape(config)
    with pytest.raises(ModelRefused, match=words):
        cache_shape(config, "vllm")


def test_the_longest_context():
    assert stated_context(LLAMA_8B) == 131072
    assert stated_context(GEMMA3_4B) is None
    assert stated_context({"text_config": {"max_position_embeddings": 7}}) == 7


DENSE: dict[str, Any] = fields(
    "model_type=llama hidden_size=4096 intermediate_size=14_336 num_hidden_layers=32",
    "num_attention_heads=32 num_key_value_heads=8 vocab_size=128_256 tie_word_embeddings=False",
)
EMBEDDED = 2 * 4096 * 128_256
INNER = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336)


@pytest.mark.parametrize(
    ("more", "inner_bits", "embedded_bits"),
    [
        ({}, 16, 16),
        ({"torch_dtype": "float32"}, 32, 32),
        ({"dtype": "bfloat16"}, 16, 16),
        ({"quantization": {"bits": 4, "group_size": 64}}, 4.5, 4.5),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, 4.25, 16),
        ({"quantization_config": {"quant_method": "fp8"}}, 8.1, 16),
        ({"quantization_config": {"quant_method": "something new"}}, 16, 16),
    ],
)
def test_bits_are_those_that_the_file_names(more, inner_bits, embedded_bits):
    expected = (INNER * inner_bits + EMBEDDED * embedded_bits) / 8
    assert estimated_weights({**DENSE, **more}) == pytest.approx(expected, rel=1e-6)


def test_an_output_layer_that_is_the_embedding_counts_once():
    tied = estimated_weights({**DENSE, "tie_word_embeddings": True})
    whole = estimated_weights(DENSE)
    assert whole is not None and tied == whole - EMBEDDED


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "never-heard-of"},
        {k: v for k, v in DENSE.items() if k != "vocab_size"},
        {**DENSE, "model_type": "mamba", "state_size": 16, "conv_kernel": 4},
    ],
)
def test_a_config_that_is_not_understood_is_not_estimated(config):
    assert estimated_weights(config) is None
