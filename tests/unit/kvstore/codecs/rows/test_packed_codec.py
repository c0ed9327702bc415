"""Runs that an engine keeps packed: same payload as the codec's own, nothing packed twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs import floats
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_codec import packed_codec
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import DType, KVLayer, KVLayout, KVPair

LAYERS = (KVLayer(2, 64, 64), KVLayer(1, 64, 128))
DTYPES: list[DType] = ["bfloat16", "float16", "float32"]
CODECS = {3: codec_by_name("tq3"), 4: codec_by_name("tq4")}


def layouts(dtype: DType, num_bits: int) -> tuple[KVLayout, PackedLayout]:
    return KVLayout(dtype, LAYERS), PackedLayout(dtype=dtype, layers=LAYERS, num_bits=num_bits)


def some_run(layout: KVLayout, num_tokens: int, strange: bool = False) -> list[KVPair]:
    """Makes values that 16 bits hold. ``strange``: rows that cannot be packed, too."""
    rng = np.random.default_rng(num_tokens)
    run = layout.empty(num_tokens)
    for pair in run:
        for array in pair:
            values = rng.standard_normal(array.shape).astype(np.float32)
            if strange and num_tokens > 20:
                values[0, 11] = 0
                values[0, 17, 3] = np.nan
            array[...] = floats.narrow(values, layout.dtype)
    return run


def packed_run(
    run: list[KVPair], layout: KVLayout, packed: PackedLayout, first: int, last: int
) -> list[KVPair]:
    """Makes the arrays of an engine that has packed tokens ``first .. last``, and no others."""
    out = packed.empty(run[0][0].shape[1])
    for (keys, values), (to_keys, to_values) in zip(run, out, strict=True):
        for source, target in ((keys, to_keys), (values, to_values)):
            target[...] = source
            if first == last:
                continue
            stored = floats.to_stored(source[:, first:last], layout.dtype)
            rows = floats.widen(stored, layout.dtype).reshape(-1, source.shape[2])
            codes, scales = packed.rows.pack(rows)
            shape = stored.shape[:2]
            target.codes[:, first:last] = codes.reshape(*shape, -1)
            target.scales[:, first:last] = scales.reshape(shape)
    return out


@pytest.mark.parametrize("num_bits", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_payload_is_the_codecs_own(dtype, num_bits, data):
    plain, layout = layouts(dtype, num_bits)
    num_tokens = data.draw(st.integers(1, 40))
    first_token = data.draw(st.sampled_from([0, 2, 128]))
    sinks = min(max(4 - first_token, 0), num_tokens)
    first = data.draw(st.integers(sinks, num_tokens))
    last = data.draw(st.integers(first, num_tokens))
    strange = data.draw(st.booleans())
    run = some_run(plain, num_tokens, strange)
    codec = CODECS[num_bits]
    expected = codec.encode(run, plain, first_token)
    aware = packed_codec(codec, layout)
    live = packed_run(run, plain, layout, first, last)
    assert aware.encode(live, layout, first_token) == expected
    woken = layout.empty(num_tokens)
    aware.decode(memoryview(expected), layout, first_token, woken)
    unpacked = plain.empty(num_tokens)
    codec.decode(memoryview(expected), plain, first_token, unpacked)
    for got, right in zip(woken, unpacked, strict=True):
        for a, b in zip(got, right, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b.view(np.uint8))
            assert strange or (a.scales[:, sinks:] != 0).all()  # packed rows stay packed
    assert aware.encode(woken, layout, first_token) == expected


@pytest.mark.parametrize("cut", [1, 100])
def test_a_short_payload_is_refused(cut):
    plain, layout = layouts("bfloat16", 3)
    aware = packed_codec(CODECS[3], layout)
    payload = aware.encode(packed_run(some_run(plain, 32), plain, layout, 4, 32), layout, 0)
    with pytest.raises(Corrupt):
        aware.decode(memoryview(payload)[:-cut], layout, 0, layout.empty(32))


def test_packed_first_tokens_are_a_defect_that_is_noticed():
    plain, layout = layouts("bfloat16", 3)
    run = packed_run(some_run(plain, 16), plain, layout, 0, 8)
    with pytest.raises(ValueError, match="first tokens"):
        packed_codec(CODECS[3], layout).encode(run, layout, 0)


def test_only_the_same_arithmetic_keeps_it_cold():
    _, layout = layouts("bfloat16", 3)
    assert packed_codec(codec_by_name("dense3"), layout).id == "dense3.2"
    for name in ("raw", "lm3", "tq4"):
        with pytest.raises(UnknownCodec, match="tq3"):
            packed_codec(codec_by_name(name), layout)
