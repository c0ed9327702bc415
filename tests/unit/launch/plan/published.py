"""Known models by the numbers of their published config.json, as far as a cache depends on them."""

from __future__ import annotations

from typing import Any

from tests.fields import fields

SLIDING, FULL = "sliding_attention", "full_attention"


def _text(kind: str, inner: str, **fields: Any) -> dict[str, Any]:
    """A multimodal model: the text model is nested."""
    text = {"model_type": inner, **fields}
    return {"model_type": kind, "text_config": text, "vocab_size": fields["vocab_size"]}


def _attention(width: int, layers: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": 512,  # of no importance here, and large otherwise
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
    }


def _experts(number: int = 4) -> dict[str, Any]:
    """Far fewer experts than there are: no cache depends on them."""
    return {
        "num_experts": number,
        "num_local_experts": number,
        **fields(
            "num_experts_per_tok=1 moe_intermediate_size=64 shared_expert_intermediate_size=64",
            "decoder_sparse_step=1 mlp_only_layers=[] norm_topk_prob=True",
        ),
    }


def _delta_net(values: int, keys: int = 16) -> dict[str, Any]:
    return {
        **fields("full_attention_interval=4 linear_conv_kernel_dim=4 linear_key_head_dim=128"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_value_head_dim": 128,
        "partial_rotary_factor": 0.25,
    }


def _latent(rank: int = 512, nope: int = 128, value: int = 128) -> dict[str, Any]:
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        **fields(
            "n_routed_experts=None n_shared_experts=None first_k_dense_replace=100",
            "attention_bias=False rope_scaling=None",
        ),
    }


_YARN = fields(
    "type=yarn factor=40 original_max_position_embeddings=4096 mscale=0.707",
    "mscale_all_dim=0.707",
)
_GEMMA3 = {
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}

