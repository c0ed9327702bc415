"""Maps each ``model_type`` to the way in which it keeps KV, or to the reason why it is refused.

A type that is not in the table is refused, since a guess could silently be wrong by a factor. The
integration tests build a model of every type that mlx_lm has and compare its caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from engines.kv_budget import INDEX_ON_VLLM, NOTHING_GROWS_ON_VLLM, cannot_batch
from launch.families import attention, recurrent
from launch.families.attention import (
    EXAONE,
    FULL,
    GPT,
    LILLE,
    MHA,
    PHIXTRAL,
    QWEN1,
    SLIDING,
    STATED,
    TALKIE,
    USUAL,
    Names,
    by_layer_types,
    dense,
    every_nth_full,
    keeps_windows_whole,
)
from launch.families.cache_shape import CacheShape, Config, Family, ModelRefused, NotUnderstood

EngineName: TypeAlias = Literal["mlx", "vllm"]


def cache_shape(content: Mapping[str, Any], engine: EngineName = "mlx") -> CacheShape:
    """Return the shape of a model's cache in this engine; ``content`` is its config.json.

    Raises:
        ModelRefused: the engine cannot serve the model, or not with cold sessions; says why.
        NotUnderstood: the type is unknown or a field is missing; names it.
    """
    config = Config(content)
    kind = model_kind(config)
    if engine == "mlx" and kind in REFUSED:
        raise ModelRefused(f"models of type {kind} are refused: {REFUSED[kind]}")
    families = FAMILIES if engine == "mlx" else ON_VLLM
    if kind not in families:
        raise NotUnderstood(
            f"models of type {kind} are not known here, and a guess could be wrong by a factor"
        )
    shape = families[kind](config)
    if engine == "vllm" and (reason := _not_on_vllm(shape)):
        raise ModelRefused(f"models of type {kind} are refused: {reason}")
    return shape


def _not_on_vllm(shape: CacheShape) -> str:
    """Return the reason why sessions on vLLM cannot be stored; "" if they can."""
    if shape.has_latents and shape.exact_only:
        return INDEX_ON_VLLM
    if shape.exact_only:
        return shape.exact_only
    return "" if shape.growing else NOTHING_GROWS_ON_VLLM


def model_kind(config: Config) -> str:
    """Return the type to look up: the outer one if it implies or refuses the nested one, else that.

    An unknown nested type is also replaced by the outer one.
    """
    outer = config.outer_type
    if outer in NESTED or outer in REFUSED:
        return NESTED.get(outer, outer)
    return config.model_type if config.model_type in FAMILIES else outer


_DENSE: Mapping[Names, tuple[str, ...]] = {
    STATED: (
        *("gemma", "glm", "glm4", "glm4_moe", "qwen3", "qwen3_moe", "seed_oss", "solar_open"),
    ),
    USUAL: (
        *("Klear", "apertus", "bailing_moe", "bitnet", "cohere", "dots1", "ernie4_5_moe"),
        *("granite", "granitemoe", "helium", "hunyuan_v1_dense", "iquestcoder", "minicpm"),
        *("minimax", "minimax_m2", "mimo", "mixtral", "nanochat", "nemotron", "phimoe", "qwen2"),
        *("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "stablelm"),
        *("starcoder2", "telechat3", "xverse", "llama4_text"),
    ),
    MHA: (
        *("deepseek", "ernie4_5", "gpt_neox", "internlm2", "internlm3", "olmo2", "olmoe", "phi"),
        *("phi3", "smollm3"),
    ),
    GPT: ("gpt2", "gptj"),
    EXAONE: ("exaone",),
    LILLE: ("lille-130m",),
    PHIXTRAL: ("phixtral",),
    TALKIE: ("talkie",),
    QWEN1: ("qwen",),
}
_LATENT = (*("deepseek_v3", "glm4_moe_lite", "joyai_llm_flash", "kimi_k2", "mistral4"),)
_LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_THREE_SLIDE = (SLIDING, SLIDING, SLIDING, FULL)

FAMILIES: Mapping[str, Family] = {
    **{kind: dense(names) for names, kinds in _DENSE.items() for kind in kinds},
    **dict.fromkeys(_LATENT, attention.latent()),
    **dict.fromkeys(_LINEAR, recurrent.qwen_next),
    **dict.fromkeys(("afmoe", "exaone_moe", "laguna", "mellum"), by_layer_types(STATED)),
    **dict.fromkeys(
        ("muse_glimmer", "muse_spark", "spark2_5"), by_layer_types(STATED, _THREE_SLIDE)
    ),
    **dict.fromkeys(("gemma3", "gemma3_text"), every_nth_full(6, STATED)),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), attention.gemma3n),
    **dict.fromkeys(("gemma4", "gemma4_text"), attention.gemma4),
    **dict.fromkeys(("kimi_k3", "kimi_linear"), recurrent.kimi_linear),
    **dict.fromkeys(("lfm2", "lfm2_moe"), recurrent.lfm2),
    **dict.fromkeys(("mamba", "falcon_mamba"), recurrent.mamba),
    "afm7": attention.afm7,
    "baichuan_m1": attention.baichuan_m1,
    "bailing_hybrid": recurrent.bailing_hybrid,
    "bailing_moe_linear": recurrent.bailing_linear,
    "bailing_moe_v3": recurrent.bailing_v3,
    "cohere2": every_nth_full(4),
    "dbrx": attention.dbrx,
    "deepseek_v2": attention.expanded_latent(),
    "deepseek_v32": attention.sparse_latent,
    "exaone4": attention.exaone4,
    "falcon_h1": recurrent.falcon_h1,
    "gear": recurrent.gear,
    "gemma2": keeps_windows_whole(STATED),
    "glm_moe_dsa": attention.sparse_latent,
    "gpt_bigcode": attention.multi_query,
    "gpt_oss": by_layer_types(STATED, (SLIDING, FULL)),
    "granitemoehybrid": recurrent.granite_hybrid,
    "hunyuan": attention.every_token,  # a layer that reads another's K and V keeps a copy of them
    "iquestloopcoder": attention.iquest_loop,
    "jamba": recurrent.jamba,
    "llama": by_layer_types(MHA),
    "longcat_flash": attention.latent("num_layers", 2),
    "longcat_flash_ngram": attention.longcat_ngram,
    "mamba2": recurrent.mamba2,
    "mimo_v2_flash": attention.mimo_v2,
    "minicpm3": attention.expanded_latent(value_dim_from_width=True),
    "minimax_m3_vl": attention.minimax_m3,
    "ministral3": by_layer_types(),
    "mistral3": dense(MHA),
    "mistral": by_layer_types(MHA),
    "nanbeige": attention.looped,
    "nemotron-nas": attention.nemotron_nas,
    "nemotron_h": recurrent.nemotron_h,
    "olmo3": every_nth_full(4, MHA, types_first=True),
    "olmo_hybrid": recurrent.olmo_hybrid,
    "openelm": attention.openelm,
    "phi3small": keeps_windows_whole(),
    "plamo": attention.plamo,
    "plamo2": recurrent.plamo2,
    "plamo3": every_nth_full(8, STATED),
    "recurrent_gemma": recurrent.recurrent_gemma,
    "rwkv7": recurrent.rwkv7,
    "step3p5": attention.step,
    "youtu_llm": attention.expanded_latent(),
}

# Where vLLM differs: it keeps latents without expanding them, drops tokens outside of a window, and
# follows ``layer_types`` where mlx_lm counts layers.
ON_VLLM: Mapping[str, Family] = {
    **FAMILIES,
    **dict.fromkeys(("gemma3", "gemma3_text"), every_nth_full(6, STATED, types_first=True)),
    **dict.fromkeys(_LINEAR, recurrent.qwen_next_by_types),
    "cohere2": every_nth_full(4, types_first=True),
    **dict.fromkeys(("deepseek_v2", "minicpm3", "youtu_llm"), attention.latent()),
    "gemma2": every_nth_full(2, STATED),
}

# Outer types (of multimodal and other models), and the type of their nested text model in mlx_lm.
NESTED: Mapping[str, str] = {
    "gemma4_unified": "gemma4",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3",
    "kimi_vl": "deepseek_v3",
    "llava": "mistral3",
    "lfm2-vl": "lfm2",
    "minimax_m3_vl": "minimax_m3_vl",
    "mistral3": "mistral3",
    "muse_spark": "muse_spark",
    "phi-msft": "phixtral",
    "pixtral": "mistral3",
    "prism_hadamard_qwen35": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}

# Types that mlx_lm has and this engine cannot serve.
REFUSED: Mapping[str, str] = {
    "deepseek_v41": cannot_batch("LayerCache"),
    "deepseek_v41_text": cannot_batch("LayerCache"),
    "llama4": cannot_batch("ChunkedKVCache"),
    "olmo": "mlx_lm needs the package ai2-olmo for it, which is not among ours; take olmo2",
}
