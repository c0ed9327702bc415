"""From a model of mlx_lm to a profile and figures, in a few lines."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import thermocline
import thermocline.mlx
from tests.integration.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.mlx


def texts(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(count).integers(0, VOCAB, (count, length)).tolist()


def test_a_model_is_captured_learned_and_judged(capsys):
    model = tiny_model("llama").model
    assert thermocline.layout_of(model).layers == (thermocline.KVLayer(2, 64, 64),) * 3
    samples = thermocline.mlx.capture(model, texts(2, 80), progress=True)
    assert "capture: 2 of 2 texts to learn from" in capsys.readouterr().err
    assert len(samples.texts) == 2 and samples.texts[0][2][1].shape == (2, 80, 64)
    assert samples.metrics is not None and samples.ropes[0] is not None
    profile = thermocline.learn(samples, "ratequant")
    other = thermocline.per_layer({0: "raw", "default": "tq5"})
    names = ["raw", "tq2", "tq:bits=8", "ratequant", other]
    rows = thermocline.judge(
        model, names, texts(1, 144), context=128, num_scored=16, profile=profile
    )
    assert [x.preset for x in rows] == ["raw", "tq2", "tq8", "ratequant", other.id]
    raw, tq2, tq8, learned, _ = rows
    assert raw.kl < tq8.kl < tq2.kl and learned.codec_id.startswith("ratequant.5-")
    assert capsys.readouterr().err == "", "it is no terminal"
    thermocline.judge(
        model, ["raw", "tq2"], texts(1, 144), context=128, num_scored=16, progress=True
    )
    said = capsys.readouterr().err
    assert "judge: 0 of 1 cases, tq2; raw 32.0" in said and "KL 0.0000" in said
    assert tq2.context == 128 and 2 < tq2.bits_per_element < tq8.bits_per_element


def test_texts_that_cannot_be_measured_are_refused():
    model = tiny_model("llama").model
    with pytest.raises(ValueError, match="texts of 160 tokens or more"):
        thermocline.judge(model, ["tq3"], texts(1, 159), context=128, num_scored=32)
    with pytest.raises(ValueError, match="token ids"):
        thermocline.mlx.capture(model, [[]])
    with pytest.raises(thermocline.UnknownCodec, match="learns nothing"):
        thermocline.learn(thermocline.mlx.capture(model, texts(1, 64)), "tq3")
    with pytest.raises(ValueError, match="needs more than 4 tokens"):
        thermocline.learn(thermocline.mlx.capture(model, texts(1, 4)), "rabitq")


def test_a_cache_that_is_full_is_packed_and_goes_on():
    model, prompt = tiny_model("llama").model, mx.array(texts(1, 300))
    plain, packed = make_prompt_cache(model), thermocline.mlx.make_cache(model)
    for cache in (plain, packed):
        model(prompt, cache=cache)
    later = thermocline.mlx.pack_cache(model, plain)
    assert [x.offset for x in later] == [x.offset for x in plain] == [300] * 3
    assert sum(x.nbytes for x in later) < sum(x.nbytes for x in plain) / 1.5
    packed[0].pack_old()  # the first layer's KV do not depend on what is restored
    assert all(mx.array_equal(*pair) for pair in zip(later[0].state, packed[0].state, strict=True))
    logits = [model(mx.array([[5]]), cache=x)[0, -1].astype(mx.float32) for x in (later, plain)]
    assert np.corrcoef(np.array(logits[0]), np.array(logits[1]))[0, 1] > 0.95
    with pytest.raises(ValueError, match="3 plain KV caches"):
        thermocline.mlx.pack_cache(model, packed)
    assert thermocline.mlx.pack_cache(model, make_prompt_cache(model))[0].empty()
    of_two = make_prompt_cache(model)
    model(mx.array([[1, 2], [3, 4]]), cache=of_two)
    with pytest.raises(ValueError, match="of one prompt"):
        thermocline.mlx.pack_cache(model, of_two)
