"""One suite for every codec that a profile makes: bounds, edges, and damage."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.names import CALIBRATED, LEARNABLE
from kvstore.codecs.presets import codec_by_name, open_codec, warm
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run
from tests.unit.kvstore.codecs.samples import layout_of, values_of

# Squared error over squared size, on texts that calibration never saw.
ERRORS = {"dense3": 0.03, "balanced": 0.05, "max": 0.2, "safe": 0.001}
ERRORS |= {"spectral": 0.06, "ratequant": 0.2, "kvquant": 0.2, "commvq": 0.3, "rabitq": 0.6}


@pytest.fixture(params=LEARNABLE)
def name(request):
    return request.param


@pytest.fixture
def codec(name):
    return open_codec(name, model_profile("bfloat16"))


LAYOUT = model_layout()


def arrays(run):
    return [array for pair in run for array in pair]


def restored(codec, payload, num_tokens, first_token=0, layout=LAYOUT):
    out = layout.empty(num_tokens)
    codec.decode(memoryview(payload), layout, first_token, out)
    return out


def error(before, after, dtype="bfloat16"):
    pairs = list(zip(arrays(before), arrays(after), strict=True))
    x = np.concatenate([values_of(a, dtype).reshape(-1) for a, _ in pairs])
    y = np.concatenate([values_of(b, dtype).reshape(-1) for _, b in pairs])
    return float(np.sum((x - y) ** 2) / np.sum((x - x.mean()) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((x, "bfloat16") for x in LEARNABLE), *product(CALIBRATED, ("float16", "float32"))],
)
def test_what_comes_back_resembles_what_went_in(name, dtype):
    codec, layout = open_codec(name, model_profile(dtype)), model_layout(dtype)
    run = model_run(layout, 128, first_token=256)
    payload = codec.encode(run, layout, 256)
    out = restored(codec, payload, 128, 256, layout)
    assert error(run, out, dtype) < ERRORS[name]


@pytest.mark.parametrize(
    "preset",
    ["dense3", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("balanced", "safe"))],
)
def test_latents_as_wide_as_those_of_published_models(preset):
    """DeepSeek, Kimi and GLM keep a latent of 512 values, and 64 rotated ones beside it."""
    layout = KVLayout("float32", (KVLayer(1, 512, 64),) * 2)
    texts = [layout.empty(160) for _ in range(2)]
    for number, array in enumerate(x for text in texts for x in arrays(text)):
        shape = (3, array.shape[2])
        directions = np.random.default_rng(number % 4).standard_normal(shape).astype(np.float32)
        array[0] = np.random.default_rng(100 + number).standard_normal((160, 3)) @ directions
    codec = open_codec(preset, learn_profile(Samples(layout, (None,) * 2, texts), "mla", [preset]))
    codec.check(layout)
    payload = codec.encode(texts[0], layout, 256)
    out = restored(codec, payload, 160, 256, layout)
    assert error(texts[0], out, "float32") < 1e-3


def test_another_model_is_refused(codec, name):
    with pytest.raises(UnknownCodec, match="other layers"):
        codec.check(layout_of(64))
    codec.check(LAYOUT)
    warm(codec, LAYOUT)


def test_without_a_profile_only_two_can_be_opened(name):
    if name in ("dense3", "rabitq"):
        assert open_codec(name).id == codec_by_name(name).id == f"{name}.2"
        return
    with pytest.raises(UnknownCodec, match="calibrate"):
        open_codec(name)
