"""Estimates the size of a model's weights from its config.json, without the weights themselves.

It counts embeddings, attention and feed-forward layers. Norms, biases and the vision tower, a few
per cent at most, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from launch.families.cache_shape import CacheShape, Config, NotUnderstood
from launch.families.table import cache_shape

# Types whose feed-forward layers have two matrices instead of three.
_UNGATED: Final = ("gpt2", "gptj", "gpt_neox", "gpt_bigcode", "nemotron", "phi", "starcoder2")
# Types whose output layer is the embedding although their config.json does not say so.
_TIED: Final = ("gemma", "cohere", "gpt2")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DTYPE_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16}
# Bits per weight, scales included, if the file has no "bits".
_METHOD_BITS: Final = {"fp8": 8.1, "mxfp4": 4.3, "nvfp4": 4.5, "bitsandbytes": 4.5}
_SCALE_BITS: Final = 32  # a scale and an offset for each group


def estimated_weights(content: Mapping[str, Any]) -> int | None:
    """Return the bytes of a model's weights; None if its config.json is not understood."""
    try:
        config, shape = Config(content), cache_shape(content)
        width, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
        embedded = width * config.integer("vocab_size") * (1 if _is_tied(config) else 2)
        inner = sum(_attention(config, shape, i) + _feed_forward(config, i) for i in range(layers))
    except NotUnderstood:
        return None
    bits, embedded_bits = _bits(content)
    return int(inner * bits + embedded * embedded_bits) // 8


def _is_tied(config: Config) -> bool:
    if config.has("tie_word_embeddings"):
        return config.flag("tie_word_embeddings")
    return config.model_type.startswith(_TIED)


def _attention(config: Config, shape: CacheShape, layer: int) -> int:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if shape.has_latents:
        return _latent_attention(config, width, heads)
    if shape.is_recurrent and not _is_full(config, layer):
        return _delta_net(config, width)
    dim = config.integer("head_dim", width // heads)
    kv_heads = config.integer("num_key_value_heads", heads)
    gate = heads if shape.is_recurrent else 0
    return width * dim * (2 * heads + gate + 2 * kv_heads)


def _is_full(config: Config, layer: int) -> bool:
    """Return True for a full attention layer of a model with gated delta nets.

    Raises ``NotUnderstood`` for other recurrent models.
    """
    config.integer("linear_num_value_heads")
    return (layer + 1) % config.integer("full_attention_interval", 4) == 0


def _delta_net(config: Config, width: int) -> int:
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    heads = config.integer("linear_num_value_heads")
    values = heads * config.integer("linear_value_head_dim")
    return width * (2 * keys + 3 * values + 2 * heads)


def _latent_attention(config: Config, width: int, heads: int) -> int:
    rank, turned = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    plain, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    queries = heads * (plain + turned)
    if config.has("q_lora_rank"):
        q_rank = config.integer("q_lora_rank")
        query = q_rank * (width + queries)
    else:
        query = width * queries
    return query + width * (rank + turned) + rank * heads * (plain + value) + heads * value * width


def _feed_forward(config: Config, layer: int) -> int:
    width = config.integer("hidden_size")
    matrices = 2 if config.model_type in _UNGATED else 3
    experts = next((config.integer(x) for x in _EXPERTS if config.has(x)), 0)
    if not experts or _is_dense(config, layer):
        return matrices * width * config.integer("intermediate_size", 4 * width)
    name = "moe_intermediate_size" if config.has("moe_intermediate_size") else "intermediate_size"
    each = config.integer(name)
    return width * (matrices * (experts * each + _shared(config, each)) + experts)


def _is_dense(config: Config, layer: int) -> bool:
    """Return True for a layer without experts in a model that has them."""
    if config.has("first_k_dense_replace") and layer < config.count("first_k_dense_replace"):
        return True
    if config.has("mlp_only_layers") and layer in config.integers("mlp_only_layers"):
        return True
    return (layer + 1) % config.integer("decoder_sparse_step", 1) != 0


def _shared(config: Config, each: int) -> int:
    """Return the total width of the experts that every token passes."""
    if config.has("shared_expert_intermediate_size"):
        return config.count("shared_expert_intermediate_size")
    return each * config.count("n_shared_experts") if config.has("n_shared_experts") else 0


def _bits(content: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bits per weight, and per weight of the embeddings, which few methods quantise."""
    text = content.get("text_config")
    inner = text if isinstance(text, dict) else {}
    dtype = next((x[y] for x in (content, inner) for y in ("torch_dtype", "dtype") if y in x), "")
    whole = _DTYPE_BITS.get(str(dtype), 16)
    if isinstance(mlx := content.get("quantization"), dict):  # as mlx_lm writes it
        packed = float(mlx.get("bits", 4)) + _SCALE_BITS / int(mlx.get("group_size", 64))
        return packed, packed
    if not isinstance(method := content.get("quantization_config"), dict):
        return whole, whole
    if isinstance(bits := method.get("bits"), int):  # GPTQ, AWQ
        group = method.get("group_size")
        return bits + _SCALE_BITS / (group if isinstance(group, int) and group > 0 else 128), whole
    return _METHOD_BITS.get(str(method.get("quant_method")), whole), whole
