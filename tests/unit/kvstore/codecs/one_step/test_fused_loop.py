"""One step restored in one pass gives the rows of its pipeline, and survives the same inputs."""

from __future__ import annotations

import functools
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.reader import count_bytes
from kvstore.codecs.stacks.fused import for_sizes_alone
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.shapes import Rope
from tests.unit.kvstore.codecs.fixed_rate.integer_models import layout_with, rope_of
from tests.unit.kvstore.codecs.fused_checks import (
    assert_damage_does_the_same,
    assert_views_are_filled,
    raw,
    restored,
    same_as_pieces,
)
from tests.unit.kvstore.codecs.one_step.step_models import (
    USUAL,
    codec_of,
    is_fused,
    parts_of,
    pipelines_of,
    profile_of,
)
from tests.unit.kvstore.codecs.samples import run_of

LAYOUT = layout_with((64, 64), (64, 64), (64, 64))  # a group of two layers, and one of one
FOUR_UNITS = layout_with(*[(32, 32)] * 8)
SPECTRA = [(32.0, 0.3), (9.0, 0.5)]
MODELS = pytest.mark.parametrize(
    ("parts", "layout"), [("alone", LAYOUT), ("predicted", FOUR_UNITS)], indirect=["parts"]
)


@functools.cache
def made(name):
    """The parts of a codec. They take seconds to compile, so no collection of tests makes them."""
    if name == "alone":
        return parts_of(profile_of(LAYOUT, rope_of(64), SPECTRA))
    return parts_of(profile_of(FOUR_UNITS, rope_of(32), [*SPECTRA, (700.0, 0.01)], 192))


@pytest.fixture(scope="module")
def parts(request):
    return made(request.param)


def assert_same(parts, run, layout, first_token):
    codecs = (codec_of(parts), codec_of(pipelines_of(parts)))
    return same_as_pieces(*codecs, run, layout, first_token)


FUSED = [
    ([(64, 64)] * 3, rope_of(64)),
    ([(128, 128)] * 2, rope_of(64)),  # half of the channels are turned
    ([(80, 80)], None),
    ([(80, 80)], rope_of(80)),  # five vectors of channels for two halves
    ([(64, 64)], rope_of(48)),
    ([(16, 16)] * 4, None),
    ([(256, 256)], rope_of(256)),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("dims", "rope"), FUSED)
def test_kernels_give_the_rows_of_the_pieces(dims, rope, dtype):
    layout = layout_with(*dims, dtype=dtype)
    parts = parts_of(profile_of(layout, rope))
    assert is_fused(parts)
    for num_tokens in (5, 64, 130):
        assert_same(parts, run_of(layout, num_tokens, seed=num_tokens), layout, 77)


@MODELS
@pytest.mark.parametrize(
    ("num_tokens", "first_token"),
    [*zip([1, 2, 3, 4, 5, 7, 8, 63, 65, 127, 128], itertools.cycle([0, 3, 4096]), strict=False)],
)
def test_every_length(num_tokens, first_token, parts, layout):
    assert is_fused(parts)
    assert_same(parts, run_of(layout, num_tokens), layout, first_token)


@pytest.mark.parametrize("reach", [16, 128, 256, 272, 512])
def test_units_are_predicted_from_any_number_of_channels(reach):
    parts = parts_of(profile_of(FOUR_UNITS, rope_of(32), [USUAL, (3.1, 3.0)], reach))
    assert is_fused(parts)
    for num_tokens in (6, 70):
        assert_same(parts, run_of(FOUR_UNITS, num_tokens), FOUR_UNITS, 5)


SHARES = [
    (2.9, 0.3),  # none is wide
    (700.0, 3.1),  # all are
    (700.0, 0.01),  # none is dead
    (1.0, 0.9),  # very few are live
    (3.1, 3.0),  # a few, and nothing else
    (0.2, 0.3),  # none at all
]


@pytest.mark.parametrize("spectrum", SHARES)
def test_any_share_of_wide_and_live_components(spectrum):
    parts = parts_of(profile_of(LAYOUT, None, [USUAL, spectrum]))
    assert is_fused(parts)
    for num_tokens in (6, 70):
        assert_same(parts, run_of(LAYOUT, num_tokens), LAYOUT, 5)


def payload_of(parts, codes, num_tokens):
    """Makes a payload of any codes, (units, tokens, components) of each stack, after the sinks."""
    chunks = []
    for part, values in zip(pipelines_of(parts), codes, strict=True):
        gains = np.ones((part.shape.num_units, num_tokens, len(part.shape.gain_groups)), np.float32)
        chunks += [count_bytes(0), part.gain.write(gains), part.coder.write(values)]
    return b"".join(chunks)


def codes_of(parts, num_tokens, make):
    """The codes of each stack that ``make`` gives for (units, tokens, components)."""
    shapes = [part.quantiser.integers.classes.shape for part in pipelines_of(parts)]
    return [make((units, num_tokens, components)).astype(np.int32) for units, components in shapes]


EXTREMES = (1, 2, 3, 8, 40, 127, 128, 700, 4095, 32767, 32768, 1 << 20, 1 << 24)
SIZES = st.sampled_from(EXTREMES)


def extreme(rng, sizes, shape, share):
    """Codes of these sizes and either sign; all but this share are 0."""
    return rng.choice(sizes, shape) * (rng.random(shape) < share) * rng.choice([-1, 1], shape)


