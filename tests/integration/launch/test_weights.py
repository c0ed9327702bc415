"""What ``plan`` estimates of weights, against models that mlx_lm makes; none is computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from launch.families.weights import estimated_weights
from tests.fields import fields
from tests.integration.launch.mlx_models import tiny_model

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

ALL: dict[str, Any] = fields(
    "rms_norm_eps=1e-5 rope_theta=1e4 max_position_embeddings=32_768 torch_dtype=bfloat16",
    "tie_word_embeddings=False",
)


def attention(width: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def experts(number: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": number,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        **fields("norm_topk_prob=True decoder_sparse_step=1 mlp_only_layers=[]"),
        **more,
    }


# The numbers of published models, whole: one for each way of counting.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **attention(576, 30, 9, 3, intermediate_size=1536, vocab_size=49_152),
        "model_type": "llama",
        "tie_word_embeddings": True,
    },
    "Qwen3-32B": {
        **attention(5120, 64, 64, 8, intermediate_size=25_600, vocab_size=151_936, head_dim=128),
        "model_type": "qwen3",
    },
    "StarCoder2-7B": {
        **attention(4608, 32, 36, 4, intermediate_size=18_432, vocab_size=49_152),
        **fields("model_type=starcoder2 norm_epsilon=1e-5 tie_word_embeddings=True"),
    },
    "gpt-oss-20b": {
        **attention(2880, 24, 64, 8, intermediate_size=2880, vocab_size=201_088, head_dim=64),
        **fields(
            "model_type=gpt_oss num_local_experts=32 num_experts_per_tok=4 sliding_window=128",
        ),
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": None,
    },
    "DeepSeek-V3": {
        **attention(7168, 61, 128, 128, intermediate_size=18_432, vocab_size=129_280),
        **fields(
            "model_type=deepseek_v3 n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=8",
            "moe_intermediate_size=2048 moe_layer_freq=1 first_k_dense_replace=3 kv_lora_rank=512",
            "q_lora_rank=1536 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_group=8",
            "topk_group=4 topk_method=noaux_tc scoring_func=sigmoid norm_topk_prob=True",
            "routed_scaling_factor=2.5 attention_bias=False rope_scaling=None",
        ),
    },
    "Qwen3-Next-80B-A3B": {
        **attention(2048, 48, 16, 2, intermediate_size=5120, vocab_size=151_936, head_dim=256),
        **experts(512, 512, shared_expert_intermediate_size=512),
        **fields(
            "model_type=qwen3_next linear_num_value_heads=32 linear_num_key_heads=16",
            "linear_key_head_dim=128 linear_value_head_dim=128 linear_conv_kernel_dim=4",
            "full_attention_interval=4 partial_rotary_factor=0.25",
        ),
    },
}


def number_of_weights(config: dict[str, Any]) -> int:
    from mlx.utils import tree_flatten

    model = tiny_model(config["model_type"], copy.deepcopy(config))
    return sum(x.size for _, x in tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_are_estimated_within_a_per_cent(name: str) -> None:
    config = {**ALL, **MODELS[name]}
    assert estimated_weights(config) == pytest.approx(2 * number_of_weights(config), rel=0.01)
