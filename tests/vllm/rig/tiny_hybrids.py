"""Random models of four layers, two of which do not keep all tokens."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.rig.tiny_families import written
from tests.vllm.rig.tiny_model import COMMON, HEAD_DIM, HIDDEN, KV_HEADS, MLP

WINDOW = 100  # no multiple of a block

_COMMON = COMMON | {"num_hidden_layers": 4, "num_key_value_heads": KV_HEADS}


def write_recurrent(folder: Path) -> Path:
    """LFM2: short convolutions, whose state is the last few tokens, and full attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_COMMON,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        block_dim=HIDDEN,
        block_ff_dim=MLP,
        conv_dim=HIDDEN,
        conv_L_cache=3,
    )
    return written(Lfm2ForCausalLM(config), folder, plain=True)


def write_windowed(folder: Path) -> Path:
    """Gemma 3: layers with a sliding window, and full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_COMMON,
        head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=HEAD_DIM,
    )
    return written(Gemma3ForCausalLM(config), folder, plain=True)


def write_gated_delta(folder: Path) -> Path:
    """Qwen3-Next in bf16, the one dtype of vLLM's CPU kernels for it: matrices of states."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **{**_COMMON, "torch_dtype": "bfloat16"},
        head_dim=HEAD_DIM,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1, 2, 3],
        partial_rotary_factor=0.25,
    )
    return written(Qwen3NextForCausalLM(config), folder, "bfloat16", plain=True)
