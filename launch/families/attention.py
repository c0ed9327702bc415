"""Layers that keep rows of every token, or of a sliding window: K and V of heads, or a latent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.shapes import KVLayer
from launch.families.cache_shape import CacheShape, Config, Family, NotUnderstood, Window

INDEX_REASON = (  # ``exact_only`` of models with sparse attention
    "a sparse index is kept beside keys and values; what a lossy codec does to it has not been"
    " measured"
)
_SPARSE = "sparse_attention_config"
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Names:
    """The names of a config.json's fields that give the size of K and V.

    ``may_be_mha``: a missing ``kv_heads`` means as many as ``heads``. ``dim_from_width``: a missing
    ``dim`` means ``width`` divided by ``heads``, and ``dim`` "" means that always. Other families
    have other defaults, which we do not guess: their config.json must have the field.
    """

    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    width: str = "hidden_size"
    dim: str = "head_dim"
    may_be_mha: bool = False
    dim_from_width: bool = True


USUAL = Names()
MHA = Names(may_be_mha=True)
STATED = Names(dim_from_width=False)
GPT = Names("n_layer", "n_head", "n_head", "n_embd")
EXAONE = Names(layers="num_layers", may_be_mha=True)
LILLE = Names("n_layer", "n_head", "n_kv_heads", "n_embd")
STEP = Names(kv_heads="num_attention_groups", dim_from_width=False)
SHARED_WIDTH = Names(dim="")
BAICHUAN_WINDOWS = Names(
    heads="num_swa_attention_heads", kv_heads="num_swa_key_value_heads", dim=""
)
PHIXTRAL = Names("num_layers", "num_heads", "num_heads", "model_dim", dim="")
TALKIE = Names(kv_heads="num_attention_heads", dim_from_width=False)
QWEN1 = Names(kv_heads="num_attention_heads", dim="kv_channels", dim_from_width=False)


def kv_layer(config: Config, names: Names = USUAL) -> KVLayer:
    """Return K and V of one layer. Raises ``NotUnderstood`` if a field is missing."""
    num_heads = config.integer(names.heads)
    num_kv_heads = config.integer(names.kv_heads, num_heads if names.may_be_mha else None)
    derived = config.integer(names.width) // num_heads if names.dim_from_width else None
    dim = config.integer(names.dim, derived)
    return KVLayer(num_kv_heads, dim, dim)


def dense(names: Names = USUAL) -> Family:
    """Return the family in which every layer keeps every token."""

    def family(config: Config) -> CacheShape:
        slides = config.flag("use_sliding_window") or "sliding_attention" in config.words(
            "layer_types"
        )
        return keeps_windows_whole(names)(config) if slides else every_token(config, names)

    return family


def every_token(config: Config, names: Names = USUAL) -> CacheShape:
    """Return the shape in which every layer keeps every token, even if the model has windows."""
    return CacheShape((kv_layer(config, names),) * config.integer(names.layers))


def keeps_windows_whole(names: Names = USUAL) -> Family:
    """Return the family of models with sliding windows whose caches keep every token in mlx_lm."""

    def family(config: Config) -> CacheShape:
        layers = every_token(config, names).growing
        return CacheShape(layers, notes=("mlx_lm keeps every token of its sliding windows, too",))

    return family


def of_heads(num_layers: int, num_kv_heads: int, dim: int) -> CacheShape:
    """Return the shape of equal layers whose K and V have the same size."""
    return CacheShape((KVLayer(num_kv_heads, dim, dim),) * num_layers)


def multi_query(config: Config) -> CacheShape:
    """GPT-BigCode: with ``multi_query`` one head of K and V serves all heads."""
    heads, width, layers = config.several("n_head", "n_embd", "n_layer")
    return of_heads(layers, 1 if config.flag("multi_query") else heads, width // heads)


def afm7(config: Config) -> CacheShape:
    """The last layers have no K and V of their own: they read those of an earlier one."""
    layer = kv_layer(config, Names("num_layers", "num_heads", "num_kv_heads", "hidden_dim"))
    num_own = config.integer("num_layers") - config.count("num_kv_reuse_layers")
    return CacheShape((layer,) * num_own)


def dbrx(config: Config) -> CacheShape:
    width, heads, layers = config.several("d_model", "n_heads", "n_layers")
    return of_heads(layers, config.section("attn_config").integer("kv_n_heads"), width // heads)


def plamo(config: Config) -> CacheShape:
    """Each head of K and V serves ``n_shared_head`` heads."""
    heads, width = config.several("num_attention_heads", "hidden_size")
    num_kv_heads = -(-heads // config.integer("n_shared_head", 8))
    return of_heads(config.integer("num_hidden_layers"), num_kv_heads, width // heads)


def openelm(config: Config) -> CacheShape:
    """The number of heads differs from layer to layer."""
    dim = config.integer("head_dim")
    return CacheShape(tuple(KVLayer(x, dim, dim) for x in config.integers("num_kv_heads")))


def nemotron_nas(config: Config) -> CacheShape:
    """Some layers have no attention, the others groups of different sizes."""
    heads = config.integer("num_attention_heads")
    dim = config.integer("hidden_size") // heads
    kinds = [x.section("attention") for x in config.sections("block_configs")]
    kept = [x for x in kinds if not (x.flag("no_op") or x.flag("replace_with_linear"))]
    groups = [x.integer("n_heads_in_group") for x in kept]
    return CacheShape(tuple(KVLayer(heads // x, dim, dim) for x in groups))


def looped(config: Config) -> CacheShape:
    """Nanbeige: a token passes the same layers several times, with a cache for each pass."""
    num_loops = len(config.words("loop_loss_weights")) + 1
    if num_loops == 1:
        num_loops = config.integer("num_loops", 1)
    layers = every_token(config).growing
    return CacheShape(layers * num_loops)


def expanded_latent(value_dim_from_width: bool = False) -> Family:
    """Return the family of latent attention whose cache has the expanded K and V of each head."""

    def family(config: Config) -> CacheShape:
        heads, plain, turned = config.several(
            "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"
        )
        key = plain + turned
        by_width = value_dim_from_width
        value = config.integer("hidden_size") // heads if by_width else config.integer("v_head_dim")
        return CacheShape((KVLayer(heads, key, value),) * config.integer("num_hidden_layers"))

    return family


def latent_layer(config: Config) -> KVLayer:
    """Return one layer's latent and rotary key. Raises ``NotUnderstood`` for a missing field."""
    return KVLayer(1, config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))


