"""Attention over packed rows gives the result of attention over the restored ones."""

from __future__ import annotations

import copy
import os
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base

import thermocline.mlx
from engines.config import EngineConfig
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache
from engines.mlx_worker.cache.packed_model import (
    NAME,
    AttentionSeam,
    PackedAttention,
    PackedCacheModel,
    attending,
    attends_better,
    modules_of,
    says_the_same,
    with_packed_caches,
)
from engines.mlx_worker.model.loading import load_model
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model
from tests.integration.mlx_owner.harness import text
from tests.integration.tiny_models import tiny_model

ON_CPU = mx.default_device().type == mx.DeviceType.cpu
pytestmark = [pytest.mark.mlx, pytest.mark.skipif(not ON_CPU, reason="the host's kernels")]

# Families of the pinned mlx_lm whose own module does not have the function.


def live_model(model: Any = None) -> PackedCacheModel:
    model = model or tiny_model("llama").model
    return with_packed_caches(model, probe(model), EngineConfig(hot_codec="tq3"))[0]


def fed(live, num_tokens, seed=0):
    caches = live.make_cache()
    live.model(mx.array([text(seed, num_tokens)]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def step(live, tokens, caches):
    logits = live.model(mx.array([[x] for x in tokens]), cache=copy.deepcopy(caches))[:, -1]
    mx.eval(logits)
    return logits


def spread(one, other):
    return float((mx.abs(one - other).max() / (one.max() - one.min())).item())


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 70, 131, 300])
def test_one_session_is_answered_as_with_restored_rows(num_tokens):
    live = live_model()
    caches = fed(live, num_tokens)
    restored = step(live, [5], caches)
    with attending(live.model):
        attended = step(live, [5], caches)
    # Restored rows are rounded to bf16, attended ones are not; nothing is packed of few tokens.
    assert spread(restored, attended) < (2e-3 if num_tokens > 100 else 1e-5)


def assert_each_answered_as_alone(live, alone, attends):
    batch = [caches[0].merge(caches) for caches in (list(x) for x in zip(*alone, strict=True))]
    with attending(live.model):
        assert [cache.attends for cache in batch[0].caches] == attends
        together = step(live, [5, 6, 7], batch)
        each = [step(live, [5 + i], caches)[0] for i, caches in enumerate(alone)]
    assert spread(mx.stack(each), together) < 1e-5


def test_a_batch_of_several_lengths_is_answered_as_each_alone():
    live = live_model()
    alone = [fed(live, length, seed) for seed, length in enumerate((300, 20, 150))]
    assert_each_answered_as_alone(live, alone, [True, True, True])


def test_a_session_with_rows_that_cannot_be_packed_does_not_keep_others_from_attending():
    live = live_model()
    alone = [fed(live, length, seed) for seed, length in enumerate((300, 280, 150))]
    for cache in alone[1]:
        shape = (1, cache.sides[0].recent.shape[1], 64, cache.packers[0].kind.dim)
        cache.append(mx.full(shape, 1e-9), mx.full(shape, 1e-9))  # no scale for rows so small
        cache.append(mx.random.normal(shape), mx.random.normal(shape))
        mx.eval(cache.state)
        cache.pack_old()
        assert cache.sides[0].num_kept
    assert_each_answered_as_alone(live, alone, [True, False, True])


def test_steps_pack_and_attend_as_steps_that_restore():
    """Eighty steps, some of which pack: the bytes that are packed differ by rounding only."""
    live = live_model()
    tokens = text(3, 80)
    caches = fed(live, 120)
    with attending(live.model):
        for token in tokens:
            live.model(mx.array([[token]]), cache=caches)
            mx.eval([cache.state for cache in caches])
    assert caches[0].offset == 200 and caches[0].sides[0].num_packed
    whole = fed(live, 120)
    for token in tokens:
        live.model(mx.array([[token]]), cache=whole)
        mx.eval([cache.state for cache in whole])
    assert spread(step(live, [5], whole), step(live, [5], caches)) < 0.05


def test_the_function_is_replaced_in_this_module_only_and_put_back():
    live = live_model()
    (module,) = modules_of(live.model)
    seam, plain = AttentionSeam(live.model), getattr(base, NAME)
    assert not seam.is_open()
    with attending(live.model):
        assert isinstance(getattr(module, NAME), PackedAttention) and seam.is_open()
        with attending(live.model):
            assert getattr(module, NAME).plain is plain
        assert seam.is_open()
        assert getattr(base, NAME) is plain
    assert getattr(module, NAME) is plain and not seam.is_open()
    with pytest.raises(KeyError), attending(live.model):
        raise KeyError
    assert getattr(module, NAME) is plain


def test_other_caches_pass_through():
    model = tiny_model("llama").model
    tokens = mx.array([text(1, 12)])
    plain = model(tokens)
    with attending(model):
        assert bool(mx.array_equal(plain, model(tokens)))


def test_three_lines_of_generate():
    model = tiny_model("llama").model
    prompt = mx.array(text(2, 180))

    def said(cache):
        steps = generate_step(prompt, model, max_tokens=8, prompt_cache=cache)
        return [int(token) for token, _ in steps]

    restoring = said(thermocline.mlx.make_cache(model, codec="tq3"))
    with thermocline.mlx.attending(model):
        cache = thermocline.mlx.make_cache(model, codec="tq3")
        assert said(cache) == restoring
    assert all(isinstance(x, HostRowPacker) for x in cache[0].packers)
    with pytest.raises(ValueError, match="no live cache in 'tq5'; there are tq3, tq4"):
        thermocline.mlx.make_cache(model, codec="tq5")
    with pytest.raises(ValueError, match="only plain KV caches"):
        thermocline.mlx.make_cache(tiny_model("gemma3_text").model)


ON_CPU = mx.default_device().type == mx.DeviceType.cpu


class SharperCache(PackedKVCache):
    """Attends with another scale than the model means."""

    def attended(self, queries, scale):
        return super().attended(queries, 8 * scale)


def test_a_model_that_attends_otherwise_is_noticed_at_the_start():
    live = live_model()
    assert says_the_same(live.model, live.make_cache())
    caches = [SharperCache(x.packers, x.dtype, x.seam) for x in live.make_cache()]
    assert not says_the_same(live.model, caches)
    assert not attends_better(live.model, caches, [x.packers[0].kind.dim for x in caches])


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_says_the_same():
    model = load_model(str(sample_model(default_cache_dir(os.environ)))).model
    model.model.layers = model.model.layers[:2]  # all thirty take a minute without a BLAS
    live = live_model(model)
    assert says_the_same(live.model, live.make_cache())
