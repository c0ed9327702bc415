"""One suite for every codec that a profile makes: bounds, edges, and damage."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.names import LEARNABLE
from kvstore.codecs.presets import codec_by_name, open_codec, warm
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import KVLayer, KVLayout, slice_tokens
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
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_comes_back_resembles_what_went_in(name, dtype):
    codec, layout = open_codec(name, model_profile(dtype)), model_layout(dtype)
    run = model_run(layout, 128, first_token=256)
    payload = codec.encode(run, layout, 256)
    out = restored(codec, payload, 128, 256, layout)
    assert error(run, out, dtype) < ERRORS[name]


@pytest.mark.parametrize("preset", ["dense3", "balanced", "safe"])
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


@pytest.mark.parametrize("first_token", [0, 2, 128])
def test_every_length(codec, first_token):
    run = model_run(LAYOUT, 130, first_token=first_token)
    for num_tokens in (*range(12), 63, 127, 128, 129, 130):
        part = slice_tokens(run, 0, num_tokens)
        payload = codec.encode(part, LAYOUT, first_token)
        out = restored(codec, payload, num_tokens, first_token)
        sinks = min(max(4 - first_token, 0), num_tokens)
        for before, after in zip(arrays(part), arrays(out), strict=True):
            assert np.array_equal(before[:, :sinks], after[:, :sinks])
            assert np.isfinite(values_of(after, "bfloat16")).all()


def test_length_is_about_what_was_announced(codec, name):
    run = model_run(LAYOUT, 128, first_token=128)
    announced = codec.packed_nbytes(LAYOUT, 128, 128)
    actual = len(codec.encode(run, LAYOUT, 128))
    if name == "dense3":
        assert actual == announced
    assert actual == pytest.approx(announced, rel=0.15)


def test_rows_that_no_gain_can_represent_stay_as_they_are(codec):
    run = model_run(LAYOUT, 64, first_token=128)
    patterns = {20: 0x7F80, 21: 0xFF80, 22: 0x7FC1, 40: 0x7F00}  # infinities, a NaN, 1.7e38
    for token, bits in patterns.items():
        run[1][0][1, token, 3] = run[2][1][0, token, 0] = bits
    out = restored(codec, codec.encode(run, LAYOUT, 128), 64, 128)
    for token in patterns:
        assert np.array_equal(run[1][0][1, token], out[1][0][1, token])
        assert np.array_equal(run[2][1][0, token], out[2][1][0, token])
    for before, after in zip(arrays(run), arrays(out), strict=True):
        finite = np.isfinite(values_of(before, "bfloat16"))
        assert np.array_equal(finite, np.isfinite(values_of(after, "bfloat16")))


def test_empty_rows_come_back_small(codec):
    run = model_run(LAYOUT, 16, first_token=128)
    for array in arrays(run):
        array[:, 5] = 0
    out = restored(codec, codec.encode(run, LAYOUT, 128), 16, 128)
    assert all(np.abs(values_of(x[:, 5], "bfloat16")).max() < 40 for x in arrays(out))


def test_encoding_twice_gives_the_same_bytes(codec, name):
    run = model_run(LAYOUT, 128)
    copied = [(k.copy(), v.copy()) for k, v in run]
    payload = codec.encode(run, LAYOUT, 0)
    again = open_codec(name, model_profile())
    assert payload == again.encode(copied, LAYOUT, 0)
    assert again == codec and again.id == codec.id
    assert len(codec.id) <= 24 and codec.id.partition(".")[0] == name


def test_other_lengths_are_corrupt(codec):
    payload = codec.encode(model_run(LAYOUT, 40), LAYOUT, 0)
    for length in (0, 1, 100, len(payload) // 2, len(payload) - 1):
        with pytest.raises(Corrupt):
            restored(codec, payload[:length], 40)
    with pytest.raises(Corrupt):
        restored(codec, payload + b"\0", 40)
    with pytest.raises(Corrupt):
        restored(codec, payload, 30)


def test_flipped_bits_never_do_more_than_give_other_values(codec):
    payload = codec.encode(model_run(LAYOUT, 40), LAYOUT, 0)
    rng = np.random.default_rng(5)
    for position in rng.integers(0, 8 * len(payload), 200):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        try:
            restored(codec, bytes(damaged), 40)
        except Corrupt:
            continue


def test_input_is_never_written_and_views_are_filled(codec):
    whole, out = model_run(LAYOUT, 300), LAYOUT.empty(300)
    for array in arrays(whole):
        array.setflags(write=False)
    for array in arrays(out):
        array.fill(1)
    payload = codec.encode(slice_tokens(whole, 128, 256), LAYOUT, 128)
    shifted = memoryview(b"x" + payload)[1:]
    codec.decode(shifted, LAYOUT, 128, slice_tokens(out, 128, 256))
    expected = restored(codec, payload, 128, 128)
    for array, want in zip(arrays(out), arrays(expected), strict=True):
        assert np.array_equal(array[:, 128:256], want)
        assert (array[:, :128] == 1).all() and (array[:, 256:] == 1).all()


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