def latent(layers: str = "num_hidden_layers", per_layer: int = 1) -> Family:
    """Return the family in which every layer keeps ``per_layer`` latents."""

    def family(config: Config) -> CacheShape:
        kept = (latent_layer(config),) * (config.integer(layers) * per_layer)
        return CacheShape(kept, has_latents=True)

    return family


def sparse_latent(config: Config) -> CacheShape:
    """DeepSeek V3.2, GLM 5: latents, and the keys of an index that chooses the tokens to read."""
    dim = config.integer("index_head_dim")
    kept = (latent_layer(config), KVLayer(1, dim, dim)) * config.integer("num_hidden_layers")
    return CacheShape(kept, has_latents=True, exact_only=INDEX_REASON)


def longcat_ngram(config: Config) -> CacheShape:
    """LongCat with n-grams: the last few token ids are kept, too."""
    shape = latent("num_layers", 2)(config)
    # A token id has 8 bytes, and is counted as two float32 values.
    return replace(shape, state_float32=2 * (config.integer("emb_neighbor_num") - 1), num_states=1)


def minimax_m3(config: Config) -> CacheShape:
    """MiniMax M3: sparse layers also keep the keys of an index, which has no values."""
    num_layers = config.integer("num_hidden_layers")
    sparse = _sparse_layers(config, num_layers)
    layers = (kv_layer(config),) * num_layers
    if not sparse:
        return CacheShape(layers)
    inner = config.section("sparse_attention_config") if config.has(_SPARSE) else config
    dim = inner.integer("sparse_index_dim" if config.has(_SPARSE) else "index_head_dim")
    return CacheShape(layers + (KVLayer(1, dim, 0),) * sparse, exact_only=INDEX_REASON)


def _sparse_layers(config: Config, num_layers: int) -> int:
    inner = config.section(_SPARSE) if config.has(_SPARSE) else config
    if not (inner.has("sparse_block_size") or config.has("index_block_size")):
        return 0
    if types := config.words("layer_types"):
        return sum(x != "full_attention" for x in types)
    if inner.has("sparse_attention_freq"):
        return sum(x != 0 for x in inner.integers("sparse_attention_freq"))
    return num_layers


