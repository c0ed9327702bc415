"""A random Llama of two layers: every mechanism, hardly any arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 1000, 256, 4, 2, 64, 512, 2
COMMON: dict[str, Any] = {  # of every tiny model's configuration
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A model folder that vLLM loads; it has no tokenizer."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": 4 * matrix(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": 2 * matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": 2 * matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
            f"{layer}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


_CONFIG = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
