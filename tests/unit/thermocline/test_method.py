"""Every method on plain arrays: sizes, sides, odd dimensions, bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thermocline
from kvstore.codecs.floats import narrow
from tests.unit.kvstore.codecs.samples import cosine, layout_of, run_of, uneven
from tests.unit.thermocline.methods import in_numpy
from thermocline import Corrupt, KVLayer, KVLayout, Mismatch, Packed

NAMES = [name for name, info in thermocline.codecs().items() if not info.needs_profile]
VARIED = {
    "tq:bits=2": 2.125,
    "tqprod:bits=2": 2.25,
    "tqprod:bits=4": 4.25,
    "rvq:bits=2": 4.125,
    "rvq:bits=3": 6.125,
    "kivi:bits=4": 5,
    "kivi:bits=4,group=64": 4.5,
    "vecinfer:bits=1": 1.1875,
    "playground:key_bits=4,value_bits=4,group=64": 4.3125,
    "qjl:signs=256": 2.5625,
    "qjl:signs=100": 1.953,
}
ROWS = ("lm3", "tq3", "tq4", "tq1", "tq8", "manthan")
PAST_SINKS = 1 << 20


@pytest.mark.parametrize("name", NAMES)
def test_one_side_is_packed_as_beside_the_other(name):
    method, layout = in_numpy(name), layout_of(64)
    run = run_of(layout, 40)
    packed = method.pack_run(run)
    both = method.restore_run(packed)
    assert packed.nbytes == method.nbytes(40, layout)
    for side, rows, whole in zip(("key", "value"), run[0], both[0], strict=True):
        one = method.pack(rows, side)
        restored = method.restore(one)
        assert one.nbytes < packed.nbytes and one.num_tokens == 40
        assert np.array_equal(restored, whole)
        out = np.empty_like(rows)
        assert method.restore(one, out=out) is out and np.array_equal(out, whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [1, 100, 130])
def test_any_dimension_is_packed(name, dim):
    method, rows = in_numpy(name), uneven((2, 24, dim))
    packed = method.pack(rows, first_token=PAST_SINKS)
    restored = method.restore(packed)
    assert restored.shape == rows.shape and restored.dtype == rows.dtype
    assert packed.nbytes == method.nbytes(24, KVLayout("float32", (KVLayer(2, dim, 0),)), 1 << 20)
    if dim > 1:  # signs alone keep little of rows of uneven channels
        assert cosine(rows, restored) > (0.35 if name == "qjl" else 0.6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_come_back_as_they_went_in(dtype):
    rows = uneven((2, 40, 64))
    rows = rows if dtype == "float32" else narrow(rows, dtype)
    method = thermocline.codec("tq3")
    assert method.restore(method.pack(rows, "value")).dtype == rows.dtype


@pytest.mark.parametrize("name", VARIED)
def test_parameters_change_the_bits_and_rows_come_back(name):
    method, rows = in_numpy(name), uneven((2, 40, 64))
    assert method.bits() == pytest.approx(VARIED[name], abs=0.01)
    for side in ("key", "value"):
        packed = method.pack(rows, side, first_token=4)
        assert cosine(rows, method.restore(packed)) > (0.35 if side == "key" else 0.6)


def test_more_bits_lose_less():
    rows = uneven((2, 64, 64))

    def error(name, **parameters):
        method = in_numpy(name, **parameters)
        return np.mean((method.restore(method.pack(rows, first_token=4)) - rows) ** 2)

    for name, key, values in (
        ("tq", "bits", range(1, 9)),
        ("kivi", "bits", (1, 2, 4, 8)),
        ("tqprod", "bits", (2, 3, 4)),
        ("rvq", "bits", (1, 2, 3)),
        ("playground", "key_bits", (2, 4, 6)),
        ("qjl", "signs", (64, 256, 1024)),
        ("vecinfer", "bits", (1, 2)),
    ):
        errors = [error(name, **{key: value}) for value in values]
        assert errors == sorted(errors, reverse=True), name


def test_parameters_by_name_or_in_the_name_are_the_same():
    assert thermocline.codec("tq", bits=4).id == thermocline.codec("tq4").id
    assert (
        thermocline.codec("kivi", bits=4, group=64).id
        == thermocline.codec("kivi:group=64,bits=4").id
    )
    with pytest.raises(thermocline.UnknownCodec, match="no parameter 'bit'; there are bits"):
        thermocline.codec("kivi", bit=4)
    assert [x.name for x in thermocline.codecs()["kivi"].parameters] == ["bits", "group"]


def test_numpy_is_the_definition_of_the_compiled_kernels():
    rows = uneven((3, 50, 128))
    for name in ("tq3", "tq4"):
        fast, plain = thermocline.codec(name), thermocline.codec(name, backend="numpy")
        assert fast.pack(rows).tobytes() == plain.pack(rows).tobytes()
    with pytest.raises(ValueError, match="no choice of backends"):
        thermocline.codec("kivi", backend="numpy")
    with pytest.raises(ValueError, match="neither 'auto' nor"):
        thermocline.codec("tq3", backend="metal")


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_their_parts_by_name(name):
    method, rows = thermocline.codec(name), uneven((2, 30, 64))
    parts = method.pack(rows).arrays
    assert parts["first_tokens"].shape == (2, 4, 64)
    assert parts["scales"].shape == (2, 26) and parts["codes"].shape[:2] == (2, 26)


def test_other_methods_rows_are_refused():
    packed = thermocline.codec("tq3").pack(uneven((1, 8, 64)))
    with pytest.raises(Mismatch, match=r"packed by tq3\.\d, not by tq4\.\d"):
        thermocline.codec("tq4").restore(packed)
    with pytest.raises(Mismatch, match="not by"):
        thermocline.codec("tq4").frombytes(packed.tobytes())


def test_wrong_arguments_are_refused_with_the_right_ones():
    method = thermocline.codec("tq3")
    for wrong, why in (
        (np.zeros((2, 64), np.float32), "heads, tokens, dim"),
        (np.zeros((2, 4, 64), np.float64), "float32, float16, or uint16"),
    ):
        with pytest.raises(ValueError, match=why):
            method.pack(wrong)
    with pytest.raises(ValueError, match="neither 'key' nor 'value'"):
        method.pack(np.zeros((2, 4, 64), np.float32), "both")
    with pytest.raises(ValueError, match="without layers"):
        method.pack_run([])
    with pytest.raises(Mismatch, match="use restore_run"):  # so may a file that was made up be
        method.restore(method.pack_run(run_of(layout_of(64), 8)))


@pytest.mark.parametrize("name", ["raw", "tq3", "kivi", "qjl"])
def test_bytes_travel_and_come_back(name):
    method = thermocline.codec(name)
    packed = method.pack(uneven((2, 20, 64)), "value", first_token=7)
    again = method.frombytes(packed.tobytes())
    fields = ("codec_id", "layout", "first_token", "num_tokens", "nbytes")
    assert [getattr(again, x) for x in fields] == [getattr(packed, x) for x in fields]
    assert again.tobytes() == packed.tobytes()
    assert np.array_equal(method.restore(again), method.restore(packed))
    assert sorted(again.arrays) == sorted(packed.arrays)


SAMPLE = in_numpy("tq3").pack(uneven((1, 12, 64))).tobytes()


@given(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255))
def test_a_changed_byte_is_never_read(place, change):
    damaged = bytearray(SAMPLE)
    damaged[place] ^= change
    with pytest.raises((Corrupt, Mismatch)):
        thermocline.codec("tq3").frombytes(bytes(damaged))


@given(st.integers(0, len(SAMPLE)), st.binary(max_size=8))
def test_other_lengths_are_never_read(length, more):
    data = SAMPLE[:length] + more
    if data != SAMPLE:
        with pytest.raises((Corrupt, Mismatch)):
            Packed.frombytes(data)


def test_a_forged_size_gets_no_memory():
    packed = thermocline.codec("tq3").pack(uneven((1, 12, 64)))
    forged = Packed(packed.codec_id, packed.layout, 0, 1 << 31, packed.payload)
    with pytest.raises(Corrupt, match="fewer than"):
        thermocline.codec("tq3").restore(forged)
