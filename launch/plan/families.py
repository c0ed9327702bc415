"""Model families: from config.json to the shape of a session's cache, as mlx_lm allocates it.

Each function knows one kind of attention; the table at the end says which ``model_type`` is which.
What is not in the table is refused: a guess would be wrong by a factor, silently. The integration
tests build a tiny model of every family in mlx_lm and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvstore.shapes import KVLayer
from launch.plan.cache_shape import CacheShape, NotUnderstood, Window

MLA_REASON = (
    "multi-head latent attention keeps one shared latent per token; what a lossy codec does to it"
    " has not been measured"
)


class Config:
    """config.json of the text model, with answers that name what is missing."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        inner, kind = content.get("text_config"), content.get("model_type")
        # A multimodal model nests its text model, which may leave some things to the outer one.
        self._content: Mapping[str, Any] = content
        if isinstance(inner, dict):
            defaults = _NESTED_DEFAULTS.get(str(kind), {})
            self._content = {"model_type": kind, **defaults, **inner}

    @property
    def model_type(self) -> str:
        return str(self._content.get("model_type"))

    def integer(self, name: str, default: int | None = None) -> int:
        """Raises ``NotUnderstood`` unless it is a positive integer, or absent with a default."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise NotUnderstood(f"its config.json has {name} = {value!r}, a number is needed")
        return value

    def words(self, name: str) -> list[str]:
        """A list of words, one per layer; empty if there is none."""
        value = self._content.get(name)
        return [str(word) for word in value] if isinstance(value, list) else []

    def flag(self, name: str) -> bool:
        return bool(self._content.get(name))


# What config.json may leave out, and what it means then. Others have defaults of their own, which
# are as easily wrong as a guess, so they must say it.
_MAY_BE_MHA = frozenset(("llama", "mistral", "olmo2", "olmo3", "olmoe", "phi3", "smollm3"))
_DIM_FROM_WIDTH = _MAY_BE_MHA | {
    *("cohere2", "granite", "granitemoe", "lfm2", "mixtral", "qwen2", "qwen2_moe", "starcoder2")
}
_NESTED_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
}

Family = Callable[[Config], CacheShape]


def cache_shape(content: Mapping[str, Any]) -> CacheShape:
    """The cache of the model with this config.json.

    Raises:
        NotUnderstood: unknown or refused family, or a missing field. Says which.
    """
    config = Config(content)
    kind = config.model_type
    if kind in REFUSED:
        raise NotUnderstood(f"models of type {kind} are refused: {REFUSED[kind]}")
    if kind not in FAMILIES:
        raise NotUnderstood(
            f"models of type {kind} are not known here, and a guess could be wrong by a factor"
        )
    return FAMILIES[kind](config)


def _attention(config: Config) -> KVLayer:
    """Multi-head, grouped-query or multi-query attention: the same but for ``num_kv_heads``."""
    num_heads = config.integer("num_attention_heads")
    kind = config.model_type
    num_kv_heads = config.integer("num_key_value_heads", num_heads if kind in _MAY_BE_MHA else None)
    derived = config.integer("hidden_size") // num_heads if kind in _DIM_FROM_WIDTH else None
    dim = config.integer("head_dim", derived)
    return KVLayer(num_kv_heads, dim, dim)


def _dense(config: Config) -> CacheShape:
    """Every layer keeps every token."""
    if config.flag("use_sliding_window") or "sliding_attention" in config.words("layer_types"):
        raise NotUnderstood(
            f"its config.json asks for sliding windows, which mlx_lm's {config.model_type} lacks"
        )
    return CacheShape((_attention(config),) * config.integer("num_hidden_layers"))


def _gemma2(config: Config) -> CacheShape:
    layers = (_attention(config),) * config.integer("num_hidden_layers")
    return CacheShape(layers, notes=("mlx_lm keeps every token of its sliding windows, too",))


def _windowed(config: Config, sliding: list[bool]) -> CacheShape:
    layer = _attention(config)
    window = Window(layer, config.integer("sliding_window")) if any(sliding) else None
    return CacheShape(
        growing=(layer,) * sliding.count(False),
        windows=(window,) * sliding.count(True) if window else (),
    )


def _by_layer_types(config: Config) -> CacheShape:
    """``layer_types`` says which layers slide; without it none does."""
    num_layers = config.integer("num_hidden_layers")
    types = config.words("layer_types") or ["full_attention"] * num_layers
    if strange := set(types) - {"full_attention", "sliding_attention"}:
        raise NotUnderstood(f"its layer_types has {', '.join(sorted(strange))}")
    if len(types) != num_layers:
        raise NotUnderstood(f"its layer_types names {len(types)} of {num_layers} layers")
    return _windowed(config, [kind == "sliding_attention" for kind in types])


def _every_nth_full(default: int, *, types_first: bool = False) -> Family:
    """All layers slide but every n-th (``sliding_window_pattern``)."""

    def family(config: Config) -> CacheShape:
        if types_first and config.words("layer_types"):
            return _by_layer_types(config)
        pattern = config.integer("sliding_window_pattern", default)
        num_layers = config.integer("num_hidden_layers")
        return _windowed(config, [(i + 1) % pattern != 0 for i in range(num_layers)])

    return family


def _gpt_oss(config: Config) -> CacheShape:
    """Sliding and full layers in turn unless ``layer_types`` says otherwise."""
    if config.words("layer_types"):
        return _by_layer_types(config)
    return _windowed(config, [i % 2 == 0 for i in range(config.integer("num_hidden_layers"))])


def _gated_delta_net(config: Config) -> CacheShape:
    """Qwen3-Next and Qwen3.5: linear attention with a fixed state, full every few layers."""
    num_layers = config.integer("num_hidden_layers")
    num_full = num_layers // config.integer("full_attention_interval", 4)
    key_dim = config.integer("linear_key_head_dim")
    value_dim = config.integer("linear_value_head_dim")
    num_values = config.integer("linear_num_value_heads")
    channels = 2 * key_dim * config.integer("linear_num_key_heads") + value_dim * num_values
    convolution = channels * (config.integer("linear_conv_kernel_dim") - 1)
    num_linear = num_layers - num_full
    return CacheShape(
        growing=(_attention(config),) * num_full,
        state_elements=convolution * num_linear,
        state_float32=num_values * key_dim * value_dim * num_linear,
        num_states=num_linear,
    )


def _mamba(config: Config) -> CacheShape:
    width = config.integer("intermediate_size")
    per_layer = width * (config.integer("conv_kernel") - 1) + width * config.integer("state_size")
    num_layers = config.integer("num_hidden_layers")
    return CacheShape(state_elements=per_layer * num_layers, num_states=num_layers)


def _mamba2(config: Config) -> CacheShape:
    heads, dim = config.integer("num_heads"), config.integer("head_dim")
    states = config.integer("state_size")
    channels = config.integer("intermediate_size") + 2 * config.integer("n_groups") * states
    num_layers = config.integer("num_hidden_layers")
    return CacheShape(
        state_elements=channels * (config.integer("conv_kernel") - 1) * num_layers,
        state_float32=heads * dim * states * num_layers,
        num_states=num_layers,
    )


def _lfm2(config: Config) -> CacheShape:
    """Short convolutions between a few attention layers."""
    types = config.words("layer_types")
    if not types:
        raise NotUnderstood("its config.json has no layer_types")
    num_full = types.count("full_attention")
    state = config.integer("hidden_size") * (config.integer("conv_L_cache") - 1)
    num_states = len(types) - num_full
    return CacheShape(
        growing=(_attention(config),) * num_full,
        state_elements=state * num_states,
        num_states=num_states,
    )


def _latent(config: Config) -> CacheShape:
    """Multi-head latent attention: per token one latent and one rotary key for all heads."""
    layer = KVLayer(1, config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))
    layers = (layer,) * config.integer("num_hidden_layers")
    return CacheShape(layers, exact_only=MLA_REASON)


_DENSE = (
    *("ernie4_5", "gemma", "glm4", "granite", "granitemoe", "mixtral", "olmo2", "olmoe", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
)
_LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_DENSE, _dense),
    "gemma2": _gemma2,
    "llama": _by_layer_types,
    "mistral": _by_layer_types,
    "olmo3": _every_nth_full(4, types_first=True),
    "gemma3": _every_nth_full(6),
    "gemma3_text": _every_nth_full(6),
    "cohere2": _every_nth_full(4),
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(_LINEAR, _gated_delta_net),
    "mamba": _mamba,
    "mamba2": _mamba2,
    "lfm2": _lfm2,
    "deepseek_v3": _latent,
    "kimi_k2": _latent,
}

REFUSED: Mapping[str, str] = {
    "llama4": "chunked attention, whose cache is dropped in pieces",
    "llama4_text": "chunked attention, whose cache is dropped in pieces",
    "gemma3n": "layers share their keys and values with others",
    "deepseek_v32": "a sparse index is kept beside the latents",
    "rwkv7": "no attention cache; the state's layout is not known here",
}
