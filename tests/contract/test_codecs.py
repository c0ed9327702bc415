"""One suite for every codec: the promises that the store relies on."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.codecs.names import LEARNABLE, LITERATURE, READY
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.codecs.rows import sinks
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayer, KVLayout, slice_tokens
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run
from tests.unit.kvstore.codecs.samples import cosine, layout_of, run_of, values_of

# Dimensions and dtypes that the unit tests of kernels use too, so that both share numba's cache.
LAYOUTS = {
    "bfloat16": layout_of(64, "bfloat16", num_layers=2),
    "float16": layout_of(64, "float16", num_layers=2),
    "float32": layout_of(64, "float32", num_layers=2),
    "one narrow layer": layout_of(16, "bfloat16", num_heads=1),
    "K and V differ": KVLayout("bfloat16", (KVLayer(2, 128, 64), KVLayer(1, 64, 16))),
    "no growing layer": KVLayout("float32", ()),
    "learned": model_layout(),  # of codecs that a profile makes
}


# The cosine that a method reaches for channels of different size, if it is not 0.98.
COSINES = {"tq2": 0.92, "polar": 0.97, "qjl": 0.5, "ratequant": 0.95}
COSINES |= dict.fromkeys(("lm3", "manthan", "tq1", "rabitq"), 0.75)
COSINES |= dict.fromkeys(("playground", "kivi"), 0.8) | dict.fromkeys(("tqprod", "gear"), 0.85)
COSINES |= dict.fromkeys(("rvq", "vecinfer", "kvquant"), 0.9)
# Of methods of the literature; their parts have tests of their own.
FEW_LAYOUTS = ("float16", "K and V differ")
RATES = ("tq1", "tq2", "tq5", "tq6", "tq7", "tq8", "base11")  # compiled for each layout: one
OF_PAPERS = [name for name, entry in LITERATURE.items() if entry.make and name not in RATES]


def with_layouts(ours, papers=None):
    """Every codec with some of the layouts, and those that a profile makes with their own."""
    pairs = [(name, x) for name in READY for x in ours]
    pairs += [(name, x) for name in OF_PAPERS for x in papers or ours]
    pairs += [(name, "bfloat16") for name in RATES]
    pairs += [(name, "learned") for name in LEARNABLE]
    return pytest.mark.parametrize(("name", "kind"), pairs, ids=map("-".join, pairs))


everywhere = with_layouts([x for x in LAYOUTS if x != "learned"], FEW_LAYOUTS)
in_bf16, in_a_narrow_layer = with_layouts(["bfloat16"]), with_layouts(["one narrow layer"])


@pytest.fixture
def layout(kind):
    return LAYOUTS[kind]


@pytest.fixture
def codec(name, kind):
    return opened(name, kind)


def opened(name, kind):
    if kind == "learned":
        return open_codec(name, model_profile("bfloat16"))
    return codec_by_name(name)


def rows_of(layout, num_tokens, first_token=0, seed=0):
    if layout == LAYOUTS["learned"]:
        return model_run(layout, num_tokens, seed, first_token)
    return run_of(layout, num_tokens, seed)


def arrays(run):
    return [array for pair in run for array in pair]


def restored(codec, payload, layout, num_tokens, first_token=0):
    out = layout.empty(num_tokens)
    codec.decode(memoryview(payload), layout, first_token, out)
    return out


def tokens_in(layout, num_tokens):
    """A run without layers has no tokens to speak of."""
    return num_tokens if layout.layers else 0


@everywhere
def test_length_is_what_was_announced(codec, name, kind, layout):
    codec.check(layout)
    for num_tokens, first_token in ((128, 0), (128, 128), (5, 2), (1, 0), (0, 0)):
        num_tokens = tokens_in(layout, num_tokens)
        payload = codec.encode(rows_of(layout, num_tokens, first_token), layout, first_token)
        assert isinstance(payload, bytes | memoryview)
        announced = codec.packed_nbytes(layout, num_tokens, first_token)
        if kind != "learned" or name == "dense3":
            assert len(payload) == announced
        elif (num_tokens, first_token) == (128, 128):
            assert len(payload) == pytest.approx(announced, rel=0.15)
        assert codec.least_nbytes(layout, num_tokens, first_token) <= len(payload)
        restored(codec, payload, layout, num_tokens, first_token)


@in_bf16
@pytest.mark.parametrize(("size", "first_token"), [(32, 0), (32, 128), (20, 128)])
def test_chunks_restored_together_are_those_restored_one_by_one(codec, layout, size, first_token):
    run = rows_of(layout, 3 * size, first_token)
    arrays(run)[1][0, size + 3, 2] = 0x7F80  # infinite: a row that lossy codecs keep
    payloads, each = [], layout.empty(3 * size)
    for number in range(3):
        span, at = (number * size, (number + 1) * size), first_token + number * size
        payloads.append(memoryview(sinks.encode(codec, slice_tokens(run, *span), layout, at)))
        sinks.decode(codec, payloads[-1], layout, at, slice_tokens(each, *span))
    together = layout.empty(3 * size)
    sinks.decode_chunks(codec, payloads, layout, first_token, together)
    for one, other in zip(arrays(each), arrays(together), strict=True):
        assert one.tobytes() == other.tobytes()
    with pytest.raises(Corrupt):
        damaged = [payloads[0], payloads[1][:-1], payloads[2]]
        sinks.decode_chunks(codec, damaged, layout, first_token, together)


@everywhere
def test_what_comes_back_resembles_what_went_in_and_exact_means_exact(codec, layout):
    run = rows_of(layout, tokens_in(layout, 128))
    out = restored(codec, codec.encode(run, layout, 0), layout, tokens_in(layout, 128))
    same = all(a.tobytes() == b.tobytes() for a, b in zip(arrays(run), arrays(out), strict=True))
    assert same == (codec.exact or not layout.layers)
    bound = COSINES.get(codec.id.partition(".")[0], 0.98)
    for before, after in zip(arrays(run), arrays(out), strict=True):
        values = (values_of(array, layout.dtype) for array in (before, after))
        assert cosine(*values) > bound


@everywhere
def test_encoding_twice_gives_the_same_bytes(codec, name, kind, layout):
    run = rows_of(layout, tokens_in(layout, 64))
    copied = [tuple(array.copy() for array in pair) for pair in run]
    again = opened(name, kind)
    assert codec.encode(run, layout, 0) == again.encode(copied, layout, 0)
    assert again == codec and again.id == codec.id, "stateless"
    assert len(codec.id) <= 24 and codec.id.partition(".")[0] == name


@everywhere
def test_views_into_longer_arrays_are_read_and_filled(codec, layout):
    whole, out = rows_of(layout, tokens_in(layout, 300)), layout.empty(tokens_in(layout, 300))
    for array in arrays(out):
        array.fill(1)
    window, target = slice_tokens(whole, 128, 256), slice_tokens(out, 128, 256)
    payload = codec.encode(window, layout, 128)
    copied = [tuple(np.ascontiguousarray(array) for array in pair) for pair in window]
    assert payload == codec.encode(copied, layout, 128)
    codec.decode(memoryview(payload), layout, 128, target)
    expected = restored(codec, payload, layout, tokens_in(layout, 128), 128)
    for array, want in zip(arrays(out), arrays(expected), strict=True):
        assert np.array_equal(array[:, 128:256], want)
        assert (array[:, :128] == 1).all() and (array[:, 256:] == 1).all()


@everywhere
def test_input_is_never_written_and_any_other_length_is_corrupt(codec, layout):
    num_tokens = tokens_in(layout, 16)
    run = rows_of(layout, num_tokens)
    for array in arrays(run):
        array.setflags(write=False)
    payload = codec.encode(run, layout, 0)
    whole = bytes(payload)
    cut = [whole[:length] or b"\0\0" for length in (0, 1, len(whole) // 2, len(whole) - 1)]
    for wrong in (*cut, whole + b"\0", whole * 2 + b"\0", b"\0"):
        with pytest.raises(Corrupt):
            restored(codec, wrong, layout, num_tokens)


@in_a_narrow_layer
def test_flipped_bits_never_do_more_than_give_other_values(codec, layout):
    payload = codec.encode(rows_of(layout, 40), layout, 0)
    for position in np.random.default_rng(5).integers(0, 8 * len(payload), 200):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        try:
            restored(codec, bytes(damaged), layout, 40)
        except Corrupt:
            continue


@in_bf16
def test_first_tokens_and_rows_that_are_no_numbers_stay_as_they_are(codec, layout):
    run = rows_of(layout, 40)
    patterns = {20: 0x7F80, 21: 0xFF80, 22: 0x7FC1, 30: 0x7F00}  # infinities, a NaN, 1.7e38
    for token, bits in patterns.items():
        for array in arrays(run):
            array[1, token, 3] = bits
    out = restored(codec, codec.encode(run, layout, 0), layout, 40)
    for before, after in zip(arrays(run), arrays(out), strict=True):
        assert np.array_equal(before[:, :4], after[:, :4])
        finite = np.isfinite(values_of(before, layout.dtype))
        assert np.array_equal(finite, np.isfinite(values_of(after, layout.dtype)))
        for token in patterns:
            assert np.array_equal(before[1, token], after[1, token])


@in_bf16
def test_rows_of_nothing_come_back_small(codec, layout):
    run = rows_of(layout, 40, 128)
    for array in arrays(run):
        array[:, 9] = 0
    out = restored(codec, codec.encode(run, layout, 128), layout, 40, 128)
    for before, after in zip(arrays(run), arrays(out), strict=True):
        largest = np.abs(values_of(before, layout.dtype)).max()
        assert np.abs(values_of(after[:, 9], layout.dtype)).max() < largest / 2


@in_a_narrow_layer
@pytest.mark.parametrize("first_token", [0, 2, 128])
def test_every_length(codec, layout, first_token):
    whole = rows_of(layout, 130, first_token)
    for num_tokens in (*range(12), 31, 32, 33, 63, 127, 128, 129, 130):
        run = slice_tokens(whole, 0, num_tokens)
        payload = codec.encode(run, layout, first_token)
        out = restored(codec, payload, layout, num_tokens, first_token)
        sinks = min(max(4 - first_token, 0), num_tokens)
        for before, after in zip(arrays(run), arrays(out), strict=True):
            assert np.array_equal(before[:, :sinks], after[:, :sinks])
            assert np.isfinite(values_of(after, layout.dtype)).all()


@in_bf16
def test_payloads_may_lie_anywhere_in_memory(codec, layout):
    payload = codec.encode(rows_of(layout, 40), layout, 0)
    expected = arrays(restored(codec, payload, layout, 40))
    for offset in (1, 3):
        shifted = memoryview(bytearray(b"x" * offset + payload + b"y"))[offset:-1]
        got = arrays(restored(codec, shifted, layout, 40))
        assert all(map(np.array_equal, got, expected))


@pytest.mark.slow
@with_layouts(["float32"])
def test_threads_do_not_disturb_each_other(codec, layout):
    runs = [rows_of(layout, 128, 128, seed) for seed in range(4)]
    payloads = [codec.encode(run, layout, 128) for run in runs]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(codec.encode, run, layout, 128) for run in runs * 3]
        assert [job.result() for job in jobs] == payloads * 3
        outs = list(pool.map(lambda p: restored(codec, p, layout, 128, 128), payloads * 3))
    for out, payload in zip(outs, payloads * 3, strict=True):
        expected = restored(codec, payload, layout, 128, 128)
        assert all(map(np.array_equal, arrays(out), arrays(expected)))


@in_a_narrow_layer
def test_codecs_cannot_be_changed(codec):
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.id = "other"
