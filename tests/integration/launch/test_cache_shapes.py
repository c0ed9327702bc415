"""The plan's arithmetic against the caches that mlx_lm really makes, family by family."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from launch.plan.families import FAMILIES, cache_shape

pytestmark = pytest.mark.mlx

TOKENS = 40
WINDOW = 16

# Enough for every family; each takes what it knows.
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    # windows
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "layer_norm_eps": 1e-5,
    "logit_scale": 1.0,
    # mixtures of experts
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    # scaled models
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
    # linear attention and recurrences
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "state_size": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "num_heads": 3,
    "n_groups": 1,
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, 100.0],
    # short convolutions
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 32,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": None,
    "first_k_dense_replace": 6,
}
SLIDING, FULL = "sliding_attention", "full_attention"
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"layer_types": [SLIDING, FULL] * 3},
    "gpt_oss": {"layer_types": [SLIDING, FULL] * 3},
    "olmo3": {"layer_types": [SLIDING, SLIDING, FULL] * 2},
    "gemma3_text": {"sliding_window_pattern": 3},
    "cohere2": {"sliding_window_pattern": 3},
    "mamba2": {"intermediate_size": 48},
    "lfm2": {"layer_types": ["conv", FULL] * 3},
}
# model_type -> module of mlx_lm, where they differ
MODULES = {
    "mistral": "llama",
    "kimi_k2": "deepseek_v3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}


def config_of(kind: str) -> dict[str, Any]:
    return {**COMMON, "model_type": kind, **OF_FAMILY.get(kind, {})}


# mlx on CPU multiplies by gathered experts in float32 only.
EXPERTS = frozenset(
    {"gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"}
    | {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
)
CASES = [(kind, "float32") for kind in sorted(FAMILIES)]
CASES += [(kind, "bfloat16") for kind in sorted(FAMILIES.keys() - EXPERTS)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_bytes_are_those_that_mlx_lm_holds(kind: str, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.models.cache import make_prompt_cache

    from engines.mlx_worker.cache.layout import probe

    config = config_of(kind)
    module = importlib.import_module(f"mlx_lm.models.{MODULES.get(kind, kind)}")
    nested = {"model_type": kind, "text_config": config} if kind == "gemma3" else config
    model = module.Model(module.ModelArgs.from_dict(nested))
    model.set_dtype(getattr(mx, dtype))
    caches = make_prompt_cache(model)
    model(mx.array([list(range(TOKENS))]), cache=caches)
    mx.eval([cache.state for cache in caches])
    held = sum(_nbytes(cache) for cache in caches)
    itemsize = 4 if dtype == "float32" else 2
    shape = cache_shape(nested)
    assert shape.hot_bytes(TOKENS, itemsize) == held
    assert shape.cost(itemsize) == probe(model).cost


def _nbytes(cache: Any) -> int:
    """Bytes of the tokens it holds, without the room it keeps for more."""
    if type(cache).__name__ == "ArraysCache":
        return int(cache.nbytes)
    held = min(TOKENS, getattr(cache, "max_size", TOKENS))
    return int(sum(x.nbytes // x.shape[2] * held for x in (cache.keys, cache.values)))
