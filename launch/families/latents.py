"""Multi-head latent attention: per token one latent and one rotary key for all heads."""

from __future__ import annotations

from dataclasses import replace

from kvstore.shapes import KVLayer
from launch.families.attention import kv_layer
from launch.families.cache_shape import CacheShape
from launch.families.config import Config, Family

INDEX_REASON = (
    "a sparse index is kept beside keys and values; what a lossy codec does to it has not been"
    " measured"
)


def latent_layer(config: Config) -> KVLayer:
    """One layer's latent, and its rotary key. Raises ``NotUnderstood``: a field is missing."""
    return KVLayer(1, config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))


def latent(layers: str = "num_hidden_layers", per_layer: int = 1) -> Family:
    """Every layer keeps ``per_layer`` latents."""

    def family(config: Config) -> CacheShape:
        kept = (latent_layer(config),) * (config.integer(layers) * per_layer)
        return CacheShape(kept, has_latents=True)

    return family


def sparse_latent(config: Config) -> CacheShape:
    """DeepSeek V3.2, GLM 5: beside the latent the keys of an index that picks tokens to read."""
    dim = config.integer("index_head_dim")
    kept = (latent_layer(config), KVLayer(1, dim, dim)) * config.integer("num_hidden_layers")
    return CacheShape(kept, has_latents=True, exact_only=INDEX_REASON)


def longcat_ngram(config: Config) -> CacheShape:
    """LongCat with n-grams: the last few token ids are kept, too."""
    shape = latent("num_layers", 2)(config)
    # Ids of 8 bytes, so each is counted as two numbers in float32.
    return replace(shape, state_float32=2 * (config.integer("emb_neighbor_num") - 1), num_states=1)


def minimax_m3(config: Config) -> CacheShape:
    """MiniMax M3: sparse layers keep the keys of an index beside K and V, without values."""
    num_layers = config.integer("num_hidden_layers")
    sparse = _sparse_layers(config, num_layers)
    layers = (kv_layer(config),) * num_layers
    if not sparse:
        return CacheShape(layers)
    inner = config.section("sparse_attention_config") if config.has(_SPARSE) else config
    dim = inner.integer("sparse_index_dim" if config.has(_SPARSE) else "index_head_dim")
    return CacheShape(layers + (KVLayer(1, dim, 0),) * sparse, exact_only=INDEX_REASON)


_SPARSE = "sparse_attention_config"


def _sparse_layers(config: Config, num_layers: int) -> int:
    inner = config.section(_SPARSE) if config.has(_SPARSE) else config
    if not (inner.has("sparse_block_size") or config.has("index_block_size")):
        return 0
    if types := config.words("layer_types"):
        return sum(x != "full_attention" for x in types)
    if inner.has("sparse_attention_freq"):
        return sum(x != 0 for x in inner.integers("sparse_attention_freq"))
    return num_layers
