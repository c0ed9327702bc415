"""Checks that every fused codec has to pass beside its pipeline."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from kvstore.codecs.base import Codec
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVPair, KVRun, slice_tokens
from tests.unit.kvstore.codecs.samples import run_of


def arrays(run: KVRun) -> list[np.ndarray]:
    return [x for pair in run for x in pair]


def raw(run: KVRun) -> list[bytes]:
    return [array.tobytes() for array in arrays(run)]


def restored(
    codec: Codec, payload: bytes, layout: KVLayout, num_tokens: int, first_token: int
) -> list[KVPair]:
    """Decodes into zeros, so that values that are not written show."""
    out = layout.empty(num_tokens)
    for array in arrays(out):
        array.fill(0)
    codec.decode(memoryview(payload), layout, first_token, out)
    return out


def same_as_pieces(
    codec: Codec, pieces: Codec, run: KVRun, layout: KVLayout, first_token: int
) -> list[KVPair]:
    """What comes back of a run, which both pack and restore alike."""
    payload, num_tokens = codec.encode(run, layout, first_token), run[0][0].shape[1]
    assert payload == pieces.encode(run, layout, first_token)
    outs = [restored(x, payload, layout, num_tokens, first_token) for x in (codec, pieces)]
    assert raw(outs[0]) == raw(outs[1])
    return outs[0]


def assert_views_are_filled(codec: Codec, pipeline: Codec, layout: KVLayout) -> None:
    """And nothing beside them; from a payload at an odd address."""
    out = layout.empty(300)
    payload = codec.encode(slice_tokens(run_of(layout, 300), 100, 228), layout, 100)
    for array in arrays(out):
        array.fill(1)
    codec.decode(memoryview(b"x" + payload)[1:], layout, 100, slice_tokens(out, 100, 228))
    expected = restored(pipeline, payload, layout, 128, 100)
    for array, want in zip(arrays(out), arrays(expected), strict=True):
        assert np.array_equal(array[:, 100:228], want)
        assert (array[:, :100] == 1).all() and (array[:, 228:] == 1).all()


def assert_damage_does_the_same(
    data: st.DataObject, codec: Codec, pipeline: Codec, layout: KVLayout
) -> None:
    """It is found, or gives other values: the same ones both ways."""
    num_tokens = data.draw(st.integers(1, 80))
    payload = bytearray(codec.encode(run_of(layout, num_tokens), layout, 0))
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=8)):
        payload[at] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(payload)) | st.just(len(payload)))
    outcomes: list[list[bytes] | None] = []
    for one in (codec, pipeline):
        try:
            outcomes.append(raw(restored(one, bytes(payload[:length]), layout, num_tokens, 0)))
        except Corrupt:
            outcomes.append(None)
    assert outcomes[0] == outcomes[1]
