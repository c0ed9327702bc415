"""Layers with a sliding window, between others that keep every token."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.shapes import KVLayer
from launch.families.attention import (
    BAICHUAN_WINDOWS,
    SHARED_WIDTH,
    STEP,
    USUAL,
    Names,
    kv_layer,
)
from launch.families.cache_shape import CacheShape, NotUnderstood, Window
from launch.families.config import Config, Family

SLIDING, FULL = "sliding_attention", "full_attention"


def mixed(
    sliding: Sequence[bool], full: KVLayer, window: KVLayer | None = None, longest: int = 0
) -> CacheShape:
    """Each layer either slides or keeps every token; ``window``: K and V of those that slide."""
    return CacheShape(
        growing=(full,) * sum(not x for x in sliding),
        windows=(Window(window or full, longest),) * sum(sliding),
    )


def by_layer_types(names: Names = USUAL, pattern: Sequence[str] = (FULL,)) -> Family:
    """``layer_types`` says which layers slide; without it ``pattern`` does, again and again."""

    def family(config: Config) -> CacheShape:
        types = config.layer_types(repeated(pattern, config.integer("num_hidden_layers")))
        if strange := set(types) - {FULL, SLIDING}:
            raise NotUnderstood(f"its layer_types has {', '.join(sorted(strange))}")
        sliding = [kind == SLIDING for kind in types]
        longest = config.integer("sliding_window") if any(sliding) else 0
        return mixed(sliding, kv_layer(config, names), longest=longest)

    return family


def repeated(pattern: Sequence[str], num_layers: int) -> list[str]:
    """Repeat ``pattern`` over all layers."""
    return [pattern[i % len(pattern)] for i in range(num_layers)]


def every_nth_full(default: int, names: Names = USUAL, *, types_first: bool = False) -> Family:
    """All layers slide but every n-th (``sliding_window_pattern``)."""

    def family(config: Config) -> CacheShape:
        if types_first and config.words("layer_types"):
            return by_layer_types(names)(config)
        pattern = config.integer("sliding_window_pattern", default)
        sliding = [(i + 1) % pattern != 0 for i in range(config.integer("num_hidden_layers"))]
        longest = config.integer("sliding_window") if any(sliding) else 0
        return mixed(sliding, kv_layer(config, names), longest=longest)

    return family


def exaone4(config: Config) -> CacheShape:
    """A word such as ``LLLG`` says which layers are local; without it none is."""
    pattern = config.text("sliding_window_pattern") or "G"
    sliding = [x == "L" for x in repeated(pattern, config.integer("num_hidden_layers"))]
    longest = config.integer("sliding_window") if any(sliding) else 0
    return mixed(sliding, kv_layer(config), longest=longest)


def step(config: Config) -> CacheShape:
    """Step 3.5: layers that slide have heads of their own."""
    default = repeated((SLIDING, FULL), config.integer("num_hidden_layers"))
    sliding = [kind == SLIDING for kind in config.layer_types(default)]
    full = window = kv_layer(config, STEP)
    if config.has("attention_other_setting"):
        groups = config.section("attention_other_setting").integer("num_attention_groups")
        window = KVLayer(groups, full.head_dim, full.value_dim)
    return mixed(sliding, full, window, config.integer("sliding_window", 512))


def mimo_v2(config: Config) -> CacheShape:
    """MiMo V2: 1 in ``hybrid_layer_pattern`` is a layer that slides, with sizes of its own."""
    sliding = [x == 1 for x in config.integers("hybrid_layer_pattern")]
    full, window = (
        KVLayer(
            config.integer(f"{prefix}num_key_value_heads"),
            config.integer(f"{prefix}head_dim"),
            config.integer(f"{prefix}v_head_dim"),
        )
        for prefix in ("", "swa_")
    )
    return mixed(sliding, full, window, config.integer("sliding_window_size"))


def gemma3n(config: Config) -> CacheShape:
    """The last layers have no K and V of their own: they read those of earlier ones."""
    num_own = config.integer("num_hidden_layers") - config.count("num_kv_shared_layers")
    sliding = [kind == SLIDING for kind in config.layer_types([])[:num_own]]
    return mixed(sliding, kv_layer(config), longest=config.integer("sliding_window"))


def gemma4(config: Config) -> CacheShape:
    """Layers that keep every token have larger and perhaps fewer heads; the last share theirs."""
    num_layers = config.integer("num_hidden_layers")
    period = config.integer("sliding_window_pattern", 5)
    types = config.layer_types(repeated([SLIDING] * (period - 1) + [FULL], num_layers))
    sliding = [kind == SLIDING for kind in types][
        : num_layers - config.count("num_kv_shared_layers")
    ]
    window = kv_layer(config, Names(dim_from_width=False))
    dim = config.integer("global_head_dim", window.head_dim)
    heads = window.num_kv_heads
    if config.flag("attention_k_eq_v"):
        heads = config.integer("num_global_key_value_heads", heads)
    longest = config.integer("sliding_window")
    return mixed(sliding, KVLayer(heads, dim, dim), window, longest)


def iquest_loop(config: Config) -> CacheShape:
    """IQuest-Coder's loop: each layer keeps every token once, and a window beside it."""
    layer, longest = kv_layer(config), config.integer("loop_window_size")
    num_layers = config.integer("num_hidden_layers")
    return CacheShape((layer,) * num_layers, (Window(layer, longest),) * num_layers)


def baichuan_m1(config: Config) -> CacheShape:
    """Every layer keeps the last K and V before a short convolution; some of them slide."""
    num_layers = config.integer("num_hidden_layers")
    sliding = [i in config.integers("sliding_window_layers") for i in range(num_layers)]
    full = window = kv_layer(config, SHARED_WIDTH)
    if config.has("num_swa_attention_heads"):
        window = kv_layer(config, BAICHUAN_WINDOWS)
    shape = mixed(sliding, full, window, config.integer("sliding_window"))
    return CacheShape(
        shape.growing,
        shape.windows,
        state_elements=sum(
            x.num_kv_heads * (x.head_dim + x.value_dim)
            for x in (window if slides else full for slides in sliding)
        ),
        num_states=num_layers,
    )
