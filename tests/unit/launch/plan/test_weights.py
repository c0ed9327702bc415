"""The size of a model's weights, by its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from launch.families.weights import estimated_weights
from tests.fields import fields

LLAMA: dict[str, Any] = fields(
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
    assert estimated_weights({**LLAMA, **more}) == pytest.approx(expected, rel=1e-6)


def test_an_output_layer_that_is_the_embedding_counts_once():
    tied = estimated_weights({**LLAMA, "tie_word_embeddings": True})
    whole = estimated_weights(LLAMA)
    assert whole is not None and tied == whole - EMBEDDED


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "never-heard-of"},
        {k: v for k, v in LLAMA.items() if k != "vocab_size"},
        {**LLAMA, "model_type": "mamba", "state_size": 16, "conv_kernel": 4},
    ],
)
def test_a_config_that_is_not_understood_is_not_estimated(config):
    assert estimated_weights(config) is None
