"""Known models by the numbers of their published config.json."""

from __future__ import annotations

import pytest

from engines.kv_budget import stated_context
from launch.plan.cache_shape import NotUnderstood
from launch.plan.families import FAMILIES, REFUSED, cache_shape

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "head_dim": 128,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "use_sliding_window": False,
}
GEMMA3_4B = {  # nested, and silent about its heads
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "head_dim": 256,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
MAMBA2 = {
    "model_type": "mamba2",
    "num_hidden_layers": 64,
    "num_heads": 80,
    "head_dim": 64,
    "state_size": 128,
    "intermediate_size": 5120,
    "n_groups": 1,
    "conv_kernel": 4,
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [(LLAMA_8B, 128 << 10), (QWEN3_32B, 256 << 10), (DEEPSEEK_V3, 61 * 576 * 2)],
)
def test_bytes_per_token_in_bf16(config, bytes_per_token):
    shape = cache_shape(config)
    assert shape.hot_bytes(1000, 2) == 1000 * bytes_per_token
    assert not shape.needs_state


def test_windows_stop_growing():
    shape = cache_shape(GEMMA3_4B)
    assert (len(shape.growing), len(shape.windows)) == (5, 29)
    per_layer = 2 * 4 * 256 * 2
    assert shape.hot_bytes(500, 2) == 34 * 500 * per_layer
    assert shape.hot_bytes(8192, 2) == (5 * 8192 + 29 * 1024) * per_layer
    assert shape.needs_state
    gpt = cache_shape(GPT_OSS_20B)
    assert gpt.hot_bytes(1000, 2) == 12 * (1000 + 128) * 2 * 8 * 64 * 2


def test_recurrent_state_does_not_grow():
    shape = cache_shape(QWEN3_NEXT_80B)
    assert len(shape.growing) == 12
    state = 36 * (3 * (2 * 128 * 16 + 128 * 32) * 2 + 32 * 128 * 128 * 4)
    assert shape.hot_bytes(4096, 2) == 4096 * 12 * 2 * 2 * 256 * 2 + state
    pure = cache_shape(MAMBA2)
    assert pure.hot_bytes(10, 2) == pure.hot_bytes(10**6, 2) > 0


def test_latent_attention_is_kept_exact():
    assert "latent" in cache_shape(DEEPSEEK_V3).exact_only
    assert cache_shape(LLAMA_8B).exact_only == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "type None are not known"),
        ({"model_type": "brand_new"}, "brand_new are not known here"),
        ({**LLAMA_8B, "model_type": "llama4"}, "chunked attention"),
        ({**LLAMA_8B, "num_hidden_layers": None}, "num_hidden_layers = None"),
        ({**LLAMA_8B, "num_key_value_heads": -8}, "num_key_value_heads = -8"),
        ({**LLAMA_8B, "num_attention_heads": True}, "num_attention_heads = True"),
        ({**LLAMA_8B, "num_hidden_layers": 32.0}, r"num_hidden_layers = 32\.0"),
        ({**QWEN3_32B, "head_dim": None}, "head_dim = None"),
        ({**QWEN3_32B, "use_sliding_window": True}, "sliding windows"),
        ({**LLAMA_8B, "layer_types": ["strange"] * 32}, "layer_types has strange"),
        ({**LLAMA_8B, "layer_types": ["full_attention"]}, "names 1 of 32"),
        ({**GPT_OSS_20B, "sliding_window": None}, "sliding_window = None"),
    ],
)
def test_what_is_not_understood_says_why(config, words):
    with pytest.raises(NotUnderstood, match=words):
        cache_shape(config)


def test_no_type_is_both_known_and_refused():
    assert not set(FAMILIES) & set(REFUSED)


def test_the_longest_context():
    assert stated_context(LLAMA_8B) == 131072
    assert stated_context(QWEN3_32B) is None
    assert stated_context({"text_config": {"max_position_embeddings": 7}}) == 7
