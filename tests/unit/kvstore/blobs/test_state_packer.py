"""States taken apart: windows' rows leave and come back, marked matrices lose little."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blobs.state_packer import (
    pack_matrices,
    unpack_matrices,
    window_arrays,
    with_windows,
    without_windows,
)
from kvstore.blobs.state_tree import (
    MatrixArray,
    StateArray,
    StateTree,
    WindowArray,
    arrays_of,
    decode_state,
    encode_state,
)
from kvstore.codecs.states import EXACT_STATES, matrix_codec
from kvstore.errors import Corrupt, ForeignCodec
from kvstore.shapes import KVLayer, KVLayout

LAYOUT = KVLayout("float32", (KVLayer(2, 32, 32), KVLayer(1, 32, 32)))
CODEC = matrix_codec("state8")


def rows(num_tokens: int) -> list[np.ndarray]:
    """K and V of both layers."""
    random = np.random.default_rng(num_tokens)
    shapes = [(1, heads, num_tokens, 32) for heads in (2, 2, 1, 1)]
    return [random.standard_normal(x).astype(np.float32) for x in shapes]


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


def arrays_in(state: StateTree) -> list[np.ndarray]:
    return [x.array for x in arrays_of(state)]


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_windows_leave_a_state_and_come_back(num_tokens: int) -> None:
    state = tree(rows(num_tokens))
    rest, run = without_windows(state, LAYOUT)
    assert run is not None and len(arrays_in(rest)) == 2
    assert [x.shape for pair in run for x in pair] == [(h, num_tokens, 32) for h in (2, 2, 1, 1)]
    back = with_windows(through_bytes(rest), run)
    for found, exact in zip(arrays_in(back), arrays_in(state), strict=True):
        assert np.array_equal(found, exact)


def test_matrices_come_back_nearly_and_all_else_exactly() -> None:
    state = tree(rows(3))
    packed = pack_matrices(state, CODEC)
    assert encode_state(packed) == encode_state(pack_matrices(state, CODEC))
    found = unpack_matrices(through_bytes(packed), [CODEC.id])
    for back, exact in zip(arrays_in(found), arrays_in(state), strict=True):
        is_matrix = exact.shape == (1, 2, 4, 8)
        assert np.array_equal(back, exact) != is_matrix
        np.testing.assert_allclose(back, exact, atol=0.02)


def test_an_exact_codec_changes_nothing() -> None:
    state = tree(rows(57))
    assert encode_state(pack_matrices(state, EXACT_STATES)) == encode_state(state)
    assert len(window_arrays(state)) == 4


def test_windows_of_another_layout_or_of_unequal_length_stay_in_the_state() -> None:
    unequal = rows(50)
    unequal[2] = unequal[2][:, :, 1:]
    one = KVLayout("float32", LAYOUT.layers[:1])
    half = KVLayout("float16", LAYOUT.layers)
    found = [(tree(unequal), LAYOUT), *((tree(rows(50)), x) for x in (one, half, None))]
    for state, layout in found:
        rest, run = without_windows(state, layout)
        assert rest is state and run is None


def test_codecs_that_are_not_known_are_refused() -> None:
    packed = through_bytes(pack_matrices(tree(rows(3)), CODEC))
    with pytest.raises(ForeignCodec):
        unpack_matrices(packed, [])


def test_rows_that_a_state_names_and_does_not_have_are_damage() -> None:
    rest, run = without_windows(tree(rows(3)), LAYOUT)
    assert run is not None
    with pytest.raises(Corrupt):
        with_windows(rest, run[:1])
    for number in (-1, 4, 1 << 70, "0", None):
        with pytest.raises(Corrupt):
            with_windows({"\0window": number, "dtype": "float32"}, run)
    with pytest.raises(Corrupt):
        with_windows({"\0window": 0}, run)


@given(st.data())
def test_damage_is_never_more_than_an_error(data: st.DataObject) -> None:
    rest, run = without_windows(tree(rows(3)), LAYOUT)
    assert run is not None
    payload = bytearray(encode_state(pack_matrices(rest, CODEC)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(payload), 700) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    with suppress(Corrupt, ForeignCodec):
        with_windows(unpack_matrices(decode_state(memoryview(payload)), [CODEC.id]), run)


@pytest.mark.parametrize("shape", [[1 << 36, 1 << 36], [-1, 8], [True, 8], [0.5], "x"])
def test_a_small_blob_cannot_ask_for_a_lot_of_memory(shape: object) -> None:
    payload = StateArray("uint8", np.zeros(64, np.uint8))
    node = {"\0matrix": CODEC.id, "dtype": "float32", "shape": shape, "payload": payload}
    with pytest.raises(Corrupt):
        unpack_matrices(node, [CODEC.id])  # type: ignore[arg-type]