@pytest.mark.slow
@MODELS
@given(data=st.data())
def test_extreme_codes(data, parts, layout):
    num_tokens = data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    def some(shape):
        sizes = np.array(data.draw(st.lists(SIZES, min_size=1, max_size=4)))
        share = data.draw(st.sampled_from([0.001, 0.05, 1.0]))
        return extreme(rng, sizes, shape, share)

    payload = payload_of(parts, codes_of(parts, num_tokens, some), num_tokens)
    codecs = (codec_of(parts), codec_of(pipelines_of(parts)))
    outs = [restored(codec, payload, layout, num_tokens, 9) for codec in codecs]
    assert raw(outs[0]) == raw(outs[1])


def test_a_codec_that_is_asked_for_sizes_alone_compiles_nothing():
    with for_sizes_alone():
        parts = parts_of(profile_of(LAYOUT, rope_of(64), SPECTRA))
    assert is_fused(made("alone")) and all(isinstance(x, Pipeline) for x in parts)
    for num_tokens in (0, 5, 64):
        sizes = [codec_of(x).packed_nbytes(LAYOUT, num_tokens, 0) for x in (parts, made("alone"))]
        assert sizes[0] == sizes[1]


def test_parts_that_no_gain_can_represent():
    run = run_of(LAYOUT, 70)
    for token, bits in {20: 0x7F80, 21: 0xFF80, 22: 0x7FC1, 69: 0x7F00}.items():
        run[1][0][1, token, 3] = bits
    out = assert_same(made("alone"), run, LAYOUT, 128)
    assert np.array_equal(out[1][0][:, [20, 21, 22, 69]], run[1][0][:, [20, 21, 22, 69]])


def test_empty_and_tiny_rows():
    run = run_of(LAYOUT, 20)
    run[0][1][:, 5] = 0
    run[1][1][:, 6] = 1  # the smallest denormal
    assert_same(made("alone"), run, LAYOUT, 128)


def test_views_of_any_stride_are_filled():
    codec, pieces = codec_of(made("alone")), codec_of(pipelines_of(made("alone")))
    assert_views_are_filled(codec, pieces, LAYOUT)


def test_rows_whose_values_lie_apart_go_through_the_pieces():
    codec = codec_of(made("alone"))
    payload = codec.encode(run_of(LAYOUT, 20), LAYOUT, 9)
    apart = [(np.asfortranarray(k), np.asfortranarray(v)) for k, v in LAYOUT.empty(20)]
    codec.decode(memoryview(payload), LAYOUT, 9, apart)
    expected = restored(codec, payload, LAYOUT, 20, 9)
    assert raw([(k.copy("C"), v.copy("C")) for k, v in apart]) == raw(expected)


APART = [((72, 72), None), ((64, 80), None), ((64, 64), Rope((1.0,) * 32, True))]


@pytest.mark.parametrize(("dims", "rope"), [*APART, ((64, 64), rope_of(24))])
def test_layouts_that_kernels_cannot_do_stay_with_the_pieces(dims, rope):
    layout = layout_with(dims)
    parts = parts_of(profile_of(layout, rope))
    assert not is_fused(parts)
    assert_same(parts, run_of(layout, 20), layout, 9)


@MODELS
@given(data=st.data())
def test_damage_is_found_or_gives_other_values(data, parts, layout):
    assert_damage_does_the_same(data, codec_of(parts), codec_of(pipelines_of(parts)), layout)


@pytest.mark.parametrize(
    ("parts", "layout", "digest"),
    [("alone", LAYOUT, "0d8a1f9cdae8a803"), ("predicted", FOUR_UNITS, "6907e8c0b23ccd03")],
    indirect=["parts"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_restored_values_are_frozen(parts, layout, digest, fused):
    """Codes and gains of a formula: whole numbers from there on, on every host alike."""

    def by_formula(shape):
        numbers = np.arange(np.prod(shape)).reshape(shape)
        sizes = numbers * 7919 % 101 // (1 + numbers % shape[2] // 8)
        return np.where(numbers % 3 == 0, -sizes, sizes)

    codec = codec_of(parts if fused else pipelines_of(parts))
    payload = payload_of(parts, codes_of(parts, 70, by_formula), 70)
    out = restored(codec, payload, layout, 70, 9)
    assert hashlib.blake2b(b"".join(raw(out)), digest_size=8).hexdigest() == digest


@MODELS
@pytest.mark.parametrize("num_tokens", [1, 5, 128, 600])
@pytest.mark.parametrize("rows", ["of a model", "all the same", "zeros"])
def test_no_payload_is_shorter_than_the_least(parts, layout, num_tokens, rows):
    """So it bounds the tokens that a blob claims, though rows that repeat take little."""
    run = run_of(layout, num_tokens)
    if rows != "of a model":
        run = [tuple(np.zeros_like(x) + (rows != "zeros") * x[:, :1] for x in pair) for pair in run]
    codec = codec_of(parts)
    least = codec.least_nbytes(layout, num_tokens, 4)
    assert least <= len(codec.encode(run, layout, 4))
    assert least <= codec.packed_nbytes(layout, num_tokens, 4)
    if num_tokens > 100:
        assert codec.packed_nbytes(layout, num_tokens, 4) < 16 * least