def mixed(
    sliding: Sequence[bool], full: KVLayer, window: KVLayer | None = None, longest: int = 0
) -> CacheShape:
    """Return the shape of a model with sliding layers, where ``sliding`` is true, and full ones.

    ``window``: K and V of a sliding layer; None = as ``full``.
    """
    return CacheShape(
        growing=(full,) * sum(not x for x in sliding),
        windows=(Window(window or full, longest),) * sum(sliding),
    )


def by_layer_types(names: Names = USUAL, pattern: Sequence[str] = (FULL,)) -> Family:
    """Return the family of models with full and sliding layers, as ``layer_types`` lists them.

    Without ``layer_types`` the layers follow ``pattern``, repeated.
    """

    def family(config: Config) -> CacheShape:
        types = config.layer_types(repeated(pattern, config.integer("num_hidden_layers")))
        if strange := set(types) - {FULL, SLIDING}:
            raise NotUnderstood(f"its layer_types has {', '.join(sorted(strange))}")
        return alike([kind == SLIDING for kind in types], config, names)

    return family


def alike(sliding: Sequence[bool], config: Config, names: Names = USUAL) -> CacheShape:
    """Return the shape of layers of one size, some with a window of ``sliding_window`` tokens."""
    longest = config.integer("sliding_window") if any(sliding) else 0
    return mixed(sliding, kv_layer(config, names), longest=longest)


def repeated(pattern: Sequence[str], num_layers: int) -> list[str]:
    """Return ``pattern`` repeated to ``num_layers`` items."""
    return [pattern[i % len(pattern)] for i in range(num_layers)]


def every_nth_full(default: int, names: Names = USUAL, *, types_first: bool = False) -> Family:
    """Return the family in which every n-th layer is full, the others slide.

    n is ``sliding_window_pattern``, or ``default`` if the field is missing.
    """

    def family(config: Config) -> CacheShape:
        if types_first and config.words("layer_types"):
            return by_layer_types(names)(config)
        pattern = config.integer("sliding_window_pattern", default)
        sliding = [(i + 1) % pattern != 0 for i in range(config.integer("num_hidden_layers"))]
        return alike(sliding, config, names)

    return family


def exaone4(config: Config) -> CacheShape:
    """EXAONE 4: L in a pattern such as ``LLLG`` is a sliding layer; without it none slides."""
    pattern = config.text("sliding_window_pattern") or "G"
    words = repeated(pattern, config.integer("num_hidden_layers"))
    return alike([x == "L" for x in words], config)


def step(config: Config) -> CacheShape:
    """Step 3.5: sliding layers have another number of heads."""
    default = repeated((SLIDING, FULL), config.integer("num_hidden_layers"))
    sliding = [kind == SLIDING for kind in config.layer_types(default)]
    full = window = kv_layer(config, STEP)
    if config.has("attention_other_setting"):
        groups = config.section("attention_other_setting").integer("num_attention_groups")
        window = KVLayer(groups, full.head_dim, full.value_dim)
    return mixed(sliding, full, window, config.integer("sliding_window", 512))


def mimo_v2(config: Config) -> CacheShape:
    """MiMo V2: 1 in ``hybrid_layer_pattern`` is a sliding layer, whose K and V have other sizes."""
    sliding = [x == 1 for x in config.integers("hybrid_layer_pattern")]
    names = ("num_key_value_heads", "head_dim", "v_head_dim")
    full, window = (
        KVLayer(*config.several(*(f"{prefix}{x}" for x in names))) for prefix in ("", "swa_")
    )
    return mixed(sliding, full, window, config.integer("sliding_window_size"))


def gemma3n(config: Config) -> CacheShape:
    """The last layers have no K and V of their own: they read those of earlier ones."""
    num_own = config.integer("num_hidden_layers") - config.count("num_kv_shared_layers")
    sliding = [kind == SLIDING for kind in config.layer_types([])[:num_own]]
    return mixed(sliding, kv_layer(config), longest=config.integer("sliding_window"))


def gemma4(config: Config) -> CacheShape:
    """Gemma 4: full layers have larger, perhaps fewer heads; the last layers keep no KV."""
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
    """IQuest-Coder's loop: each layer has a cache of every token and one of a sliding window."""
    layer, longest = kv_layer(config), config.integer("loop_window_size")
    num_layers = config.integer("num_hidden_layers")
    return CacheShape((layer,) * num_layers, (Window(layer, longest),) * num_layers)


def baichuan_m1(config: Config) -> CacheShape:
    """Baichuan M1: some layers slide, and all keep the last K and V for a short convolution."""
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
