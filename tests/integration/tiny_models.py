"""Small random models of every kind of cache, built in code: no files, no tokenizer.

Their text means nothing, but their attention and their recurrences are mlx_lm's own, so a KV row
that is wrong, missing or shifted changes the tokens they produce.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engines.mlx_worker.model.loading import LoadedModel
from tests.fields import fields
from tests.tiny_tokenizer import tiny_tokenizer

VOCAB = 500
WINDOW = 32  # of the model with rotating caches

_COMMON: dict[str, object] = {
    "vocab_size": VOCAB,
    **fields(
        "hidden_size=64 rms_norm_eps=1e-5 max_position_embeddings=8192 num_attention_heads=4",
        "tie_word_embeddings=False",
    ),
}
_ATTENTION: dict[str, object] = {
    **_COMMON,
    **fields("intermediate_size=96 num_key_value_heads=2 head_dim=64 rope_theta=1e4"),
}
_CONFIGS: dict[str, dict[str, object]] = {
    "llama": {**_ATTENTION, "num_hidden_layers": 3},
    "gemma3_text": {
        **_ATTENTION,
        **fields("num_hidden_layers=6 rope_local_base_freq=1e4 query_pre_attn_scalar=16"),
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    "qwen3_next": {
        **_ATTENTION,
        **fields(
            "num_hidden_layers=4 linear_num_value_heads=4 linear_num_key_heads=2",
            "linear_key_head_dim=16 linear_value_head_dim=16 linear_conv_kernel_dim=4",
            "num_experts=2 num_experts_per_tok=1 decoder_sparse_step=1",
            "shared_expert_intermediate_size=32 mlp_only_layers=[0,1,2,3] moe_intermediate_size=32",
            "partial_rotary_factor=0.5 full_attention_interval=2 norm_topk_prob=True",
        ),
    },
    "mamba2": {
        **_COMMON,
        **fields(
            "num_hidden_layers=2 intermediate_size=128 num_heads=4 head_dim=32 state_size=16",
            "layer_norm_epsilon=1e-5 expand=2 conv_kernel=4 n_groups=1 use_bias=False",
            "use_conv_bias=True time_step_limit=[0.0,100.0] time_step_rank=auto",
        ),
    },
}
_LATENT: dict[str, object] = {
    **_COMMON,
    **fields(
        "intermediate_size=96 num_hidden_layers=3 num_key_value_heads=4 kv_lora_rank=64",
        "q_lora_rank=None qk_rope_head_dim=16 qk_nope_head_dim=48 v_head_dim=32 rope_theta=1e4",
    ),
    "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 8192},
    **fields(
        "n_routed_experts=2 n_shared_experts=1 num_experts_per_tok=1 n_group=1 topk_group=1",
        "moe_intermediate_size=32 moe_layer_freq=1 first_k_dense_replace=3",
    ),
}
# The first is unfolded into K and V, the second is kept.
LATENTS: dict[str, dict[str, object]] = {"deepseek_v2": _LATENT, "deepseek_v3": _LATENT}
KINDS = tuple(_CONFIGS)
UNTRIMMABLE = ("gemma3_text", "qwen3_next", "mamba2")


def tiny_model(kind: str, seed: int = 0) -> LoadedModel:
    """A float32 model with the same weights every time. Call it on the thread that runs it."""
    mx.random.seed(seed)
    config = {"model_type": kind, **(_CONFIGS | LATENTS)[kind]}
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return LoadedModel(model, None, config)


def write_model(kind: str, folder: Path, seed: int = 0) -> None:
    """The same model as files, with a tokenizer, for the worker process."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded = tiny_model(kind, seed)
    tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(loaded.config))
    weights: Any = tree_flatten(loaded.model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
