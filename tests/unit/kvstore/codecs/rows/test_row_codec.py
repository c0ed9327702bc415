"""The payload: its parts, the restored rows, and the payloads that are refused."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.floats import from_stored, to_stored
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec, tq3
from kvstore.codecs.rows.row_format import PlainRows
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, KVLayer, KVLayout
from tests.unit.kvstore.codecs.samples import layout_of, run_of, values_of

CODECS = [
    RowCodec("tq3.2", RotatedRows(3), reference_kernel),
    RowCodec("tq4.2", RotatedRows(4), reference_kernel),
    RowCodec("lm3.1", PlainRows(), reference_kernel),
]
layers = st.builds(
    KVLayer, st.integers(1, 3), st.sampled_from([16, 32, 64, 80]), st.sampled_from([16, 24, 64])
)
layouts = st.builds(
    KVLayout,
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.lists(layers, max_size=3).map(tuple),
)
special = st.sampled_from([0.0, -0.0, 1e-45, 1e-30, 1e-6, 1e5, 3e38, np.inf, -np.inf, np.nan])


def as_dtype(value, dtype):
    with np.errstate(all="ignore"):
        array = np.array([value], np.float32)
        if dtype == "bfloat16":
            return to_stored(array, "float32")[0]
        return array.astype(NUMPY_DTYPES[dtype])[0]


@st.composite
def runs(draw):
    """A layout, a run of it with rows that cannot be packed, and its position."""
    layout = draw(layouts)
    run = run_of(layout, draw(st.integers(0, 12)), seed=draw(st.integers(0, 99)))
    rows = [array.reshape(-1, array.shape[2]) for pair in run for array in pair if array.size]
    for row in draw(st.lists(st.sampled_from(rows), max_size=4)) if rows else ():
        row[draw(st.integers(0, len(row) - 1))] = as_dtype(draw(special), layout.dtype)
    return layout, run, draw(st.integers(0, 6))


def restored(codec, payload, layout, num_tokens, first_token):
    out = layout.empty(num_tokens)
    codec.decode(memoryview(payload), layout, first_token, out)
    return out


def num_tokens_of(run):
    return run[0][0].shape[1] if run else 0


@given(runs(), st.sampled_from(CODECS))
def test_sinks_and_rows_that_cannot_be_packed_come_back_exactly(sample, codec):
    layout, run, first_token = sample
    payload = codec.encode(run, layout, first_token)
    out = restored(codec, payload, layout, num_tokens_of(run), first_token)
    num_sinks = max(NUM_SINKS - first_token, 0)
    plan = plan_payload(codec.rows, layout, num_tokens_of(run), first_token)
    view = np.frombuffer(payload, np.uint8)
    arrays, outs = ([x for pair in pairs for x in pair] for pairs in (run, out))
    for array, got, slot in zip(arrays, outs, plan.slots, strict=True):
        exact = from_stored(to_stored(array, layout.dtype), layout.dtype)
        bits, got_bits = exact.view(np.uint8), got.view(np.uint8)
        assert np.array_equal(got_bits[:, :num_sinks], bits[:, :num_sinks])
        kept = slot.scales(view).reshape(slot.num_heads, slot.num_tokens) == 0
        assert np.array_equal(got_bits[:, num_sinks:][kept], bits[:, num_sinks:][kept])
        # Processors convert a NaN differently, so no bytes of it may remain.
        assert not slot.packed(view)[kept.reshape(-1)].any()
        assert np.isfinite(values_of(got, layout.dtype)[:, num_sinks:][~kept]).all()


@given(runs(), st.sampled_from(CODECS), st.data())
def test_a_damaged_payload_is_refused_or_harmless(sample, codec, data):
    layout, run, first_token = sample
    payload = bytearray(codec.encode(run, layout, first_token))
    num_tokens = num_tokens_of(run)
    cut = data.draw(st.integers(0, len(payload)))
    if cut < len(payload):
        with pytest.raises(Corrupt):
            restored(codec, payload[:cut], layout, num_tokens, first_token)
    with pytest.raises(Corrupt):
        restored(codec, payload + b"x", layout, num_tokens, first_token)
    for _ in range(data.draw(st.integers(1, 8)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(Corrupt):
        restored(codec, payload, layout, num_tokens, first_token)


def test_nothing_is_written_before_the_payload_is_checked():
    codec, layout = tq3(), layout_of(64)
    payload = codec.encode(run_of(layout, 8), layout, 0)
    out = run_of(layout, 8, seed=5)
    before = [array.copy() for pair in out for array in pair]
    with pytest.raises(Corrupt, match="bytes"):
        codec.decode(memoryview(payload)[:-1], layout, 0, out)
    assert all(map(np.array_equal, (array for pair in out for array in pair), before))


def test_a_scale_that_was_never_written_is_refused():
    codec, layout = tq3(), layout_of(64)
    payload = bytearray(codec.encode(run_of(layout, 8), layout, 100))
    payload[0:2] = b"\x00\x7c"  # infinity
    with pytest.raises(Corrupt, match="scale"):
        codec.decode(memoryview(payload), layout, 100, layout.empty(8))
    payload[0:2] = b"\x00\x00"  # would claim one more kept row
    with pytest.raises(Corrupt, match="expected"):
        codec.decode(memoryview(payload), layout, 100, layout.empty(8))


def test_a_run_that_is_not_of_the_layout_is_a_defect_of_the_caller():
    codec, layout = tq3(), layout_of(64)
    wrong_dtype = [tuple(x.astype(np.float32) for x in pair) for pair in run_of(layout, 8)]
    for run in (run_of(layout_of(32), 8), run_of(layout, 8) * 2, wrong_dtype):
        with pytest.raises(ValueError, match="where the layout"):
            codec.encode(run, layout, 0)


def test_dimensions_that_cannot_be_rotated_are_refused_with_a_way_out():
    with pytest.raises(UnknownCodec, match="184 values; use codec raw"):
        tq3().check(KVLayout("bfloat16", (KVLayer(1, 64, 64), KVLayer(1, 64, 184))))
