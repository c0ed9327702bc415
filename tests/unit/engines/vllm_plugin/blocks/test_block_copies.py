"""Compiled copies against numpy's, for all shapes and orders of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.vllm_plugin.blocks.block_copies import BlockCopies

NUM_BLOCKS = 9


def side(heads: int, tokens: int, dim: int, transposed: bool, dtype: Any) -> np.ndarray:
    """(num_blocks, heads, tokens, dim), in memory that it shares with another side."""
    axes = (dim, tokens) if transposed else (tokens, dim)
    halves = np.zeros((NUM_BLOCKS, heads, 2, *axes), dtype)
    return halves[:, :, 1].swapaxes(2, 3) if transposed else halves[:, :, 1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[np.ndarray], list[np.ndarray], list[int], int]:
    tokens, dtype = draw(st.integers(1, 9)), draw(st.sampled_from([np.int16, np.int32]))
    ids = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=4))
    first, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    sides, arrays = [], []
    for _ in range(draw(st.integers(1, 11))):
        heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 7))
        sides.append(side(heads, tokens, dim, draw(st.booleans()), dtype))
        shape = (heads, (first + len(ids) + after + 1) * tokens, dim)
        number = np.arange(1, 1 + np.prod(shape)) * 7919 % 30_011
        longer = number.reshape(shape).astype(dtype)
        arrays.append(longer[:, tokens:] if draw(st.booleans()) else longer[:, tokens:].copy())
    return sides, arrays, ids, first


def blocks_of(array: np.ndarray, tokens: int, first: int, count: int) -> np.ndarray:
    heads, _, dim = array.shape
    return array.reshape(heads, -1, tokens, dim)[:, first : first + count].swapaxes(0, 1)


@pytest.mark.slow
@given(cases())
def test_copies_are_the_same_as_numpys(case):
    sides, arrays, ids, first = case
    copies, tokens = BlockCopies(sides), sides[0].shape[2]
    copies.write(ids, arrays, first)
    others = [x for x in range(NUM_BLOCKS) if x not in ids]
    for x, array in zip(sides, arrays, strict=True):
        assert np.array_equal(x[ids], blocks_of(array, tokens, first, len(ids)))
        assert not x[others].any()
        assert x.base is None or not x.base.reshape(NUM_BLOCKS, x.shape[1], 2, -1)[:, :, 0].any()
    longer = [
        np.zeros((x.shape[0], (len(ids) + 2) * tokens, x.shape[2]), dtype=x.dtype) for x in arrays
    ]
    back = [x[:, tokens:-tokens] for x in longer]
    copies.read(ids, back)
    assert not any(x[:, :tokens].any() or x[:, -tokens:].any() for x in longer)
    for found, array in zip(back, arrays, strict=True):
        assert np.array_equal(found, array[:, first * tokens : (first + len(ids)) * tokens])


def test_blocks_are_not_read_into_what_cannot_take_them() -> None:
    copies, run = BlockCopies([side(2, 4, 8, True, np.int16)]), np.zeros((2, 4, 8), np.int16)
    with pytest.raises(ValueError, match="int16"):
        copies.read([5], [run.astype(np.int32)])
    run.flags.writeable = False
    with pytest.raises(ValueError, match="read only"):
        copies.read([5], [run])


BEYOND = [
    ([0, NUM_BLOCKS], 0, "there are 9 blocks, not 0 to 9"),
    ([-1], 0, "there are 9 blocks, not -1 to -1"),
    ([0, 1], 1, "a run of fewer than 12 tokens"),
]


@pytest.mark.parametrize(("ids", "first", "words"), BEYOND)
def test_nothing_is_copied_beyond_either_end(ids: Sequence[int], first: int, words: str) -> None:
    target, run = side(2, 4, 8, True, np.int32), np.ones((2, 8, 8), np.int32)
    copies = BlockCopies([target])
    with pytest.raises(IndexError, match=words):
        copies.write(ids, [run], first)
    assert not target.any()
    if first == 0:
        with pytest.raises(IndexError, match=words):
            copies.read(ids, [run])
