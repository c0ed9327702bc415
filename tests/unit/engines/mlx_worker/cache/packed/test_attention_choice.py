"""At the start a model's answers are compared: attending to packed rows, and restoring them."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

from engines.config import EngineConfig
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.cache.packed.kv_cache import PackedKVCache
from engines.mlx_worker.cache.packed_model import attends_better, says_the_same, with_packed_caches
from engines.mlx_worker.model.loading import load_model
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model
from tests.integration.tiny_models import tiny_model

ON_CPU = mx.default_device().type == mx.DeviceType.cpu
pytestmark = [pytest.mark.mlx, pytest.mark.skipif(not ON_CPU, reason="the host's kernels")]


class SharperCache(PackedKVCache):
    """Attends with another scale than the model means."""

    def attended(self, queries, scale):
        return super().attended(queries, 8 * scale)


def live_model(model):
    return with_packed_caches(model, probe(model), EngineConfig(hot_codec="tq3"))[0]


def test_a_small_model_says_the_same():
    live = live_model(tiny_model("llama").model)
    assert says_the_same(live.model, live.make_cache())


def test_a_model_that_attends_otherwise_is_noticed():
    live = live_model(tiny_model("llama").model)
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
