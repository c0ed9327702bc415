"""The plan's arithmetic against the caches that mlx_lm really makes, for every type that it has."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from engines.kv_budget import KVCost
from launch.families.cache_shape import CacheShape, ModelRefused
from launch.families.table import FAMILIES, NESTED, REFUSED, cache_shape
from tests.integration.launch.mlx_models import COMMON, all_types, config_of, tiny_model
from tests.unit.launch.plan.published import PUBLISHED

mx = pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

TOKENS = 40
ON_METAL_ONLY = frozenset(("bitnet", "muse_spark"))  # their layers are Metal kernels
# Its config.json lists every packed module of one checkpoint.
NOT_BUILT_HERE = frozenset(("prism_hadamard_qwen35",))
TYPES = sorted({*all_types()})
BUILT = [x for x in TYPES if x not in REFUSED and x not in NOT_BUILT_HERE]


def test_every_type_of_mlx_lm_is_planned_or_refused() -> None:
    assert len(TYPES) > 100
    assert [x for x in TYPES if x not in {*FAMILIES, *NESTED, *REFUSED}] == []
    assert {*REFUSED} < {*TYPES}


def held_by(kind: str, config: dict[str, Any], dtype: str, num_tokens: int) -> list[Any]:
    """The leaves of the cache after so many tokens; nothing of it is ever computed."""
    from mlx_lm.models.cache import make_prompt_cache

    from engines.mlx_worker.cache.layout import leaves

    model = tiny_model(kind, copy.deepcopy(config))
    model.set_dtype(getattr(mx, dtype))
    caches = make_prompt_cache(model)
    model(mx.array([[x % 64 for x in range(num_tokens)]]), cache=caches)
    return list(leaves(caches))


def nbytes(leaf: Any, num_tokens: int) -> int:
    """Bytes of the tokens it holds, without the room it keeps for more."""
    if type(leaf).__name__ == "ArraysCache":
        return int(leaf.nbytes)
    held = min(num_tokens, getattr(leaf, "max_size", num_tokens))
    return int(sum(x.nbytes // x.shape[2] * held for x in (leaf.keys, leaf.values)))


def cost_of(leaves: list[Any]) -> KVCost:
    """The cost that the engine's admission reckons with."""
    from engines.mlx_worker.cache import layout

    return layout._cost(leaves)


def check(kind: str, config: dict[str, Any], dtype: str, num_tokens: int = TOKENS) -> CacheShape:
    leaves = held_by(kind, config, dtype, num_tokens)
    itemsize = 4 if dtype == "float32" else 2
    shape = cache_shape(config)
    assert shape.hot_bytes(num_tokens, itemsize) == sum(nbytes(x, num_tokens) for x in leaves)
    real, planned = cost_of(leaves), shape.cost(itemsize)
    assert sorted(real.windows) == sorted(planned.windows)
    assert (real.per_token, real.fixed) == (planned.per_token, planned.fixed)
    assert real.num_caches == planned.num_caches
    return shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", BUILT)
def test_bytes_are_those_that_mlx_lm_holds(kind: str, dtype: str) -> None:
    if kind in ON_METAL_ONLY and not mx.metal.is_available():
        pytest.skip("its layers are Metal kernels")
    check(kind, config_of(kind), dtype)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_models_are_planned_at_their_full_size(name: str) -> None:
    """The weights of these models are never made: only their caches' shapes are."""
    config = {**SILENT, **PUBLISHED[name]}
    check(str(config["model_type"]), config, "bfloat16", num_tokens=1500)


# What the fixtures leave out since no cache depends on it.
SILENT = {
    key: COMMON[key]
    for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "tie_word_embeddings")
}


def test_what_is_refused_is_what_the_engine_refuses() -> None:
    from engines.mlx_worker.cache.layout import CannotServe, probe

    model = tiny_model("llama4", config_of("llama4"))
    with pytest.raises(CannotServe) as engines_reason:
        probe(model)
    with pytest.raises(ModelRefused) as plans_reason:
        cache_shape(config_of("llama4"))
    assert str(engines_reason.value) in str(plans_reason.value)


def test_the_caches_of_deepseek_v41_cannot_be_batched() -> None:
    from mlx_lm.models.deepseek_v41 import LayerCache

    assert not hasattr(LayerCache, "merge")
    assert "LayerCache" in REFUSED["deepseek_v41"]
