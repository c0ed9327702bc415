"""Models with layers whose state has a fixed size, alone or among layers that keep all tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.shapes import KVLayer
from launch.families.attention import (
    FULL,
    MHA,
    SHARED_WIDTH,
    SLIDING,
    STATED,
    USUAL,
    kv_layer,
    latent_layer,
    repeated,
)
from launch.families.cache_shape import CacheShape, Config, NotUnderstood, Window


@dataclass(frozen=True)
class RecurrentState:
    """The state of one layer: ``elements`` values in the engine's dtype and ``float32`` values.

    The latter are matrices whose rows have ``width`` values; 0 = they are not matrices.
    """

    elements: int
    float32: int = 0
    width: int = 0


def between(growing: tuple[KVLayer, ...], state: RecurrentState, num_states: int) -> CacheShape:
    """Return the shape of a model with growing layers and ``num_states`` layers with this state."""
    return CacheShape(
        growing=growing,
        state_elements=state.elements * num_states,
        state_float32=state.float32 * num_states,
        num_states=num_states,
        state_width=state.width,
    )


def delta_net_state(config: Config) -> RecurrentState:
    """Return the state of a gated delta net: a convolution's inputs, and a matrix for each head."""
    keys, values = config.several("linear_num_key_heads", "linear_num_value_heads")
    key_dim, value_dim = config.several("linear_key_head_dim", "linear_value_head_dim")
    channels = 2 * key_dim * keys + value_dim * values
    convolution = channels * (config.integer("linear_conv_kernel_dim") - 1)
    return RecurrentState(convolution, values * key_dim * value_dim, key_dim)


def qwen_next(config: Config) -> CacheShape:
    """Qwen3-Next and Qwen3.5: linear attention, with full attention every few layers."""
    num_layers = config.integer("num_hidden_layers")
    num_full = num_layers // config.integer("full_attention_interval", 4)
    full = (kv_layer(config, STATED),) * num_full
    return between(full, delta_net_state(config), num_layers - num_full)


def qwen_next_by_types(config: Config) -> CacheShape:
    """``qwen_next`` for vLLM, which takes the kinds of layers from ``layer_types`` if present."""
    if not config.words("layer_types"):
        return qwen_next(config)
    types = config.layer_types([])
    full = (kv_layer(config, STATED),) * types.count(FULL)
    return between(full, delta_net_state(config), len(types) - len(full))


def olmo_hybrid(config: Config) -> CacheShape:
    num_layers = config.integer("num_hidden_layers")
    types = config.layer_types(repeated(["linear_attention"] * 3 + [FULL], num_layers))
    full = (kv_layer(config, MHA),) * types.count(FULL)
    return between(full, delta_net_state(config), num_layers - len(full))


def mamba(config: Config) -> CacheShape:
    """Mamba 1: no layer grows."""
    width, kernel, size = config.several("intermediate_size", "conv_kernel", "state_size")
    state = RecurrentState(width * (kernel - 1 + size))
    return between((), state, config.integer("num_hidden_layers"))


def mamba2_state(
    config: Config, heads: str, dim: str, size: str, groups: str, kernel: str, width: str = ""
) -> RecurrentState:
    """Return the state of Mamba 2: a convolution's inputs, and a matrix for each head.

    The convolution has ``width`` + 2 x ``groups`` x ``size`` channels. Arguments are names of
    fields; ``width`` "" = the product of ``heads`` and ``dim``.
    """
    num_heads, head_dim, num_groups = config.several(heads, dim, groups)
    rows, taps = config.several(size, kernel)
    inner = config.integer(width) if width else num_heads * head_dim
    channels = inner + 2 * num_groups * rows
    return RecurrentState(channels * (taps - 1), num_heads * head_dim * rows, rows)


def mamba2(config: Config) -> CacheShape:
    names = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "intermediate_size")
    return between((), mamba2_state(config, *names), config.integer("num_hidden_layers"))


_MAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def granite_hybrid(config: Config) -> CacheShape:
    """Granite 4: layers of Mamba 2 and a few of attention."""
    types = config.layer_types([])
    full = (kv_layer(config, SHARED_WIDTH),) * types.count("attention")
    num_states = types.count("mamba")
    state = mamba2_state(config, *_MAMBA) if num_states else RecurrentState(0)
    return between(full, state, num_states)


def falcon_h1(config: Config) -> CacheShape:
    """Falcon H1: every layer has both attention and Mamba 2."""
    num_layers = config.integer("num_hidden_layers")
    state = mamba2_state(config, *_MAMBA, "mamba_d_ssm")
    return between((kv_layer(config, STATED),) * num_layers, state, num_layers)


def nemotron_h(config: Config) -> CacheShape:
    """Nemotron H: in ``hybrid_override_pattern`` M is Mamba 2, * attention; others keep nothing."""
    types = config.words("layers_block_type") or config.words("layer_types")
    pattern = config.text("hybrid_override_pattern") or "".join(
        config.words("hybrid_override_pattern")
    )
    num_states = pattern.count("M") if pattern else types.count("mamba")
    num_full = pattern.count("*") if pattern else types.count("attention")
    if not num_states + num_full:
        raise NotUnderstood("its config.json has neither hybrid_override_pattern nor layer types")
    names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    return between((kv_layer(config),) * num_full, mamba2_state(config, *names), num_states)


def jamba(config: Config) -> CacheShape:
    """Jamba: layers of Mamba 1 and of attention, all in the engine's dtype."""
    num_layers = config.integer("num_hidden_layers")
    types = config.words("layers_block_type")
    if not types:
        period, offset = config.integer("attn_layer_period"), config.count("attn_layer_offset")
        types = ["attention" if i % period == offset else "mamba" for i in range(num_layers)]
    width = config.integer("mamba_expand") * config.integer("hidden_size")
    kept = config.integer("mamba_d_conv") - 1 + config.integer("mamba_d_state")
    full = (kv_layer(config),) * types.count("attention")
    return between(full, RecurrentState(width * kept), types.count("mamba"))


