"""Packed states: marked arrays lose little, others nothing, and no row is packed twice."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blobs.segments import Lineage
from kvstore.blobs.state_packer import KEPT, StatePacker, window_arrays
from kvstore.blobs.state_tree import (
    MatrixArray,
    StateArray,
    StateTree,
    WindowArray,
    decode_state,
    encode_state,
)
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import EXACT_STATES, matrix_codec
from kvstore.errors import Corrupt, ForeignCodec
from kvstore.shapes import KVLayer, KVLayout

LAYOUT = KVLayout("float32", (KVLayer(2, 32, 32), KVLayer(1, 32, 32)))
ROWS = codec_by_name("tq4")
CODEC = SessionCodec(ROWS, ROWS, matrix_codec("state8"))
PACKER = StatePacker(LAYOUT, {ROWS.id: ROWS}, [CODEC.matrices.id])


def rows(first: int, last: int) -> list[np.ndarray]:
    """K and V of both layers, of tokens that always have the same ones."""
    found = []
    for number, (heads, dim) in enumerate([(2, 32), (2, 32), (1, 32), (1, 32)]):
        per_token = [
            np.random.default_rng((number, token)).standard_normal((heads, dim))
            for token in range(first, last)
        ]
        found.append(np.stack(per_token, 1)[None].astype(np.float32))
    return found


def tree(arrays: list[np.ndarray]) -> StateTree:
    marked = [WindowArray("float32", x, i) for i, x in enumerate(arrays)]
    matrices = np.random.default_rng(5).standard_normal((1, 2, 4, 8)).astype(np.float32)
    conv = StateArray("float32", np.arange(12, dtype=np.float32).reshape(1, 3, 4))
    return [
        ("Rotating", (*marked[:2], 7, 4)),
        ("Arrays", ([conv, MatrixArray("float32", matrices)], None)),
        ("Rotating", (*marked[2:], 7, 4)),
    ]


def through_bytes(packed: StateTree) -> StateTree:
    return decode_state(memoryview(encode_state(packed)))


def arrays_in(node: StateTree) -> list[np.ndarray]:
    if isinstance(node, StateArray):
        return [node.array]
    if isinstance(node, dict):
        return [x for v in node.values() for x in arrays_in(v)]
    return [x for v in node for x in arrays_in(v)] if isinstance(node, list | tuple) else []


def windows_of(state: StateTree) -> list[np.ndarray]:
    """K and V of both layers in a state that was unpacked, which has no marks."""
    found = arrays_in(state)
    return [*found[:2], *found[4:]]


@settings(deadline=None)  # kernels are compiled by the first
@given(st.integers(1, 300), st.integers(0, 400))
def test_rows_come_back_nearly_and_all_else_exactly(num_tokens: int, start: int) -> None:
    position = start + num_tokens
    state = tree(rows(start, position))
    packed = through_bytes(PACKER.pack(CODEC, state, position))
    assert encode_state(PACKER.pack(CODEC, state, position)) == encode_state(packed)
    found = PACKER.unpack(packed)
    for exact, back in zip(rows(start, position), windows_of(found), strict=True):
        assert back.shape == exact.shape and back.dtype == exact.dtype
        # The error of a single row may be several times the average.
        most = 0.1 if num_tokens < 8 else 0.03
        assert np.square(back - exact).sum() < most * np.square(exact).sum()
    conv, matrix = arrays_in(found)[2:4]
    assert np.array_equal(conv, np.arange(12, dtype=np.float32).reshape(1, 3, 4))
    exact_matrix = arrays_in(state)[3]
    assert not np.array_equal(matrix, exact_matrix)
    np.testing.assert_allclose(matrix, exact_matrix, atol=0.02)


def test_rows_that_were_packed_keep_their_bytes() -> None:
    window, codec = 200, CODEC
    first = through_bytes(PACKER.pack(codec, tree(rows(50, 250)), 250))
    woken = windows_of(PACKER.unpack(first))
    lineage = Lineage(250, PACKER.segments_of(first))
    # 70 tokens later the window is of older rows that came back, and of new ones.
    fresh = rows(250, 320)
    mixed = [
        np.concatenate([old[:, :, 70:], new], 2) for old, new in zip(woken, fresh, strict=True)
    ]
    second = through_bytes(PACKER.pack(codec, tree(mixed), 320, lineage))
    again = windows_of(PACKER.unpack(second))
    for back, old in zip(again, woken, strict=True):
        assert back.shape[2] == window
        assert np.array_equal(back[:, :, :130], old[:, :, 70:])  # not once more through the codec
    known = {x.payload.tobytes() for x in lineage.segments}
    kept = [x for x in PACKER.segments_of(second) if x.payload.tobytes() in known]
    assert {x.codec_id for x in kept} == {ROWS.id}
    assert kept[0].first <= 120 and kept[-1].end == 250


def test_rows_whose_packed_form_is_gone_are_kept_as_they_are() -> None:
    first = through_bytes(PACKER.pack(CODEC, tree(rows(0, 100)), 100))
    woken = windows_of(PACKER.unpack(first))
    second = through_bytes(PACKER.pack(CODEC, tree(woken), 100, Lineage(100)))
    assert [(x.first, x.num_tokens, x.codec_id) for x in PACKER.segments_of(second)] == [
        (0, 100, KEPT)
    ]
    for back, old in zip(windows_of(PACKER.unpack(second)), woken, strict=True):
        np.testing.assert_array_equal(back, old)
    # And so are matrices at the very position of the copy that they came from.
    state = tree(rows(0, 100))
    exact = PACKER.unpack(through_bytes(PACKER.pack(CODEC, state, 100, Lineage(100))))
    assert np.array_equal(arrays_in(exact)[3], arrays_in(state)[3])


def test_an_exact_codec_changes_nothing() -> None:
    codec = SessionCodec(codec_by_name("raw"), None, EXACT_STATES)
    state = tree(rows(3, 60))
    assert encode_state(PACKER.pack(codec, state, 60)) == encode_state(state)
    assert len(window_arrays(state)) == 4


def test_windows_of_unequal_length_stay_exact() -> None:
    arrays = rows(0, 50)
    arrays[2] = arrays[2][:, :, 1:]
    packed = through_bytes(PACKER.pack(CODEC, tree(arrays), 50))
    for back, exact in zip(windows_of(PACKER.unpack(packed)), arrays, strict=True):
        assert np.array_equal(back, exact)


def test_codecs_that_are_not_known_are_refused() -> None:
    packed = through_bytes(PACKER.pack(CODEC, tree(rows(0, 50)), 50))
    for other in (
        StatePacker(LAYOUT, {}, [CODEC.matrices.id]),
        StatePacker(LAYOUT, {ROWS.id: ROWS}, []),
    ):
        with pytest.raises(ForeignCodec):
            other.unpack(packed)
    with pytest.raises(Corrupt):
        StatePacker(None, {ROWS.id: ROWS}, [CODEC.matrices.id]).unpack(packed)


@settings(deadline=None)
@given(st.data())
def test_damage_is_never_more_than_an_error(data: st.DataObject) -> None:
    payload = bytearray(encode_state(PACKER.pack(CODEC, tree(rows(10, 60)), 60)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(payload), 700) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    with suppress(Corrupt, ForeignCodec):
        PACKER.unpack(decode_state(memoryview(payload)))


@pytest.mark.parametrize("facts", [[10, 60], [60, 0], [60, 51], [60], [60, 1 << 40], "x"])
def test_facts_that_contradict_themselves_are_refused(facts: list[int]) -> None:
    packed = through_bytes(PACKER.pack(CODEC, tree(rows(10, 60)), 60))
    assert isinstance(packed, dict)
    packed["\0windows"] = facts
    with pytest.raises(Corrupt):
        PACKER.unpack(packed)


def test_a_small_blob_cannot_ask_for_a_lot_of_memory() -> None:
    packed = through_bytes(PACKER.pack(CODEC, tree(rows(10, 60)), 60))
    assert isinstance(packed, dict)
    (segment,) = packed["segments"]  # type: ignore[misc]
    assert isinstance(segment, list)
    segment[:2] = [0, 1 << 36]
    packed["\0windows"] = [1 << 36, 1 << 36]
    with pytest.raises(Corrupt):
        PACKER.unpack(packed)
