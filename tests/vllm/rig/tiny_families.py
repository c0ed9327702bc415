"""Random models whose layers differ from Llama's; made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.vllm.rig.tiny_model import (
    COMMON,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    write_tiny_model,
)


def write_qwen3(folder: Path) -> Path:
    """Queries and keys are normalised before they are turned; heads are not HIDDEN / 4 wide."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=128, rope_theta=1e6)
    return written(Qwen3ForCausalLM(config), folder)


def write_gpt_oss(folder: Path) -> Path:
    """Every head has a sink, and projections have biases. No layer has a window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=None,
        layer_types=["full_attention"] * LAYERS,
    )
    return written(GptOssForCausalLM(config), folder)


def write_gemma2(folder: Path) -> Path:
    """Scores are capped; norms stand before and after each part of a layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **{**COMMON, "tie_word_embeddings": True},
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        attn_logit_softcapping=3.0,
        layer_types=["full_attention"] * LAYERS,
    )
    return written(Gemma2ForCausalLM(config), folder)


def write_int8(folder: Path) -> Path:
    """A Llama whose projections are kept as int8 with a scale for each output."""
    write_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [x for x in weights if "_proj" in x]:
        scales = np.abs(weights[name]).max(1, keepdims=True) / 127
        weights[name.replace(".weight", ".weight_scale")] = scales
        weights[name] = np.rint(weights[name] / scales).astype(np.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    by_row = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    by_token = {**by_row, "strategy": "token", "dynamic": True}
    config["torch_dtype"] = "bfloat16"  # vLLM's kernel on CPUs takes no float32
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": by_row, "input_activations": by_token}
        },
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_latents(folder: Path) -> Path:
    """One latent of 512 and one rotary key of 64 per token: sizes that vLLM's CPU kernel takes."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **COMMON,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=2,  # in layers that there are none of
        moe_intermediate_size=MLP,
        first_k_dense_replace=LAYERS,
    )
    return written(DeepseekV2ForCausalLM(config), folder)


# Of four layers, two of which do not keep all tokens.
HYBRID = COMMON | {"num_hidden_layers": 4, "num_key_value_heads": KV_HEADS}


def write_recurrent(folder: Path) -> Path:
    """LFM2: short convolutions, whose state is the last few tokens, and full attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **HYBRID,
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
        **HYBRID,
        head_dim=HEAD_DIM,
        sliding_window=100,  # no multiple of a block
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=HEAD_DIM,
    )
    return written(Gemma3ForCausalLM(config), folder, plain=True)


def write_gated_delta(folder: Path) -> Path:
    """Qwen3-Next in bf16, the one dtype of vLLM's CPU kernels for it: matrices of states."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **{**HYBRID, "torch_dtype": "bfloat16"},
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


def written(model: Any, folder: Path, dtype: str = "float32", *, plain: bool = False) -> Path:
    """Write the model with random weights: those of norms and biases, too, unless it is ``plain``.

    None of them can then be left out unseen.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.float().named_parameters():
            if weight.ndim >= 2:
                width = weight[0].numel()  # a convolution's kernel counts too
                weight.normal_(0, width**-0.5, generator=generator)
                weight.mul_(4 if "lm_head" in name else 2 if "_proj" in name else 1)
            elif not plain:
                weight.add_(torch.empty_like(weight).normal_(0, 0.3, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