def plamo2(config: Config) -> CacheShape:
    """PLaMo 2: in each group of ``mamba_step`` layers one has attention, the others Mamba 2."""
    num_layers, step = config.integer("num_hidden_layers"), config.integer("mamba_step")
    if num_layers <= step // 2:
        mambas = [i != num_layers - 1 for i in range(num_layers)]
    else:
        mambas = [i % step != step // 2 for i in range(num_layers)]
    num_states = sum(mambas) if config.flag("mamba_enabled") else 0
    dim, heads = config.integer("hidden_size_per_head"), config.integer("mamba_num_heads")
    kernel, size = config.integer("mamba_d_conv"), config.integer("mamba_d_state")
    state = RecurrentState(heads * dim * (kernel - 1), heads * dim * size, size)
    layer = KVLayer(config.integer("num_key_value_heads"), dim, dim)
    return between((layer,) * (num_layers - num_states), state, num_states)


def lfm2(config: Config) -> CacheShape:
    """LFM2: short convolutions and a few attention layers."""
    num_layers = config.integer("num_hidden_layers")
    if config.has("full_attn_idxs"):
        num_full = len(config.integers("full_attn_idxs"))
    elif types := config.words("layer_types"):
        num_full, num_layers = types.count(FULL), len(types)
    else:
        raise NotUnderstood("its config.json has no layer_types")
    state = RecurrentState(config.integer("hidden_size") * (config.integer("conv_L_cache") - 1))
    return between((kv_layer(config),) * num_full, state, num_layers - num_full)


def gear(config: Config) -> CacheShape:
    """Gear: full, sliding and convolutional layers."""
    types = config.layer_types([])
    layer = kv_layer(config, STATED)
    num_convolutions = len(types) - types.count(FULL) - types.count(SLIDING)
    kept = config.integer("conv_L_cache", 3) - 1
    return CacheShape(
        growing=(layer,) * types.count(FULL),
        windows=(Window(layer, config.integer("sliding_window")),) * types.count(SLIDING),
        state_elements=kept * layer.num_kv_heads * 2 * layer.head_dim * num_convolutions,
        num_states=num_convolutions,
    )


def kimi_linear(config: Config) -> CacheShape:
    """Kimi Linear: layers of delta attention, which has states, and of latent attention."""
    linear = config.section("linear_attn_config")
    num_layers = config.integer("num_hidden_layers")
    num_states = sum(0 < x <= num_layers for x in linear.integers("kda_layers"))
    heads, dim = linear.several("num_heads", "head_dim")
    kernel = linear.integer("short_conv_kernel_size", 4)
    return latent_and_delta(config, heads, dim, kernel, num_states)


def latent_and_delta(
    config: Config, heads: int, dim: int, kernel: int, num_states: int
) -> CacheShape:
    """Return the shape of layers with three convolutions and a matrix per head, and of latents."""
    state = RecurrentState(3 * heads * dim * (kernel - 1), heads * dim * dim, dim)
    num_full = config.integer("num_hidden_layers") - num_states
    shape = between((latent_layer(config),) * num_full, state, num_states)
    return replace(shape, has_latents=True)


def _num_global(config: Config) -> int:
    """Return the number of layers without linear attention.

    These are the last layer of each full group, and all layers after the last full group.
    """
    num_layers, group = config.integer("num_hidden_layers"), config.integer("layer_group_size")
    whole = num_layers // group * group
    return sum((i + 1) % group == 0 or i >= whole for i in range(num_layers))


def bailing_linear(config: Config) -> CacheShape:
    """Ling and Ring with linear attention: a matrix for each head."""
    heads, num_full = config.integer("num_attention_heads"), _num_global(config)
    dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    state = RecurrentState(heads * dim * dim)
    num_states = config.integer("num_hidden_layers") - num_full
    return between((kv_layer(config, USUAL),) * num_full, state, num_states)


def bailing_hybrid(config: Config) -> CacheShape:
    """Ling and Ring with linear and latent attention."""
    heads, dim = config.integer("num_attention_heads"), config.integer("head_dim")
    num_full = _num_global(config)
    num_states = config.integer("num_hidden_layers") - num_full
    state = RecurrentState(0, heads * dim * dim, dim)
    return replace(between((latent_layer(config),) * num_full, state, num_states), has_latents=True)


def bailing_v3(config: Config) -> CacheShape:
    """Ling 3: delta attention, with latent attention every ``layer_group_size`` layers."""
    heads, dim, kernel = config.several("num_attention_heads", "head_dim", "short_conv_kernel_size")
    num_states = config.integer("num_hidden_layers") - _num_global(config)
    return latent_and_delta(config, heads, dim, kernel, num_states)


def recurrent_gemma(config: Config) -> CacheShape:
    """RecurrentGemma: gated recurrences and sliding windows; no layer keeps every token."""
    pattern = config.words("block_types") or config.words("_block_types")
    if not pattern:
        raise NotUnderstood("its config.json has no block_types")
    types = repeated(pattern, config.integer("num_hidden_layers"))
    num_states = types.count("recurrent")
    layer, longest = kv_layer(config), config.integer("attention_window_size")
    width = config.integer("hidden_size")
    return CacheShape(
        windows=(Window(layer, longest),) * (len(types) - num_states),
        state_elements=width * config.integer("conv1d_width") * num_states,
        num_states=num_states,
    )


def rwkv7(config: Config) -> CacheShape:
    """RWKV 7: two shifted tokens, and a matrix for each head, all in the engine's dtype."""
    width, dim = config.integer("hidden_size"), config.integer("head_dim")
    state = RecurrentState(2 * width + width * dim)
    return between((), state, config.integer("num_hidden_layers"))
