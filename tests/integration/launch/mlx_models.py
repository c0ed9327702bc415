"""Tiny models of every type that mlx_lm has: their config.json, and their caches.

Nothing is computed: mlx is lazy, so a forward pass that is never evaluated shows the contents of
every cache, for models of any size."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fields import fields

WINDOW = 16
SLIDING, FULL = "sliding_attention", "full_attention"

# Enough for most types; each takes the fields that it knows.
COMMON: dict[str, Any] = {
    **fields(
        "vocab_size=512 hidden_size=64 intermediate_size=32 num_hidden_layers=6",
        "num_attention_heads=4 num_key_value_heads=2 head_dim=16 max_position_embeddings=512",
        "rms_norm_eps=1e-5 norm_eps=1e-5 rope_theta=1e4 attention_bias=False mlp_bias=False",
        "tie_word_embeddings=True",
    ),
    # windows
    "sliding_window": WINDOW,
    **fields(
        "query_pre_attn_scalar=16 attn_logit_softcapping=50.0 final_logit_softcapping=30.0",
        "layer_norm_eps=1e-5 logit_scale=1.0 rope_local_base_freq=1e4",
    ),
    # mixtures of experts
    **fields(
        "num_experts=2 num_local_experts=2 num_experts_per_tok=1 num_experts_per_token=1",
        "moe_intermediate_size=32 shared_expert_intermediate_size=32 shared_intermediate_size=32",
        "decoder_sparse_step=1 mlp_only_layers=[] norm_topk_prob=True n_shared_experts=1",
        "num_shared_experts=1 num_shared_expert=1 n_group=1 topk_group=1 routed_scaling_factor=1.0",
        "scoring_func=sigmoid topk_method=noaux_tc moe_topk=1 moe_layer_freq=1",
    ),
    # scaled models
    **fields(
        "embedding_multiplier=1.0 attention_multiplier=1.0 residual_multiplier=1.0",
        "logits_scaling=1.0 use_bias=False use_qkv_bias=False partial_rotary_factor=0.5",
        "rotary_dim=8 use_qk_norm=True rope_scaling=None dim_model_base=64 scale_depth=1.0",
        "scale_emb=1.0",
    ),
    # linear attention and recurrences
    **fields(
        "linear_num_value_heads=4 linear_num_key_heads=2 linear_key_head_dim=8",
        "linear_value_head_dim=16 linear_conv_kernel_dim=4 full_attention_interval=3 state_size=8",
        "conv_kernel=4 use_conv_bias=True time_step_rank=4 num_heads=3 n_groups=1",
        "layer_norm_epsilon=1e-5 time_step_limit=[0.0,100.0] layer_group_size=3 group_norm_size=1",
        "mamba_d_conv=4 mamba_d_state=8 mamba_expand=2 mamba_n_heads=4 mamba_d_head=16",
        "mamba_n_groups=1 mamba_proj_bias=False mamba_conv_bias=True mamba_num_heads=4",
        "mamba_head_dim=16 ssm_state_size=8",
    ),
    # short convolutions
    **fields(
        "conv_bias=False conv_L_cache=3 block_dim=64 block_ff_dim=32 block_multiple_of=16",
        "block_ffn_dim_multiplier=1.0 block_auto_adjust_ff_dim=False",
    ),
    # latent attention
    **fields(
        "kv_lora_rank=32 q_lora_rank=24 qk_rope_head_dim=8 qk_nope_head_dim=16 v_head_dim=16",
        "n_routed_experts=None first_k_dense_replace=6 index_head_dim=24 index_n_heads=2",
        "index_topk=8",
    ),
}

_GPT = {"n_layer": 6, "n_head": 4, "n_embd": 64, "n_ctx": 512, "n_positions": 512, "n_inner": 64}
_SLIDES = {"layer_types": [SLIDING, SLIDING, FULL] * 2}
_SPLIT_ROPE = {"rope_parameters": {x: {"rope_theta": 1e4} for x in (SLIDING, FULL)}}
_KDA = {
    "linear_attn_config": fields(
        "kda_layers=[1,2,4,5] full_attn_layers=[3,6] num_heads=4 head_dim=8",
        "short_conv_kernel_size=4",
    ),
    "model_max_length": 512,
}
_LONGCAT = {
    "attention_method": "MLA",
    **fields(
        "zero_expert_type=identity ffn_hidden_size=32 expert_ffn_hidden_size=32 zero_expert_num=1",
        "num_layers=3 n_routed_experts=2 mla_scale_q_lora=True mla_scale_kv_lora=True",
        "router_bias=False",
    ),
}
_ROPE = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "default",
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 128,
    }
}
_YARN = {
    "rope_scaling": fields(
        "type=yarn factor=4.0 original_max_position_embeddings=128 mscale=1.0",
        "mscale_all_dim=1.0",
    )
}
_PHIXTRAL = {"model_dim": 64, "num_heads": 4, "num_layers": 6, "num_vocab": 512}
OF_TYPE: dict[str, dict[str, Any]] = {
    "afm7": fields("hidden_dim=64 num_layers=6 num_kv_reuse_layers=2 num_heads=4 num_kv_heads=2"),
    "afmoe": _SLIDES,
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": fields(
        "sliding_window_layers=[1,3] conv_window=2 num_swa_attention_heads=8",
        "num_swa_key_value_heads=4 tie_word_embeddings=False",
    ),
    "bailing_moe_v3": {"short_conv_kernel_size": 4},
    "cohere2": {"sliding_window_pattern": 3},
    "dbrx": {
        **fields("d_model=64 n_layers=6 n_heads=4"),
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "deepseek_v2": _YARN,
    "ernie4_5_moe": {"moe_num_experts": 2},
    "exaone": {"num_layers": 6},
    "exaone4": {"sliding_window_pattern": "LLG"},
    "exaone_moe": {**_SLIDES, "is_moe_layer": [False] * 6},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gear": {"layer_types": ["conv_mixer", SLIDING, FULL] * 2},
    "gemma3_text": {"sliding_window_pattern": 3},
    "gemma3n": {
        **_SLIDES,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 6,
        **fields(
            "altup_num_inputs=2 altup_coef_clip=120.0 altup_correct_scale=True altup_active_idx=0",
            "laurel_rank=8",
        ),
    },
    "gemma4_text": {
        **_SLIDES,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
        **fields(
            "global_head_dim=32 num_global_key_value_heads=1 attention_k_eq_v=True",
            "hidden_size_per_layer_input=8 vocab_size_per_layer_input=512 num_experts=None",
        ),
    },
    "glm_moe_dsa": _ROPE,
    "gpt2": _GPT,
    "gptj": _GPT,
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "gpt_oss": {"layer_types": [SLIDING, FULL] * 3},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2},
    "hunyuan": {
        **fields("use_mixed_mlp_moe=True use_cla=True cla_share_factor=2"),
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": fields(
        "attn_layer_offset=1 attn_layer_period=3 expert_layer_offset=1 expert_layer_period=2",
    ),
    "kimi_k3": {**_KDA, "hidden_act": "situ", "activation_situ_beta": 1.0},
    "kimi_linear": {**_KDA, "num_experts": 0},
    "laguna": _SLIDES,
    "lfm2": {"layer_types": ["conv", FULL] * 3},
    "lfm2_moe": {
        "layer_types": ["conv", FULL] * 3,
        "use_expert_bias": False,
        "num_dense_layers": 6,
    },
    "lille-130m": {**_GPT, "n_kv_heads": 2, "block_size": 512},
    "llama": {"layer_types": [SLIDING, FULL] * 3},
    "llama4": {
        **fields("attention_chunk_size=16 interleave_moe_layer_step=7 intermediate_size_mlp=32"),
        "no_rope_layers": [1] * 6,
    },
    "llama4_text": {"intermediate_size_mlp": 32, "no_rope_layers": [1] * 6},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {
        **_LONGCAT,
        **fields("ngram_vocab_size_ratio=2 emb_neighbor_num=3 emb_split_num=2"),
    },
    "mamba2": {"intermediate_size": 48},
    "mellum": {**_SLIDES, **_SPLIT_ROPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1],
        "moe_layer_freq": [0] * 6,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        **fields(
            "layernorm_epsilon=1e-5 swa_rope_theta=1e4 swa_num_attention_heads=8",
            "swa_num_key_value_heads=4 swa_head_dim=24 swa_v_head_dim=16 attention_value_scale=1.0",
            "n_routed_experts=2",
        ),
    },
    "minimax_m3_vl": {
        "sparse_attention_config": fields(
            "sparse_num_index_heads=2 sparse_index_dim=16 sparse_block_size=8",
            "sparse_topk_blocks=2 sparse_local_block=1 sparse_attention_freq=[0,1,1,0,1,1]",
        ),
        "moe_layer_freq": [0] * 6,
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 128,
        }
    },
    "ministral3": {**_SLIDES, **_ROPE},
    "mistral4": {**_ROPE, "n_routed_experts": 2},
    "muse_glimmer": {**_SLIDES, "post_norm_eps": 1e-5},
    "muse_spark": {
        **_SLIDES,
        **_ROPE,
        "post_norm_eps": 1e-5,
        "layer_rope_theta": [1e4] * 6,
        **fields("output_multiplier=1.0 moe_hidden_size=32 num_shared_experts=0"),
    },
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "hidden_act": "silu",
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ]
        * 2,
    },
    "nemotron_h": {"hybrid_override_pattern": list("M*-M*M"), "num_hidden_layers": 6},
    "olmo3": {**_SLIDES},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": fields(
        "num_transformer_layers=3 model_dim=64 num_query_heads=[4,4,8] num_kv_heads=[2,4,4]",
        "ffn_multipliers=[1.0,1.0,1.0] ffn_dim_divisor=16 share_input_output_layers=True",
        "normalize_qk_projections=True ffn_with_glu=True rope_freq_constant=10000",
    ),
    "phi3small": fields(
        "dense_attention_every_n_layers=2 ff_intermediate_size=64 gegelu_limit=20.0",
        "blocksparse_block_size=64 blocksparse_num_local_blocks=2 blocksparse_vert_stride=2",
        "blocksparse_triton_kernel_block_size=64 mup_use_scaling=False mup_attn_multiplier=1.0",
        "mup_embedding_multiplier=1.0 mup_width_multiplier=1.0 rope_embedding_base=10000.0",
    ),
    "phixtral": _PHIXTRAL,
    "phi-msft": _PHIXTRAL,
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "mamba_step": 2, "mamba_enabled": True},
    "plamo3": {"sliding_window_pattern": 3},
    "qwen": {"kv_channels": 16, "intermediate_size": 64, "no_bias": True},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv7": fields("a_low_rank_dim=8 v_low_rank_dim=8 gate_low_rank_dim=8 decay_low_rank_dim=8"),
    "spark2_5": {**_SLIDES, **_SPLIT_ROPE, "hidden_act": "gelu"},
    "step3p5": {
        **_SLIDES,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 4},
        "moe_layers_enum": "",
    },
}
# Types whose config.json nests the text model, and the type of that.
NESTED = {
    **fields(
        "gemma3=gemma3_text gemma3n=gemma3n gemma4=gemma4_text gemma4_unified=gemma4_text",
        "kimi_k25=deepseek_v3 kimi_k3=kimi_k3 kimi_vl=deepseek_v3",
    ),
    "lfm2-vl": "lfm2",
    **fields(
        "llama4=llama4 llava=llama minimax_m3_vl=minimax_m3_vl mistral3=ministral3",
        "muse_spark=muse_spark pixtral=llama qwen3_5=qwen3_5 qwen3_5_moe=qwen3_5_moe",
        "qwen3_vl=qwen3 qwen3_vl_moe=qwen3_moe",
    ),
}


def config_of(kind: str) -> dict[str, Any]:
    """The config.json of a tiny model of this type."""
    if kind not in NESTED:
        return {**COMMON, "model_type": kind, **OF_TYPE.get(kind, {})}
    inner = NESTED[kind]
    text = {**COMMON, "model_type": inner, **OF_TYPE.get(inner, {})}
    return {"model_type": kind, "vocab_size": text["vocab_size"], "text_config": text}


def all_types() -> Iterator[str]:
    """Every type of the installed mlx_lm: its modules that hold a model, and its other names."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING

    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0], f"{module.name}.py").read_text(encoding="utf-8")
        if "\nclass Model(" in source:
            yield module.name
    yield from MODEL_REMAPPING


def tiny_model(kind: str, config: dict[str, Any]) -> Any:
    """A model of this config.json, with random weights that are never evaluated."""
    from mlx_lm.utils import MODEL_REMAPPING

    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    return module.Model(module.ModelArgs.from_dict(config))