LLAMA_8B = {"model_type": "llama", **_attention(4096, 32, 32, 8, 128)}
QWEN3_32B = {"model_type": "qwen3", **_attention(5120, 64, 64, 8, 128), "use_sliding_window": False}
QWEN35_35B = _text(
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    **_attention(2048, 40, 16, 2, 256),
    **_delta_net(32),
    **_experts(),
)
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    **_attention(2048, 48, 16, 2, 256),
    **_delta_net(32),
    **_experts(),
}
GEMMA3_27B = _text("gemma3", "gemma3_text", **_attention(5376, 62, 32, 16, 128), **_GEMMA3)
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    **_attention(2880, 24, 64, 8, 64),
    **_experts(),
    "sliding_window": 128,
    "layer_types": [SLIDING, FULL] * 12,
    "rope_theta": 150_000,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    **_attention(2048, 27, 16, 16, 128),
    **_latent(),
    "q_lora_rank": None,
    "rope_scaling": _YARN,
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", **_attention(7168, 61, 128, 128, 56), **_latent()}
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear",
    **_attention(2304, 27, 32, 32, 72),
    **_latent(),
    **fields("q_lora_rank=None num_experts=0 moe_intermediate_size=64 model_max_length=1_048_576"),
    "linear_attn_config": {
        "kda_layers": [x for x in range(1, 28) if x % 4 and x != 27],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
GEMMA3N_E4B = _text(
    "gemma3n",
    "gemma3n_text",
    **_attention(2048, 35, 8, 2, 256),
    layer_types=([SLIDING] * 4 + [FULL]) * 7,
    activation_sparsity_pattern=[0.0] * 35,
    **fields(
        "sliding_window=512 num_kv_shared_layers=15 vocab_size_per_layer_input=512",
        "hidden_size_per_layer_input=8 altup_num_inputs=4 altup_coef_clip=120.0",
        "altup_correct_scale=True altup_active_idx=0 laurel_rank=64 rope_local_base_freq=1e4",
        "final_logit_softcapping=30.0 rms_norm_eps=1e-6",
    ),
)
GEMMA4_31B = _text(
    "gemma4",
    "gemma4_text",
    **_attention(5376, 60, 32, 16, 256),
    layer_types=([SLIDING] * 5 + [FULL]) * 10,
    **fields(
        "global_head_dim=512 num_global_key_value_heads=4 attention_k_eq_v=True",
        "num_kv_shared_layers=0 sliding_window=1024 hidden_size_per_layer_input=0",
    ),
)
_MAMBA = fields(
    "mamba_d_conv=4 mamba_d_state=128 mamba_expand=2 mamba_proj_bias=False",
    "mamba_conv_bias=True",
)
MAMBA2_3B = fields(
    "model_type=mamba2 hidden_size=2560 vocab_size=512 num_hidden_layers=64 num_heads=80",
    "head_dim=64 state_size=128 intermediate_size=5120 n_groups=1 conv_kernel=4 use_bias=False",
    "use_conv_bias=True time_step_limit=[0.0,100.0] time_step_rank=160",
)

PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Falcon-H1-7B": {
        "model_type": "falcon_h1",
        **_attention(3072, 44, 12, 2, 128),
        **_MAMBA,
        **fields(
            "mamba_d_state=256 mamba_d_ssm=3072 mamba_n_heads=24 mamba_d_head=128 mamba_n_groups=1",
        ),
    },
    "Gemma-3-27B": GEMMA3_27B,
    "Gemma-3n-E4B": GEMMA3N_E4B,
    "Gemma-4-31B": GEMMA4_31B,
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        **_attention(2048, 47, 20, 20, 102),
        **_latent(nope=192, value=256),
    },
    "gpt-oss-20b": GPT_OSS_20B,
    "Granite-4.0-H-Small": {
        "model_type": "granitemoehybrid",
        **_attention(4096, 40, 32, 8, 128),
        **_MAMBA,
        **_experts(),
        **fields("mamba_n_heads=128 mamba_d_head=64 mamba_n_groups=1"),
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        **fields(
            "attention_bias=False mlp_bias=False embedding_multiplier=12",
            "attention_multiplier=0.0078125 logits_scaling=16 residual_multiplier=0.22",
            "shared_intermediate_size=64 time_step_limit=[0.0,100.0]",
        ),
    },
    "Jamba-Mini": {
        "model_type": "jamba",
        **_attention(4096, 32, 32, 8, 128),
        **_MAMBA,
        **_experts(2),
        **fields(
            "mamba_d_state=16 mamba_dt_rank=256 attn_layer_offset=4 attn_layer_period=8",
            "expert_layer_offset=1 expert_layer_period=2",
        ),
    },
    "Kimi-K2": {"model_type": "kimi_k2", **_attention(7168, 61, 64, 64, 112), **_latent()},
    "Kimi-Linear-48B": KIMI_LINEAR_48B,
    "LFM2-1.2B": {
        "model_type": "lfm2",
        **_attention(2048, 16, 32, 8, 64),
        "layer_types": [FULL if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        **fields(
            "conv_L_cache=3 conv_bias=False block_dim=2048 block_ff_dim=64 block_multiple_of=16",
            "block_ffn_dim_multiplier=1.0 block_auto_adjust_ff_dim=False",
        ),
    },
    "Llama-3.1-8B": LLAMA_8B,
    "Mamba2-2.7B": MAMBA2_3B,
    "Mistral-Small-24B": {"model_type": "mistral", **_attention(5120, 40, 32, 8, 128)},
    "Nemotron-H-8B": {
        "model_type": "nemotron_h",
        **_attention(4096, 52, 32, 8, 128),
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        **fields(
            "mamba_num_heads=128 mamba_head_dim=64 mamba_proj_bias=False ssm_state_size=128",
            "conv_kernel=4 n_groups=8 mlp_bias=False use_bias=False use_conv_bias=True",
            "attention_bias=False layer_norm_epsilon=1e-5 time_step_limit=[0.0,100.0]",
        ),
    },
    "Phi-4": {"model_type": "phi3", **_attention(5120, 40, 40, 10, 128)},
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-Next-80B": QWEN3_NEXT_80B,
    "Qwen3.5-35B-A3B": QWEN35_35B,
}
