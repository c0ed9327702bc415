"""Fields of a tiny model's config.json that most types of mlx_lm read."""

from __future__ import annotations

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
