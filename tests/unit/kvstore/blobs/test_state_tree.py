from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst

from kvstore.blobs.state_tree import MAX_DEPTH, StateArray, decode_state, encode_state, state_nbytes
from kvstore.errors import Corrupt
from tests.kv_sessions import trees_equal

DTYPES = ["bool", "float16", "float32", "float64", "complex64", "int8", "int64", "uint8", "uint32"]


@st.composite
def state_arrays(draw) -> StateArray:
    name = draw(st.sampled_from([*DTYPES, "bfloat16"]))
    dtype = np.dtype(np.uint16 if name == "bfloat16" else name)
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    return StateArray(name, draw(npst.arrays(dtype, shape)))


numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
leaves = st.none() | st.booleans() | numbers | st.text() | state_arrays()
trees = st.recursive(
    leaves,
    lambda x: st.lists(x) | st.lists(x).map(tuple) | st.dictionaries(st.text(), x),
    max_leaves=8,
)
TREE = [{"conv": StateArray("float32", np.ones((2, 3), np.float32)), "n": 7}, (None, True, 0.5)]


@given(trees)
def test_a_tree_comes_back_bit_for_bit(tree):
    assert trees_equal(decode_state(memoryview(encode_state(tree))), tree)


@given(st.binary(max_size=200))
def test_other_bytes_are_corrupt(noise):
    with pytest.raises(Corrupt):
        decode_state(memoryview(noise + b"\xff"))


plain = st.none() | st.booleans() | st.integers(0, 5) | st.just("float32") | st.binary(max_size=4)


@given(st.recursive(plain, lambda x: st.lists(x, max_size=4), max_leaves=8))
def test_a_foreign_structure_gives_corrupt_or_some_tree(structure):
    with contextlib.suppress(Corrupt):
        decode_state(payload_of(structure))


def payload_of(structure: object) -> memoryview:
    raw = msgspec.msgpack.encode(structure)
    return memoryview(len(raw).to_bytes(8, "little") + raw + bytes(256))


SHAPES: list[object] = [[1 << 62], [-1], [0, 1 << 63], [1] * 9, [True], 1]
ABSURD = [
    *([3, dtype, [1], 0] for dtype in ("object", "<U9")),
    *([3, "float32", shape, 0] for shape in SHAPES),
    *([3, "float32", [1], place] for place in (-4, 1 << 40)),
    *([3, "float32"], [4, []], [2, [["a"]]], [2, [[1, 2]]], [], {}),
]


@pytest.mark.parametrize("array", ABSURD)
def test_absurd_nodes_are_corrupt(array):
    with pytest.raises(Corrupt):
        decode_state(payload_of(array))


def test_a_small_payload_cannot_ask_for_much_memory():
    same_bytes_again = [0, [[3, "uint8", [200], 0]] * 1000]
    with pytest.raises(Corrupt, match="outside"):
        decode_state(payload_of(same_bytes_again))


def test_depth_is_bounded_both_ways():
    deep: object = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ValueError, match="too deep"):
        encode_state(deep)
    raw = b"\x92\x00\x91" * 100_000 + b"\x01"
    with pytest.raises(Corrupt):
        decode_state(memoryview(len(raw).to_bytes(8, "little") + raw))


NOT_KEPT = {
    "float32": np.zeros(2),
    "bfloat16": np.zeros(2, np.float32),
    "object": np.array([None]),
    "datetime64": np.array([0], "M8[s]"),
}
ARRAYS = [StateArray(*x) for x in NOT_KEPT.items()]


@pytest.mark.parametrize("tree", [{1: 2}, {"a": b"bytes"}, [object()], *ARRAYS])
def test_a_tree_that_cannot_be_kept_exactly_is_refused(tree):
    with pytest.raises(TypeError):
        encode_state(tree)


def test_bytes_are_counted():
    assert state_nbytes(TREE) == 24
    assert state_nbytes({"a": (None, StateArray("bool", np.zeros(5, bool)))}) == 5


def test_views_of_any_strides_are_kept():
    array = np.arange(24, dtype=np.int64).reshape(4, 6)[::2, ::-3]
    (back,) = decode_state(memoryview(encode_state([StateArray("int64", array)])))
    assert np.array_equal(back.array, array)
