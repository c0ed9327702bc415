"""Rows between the blocks of a cache in host memory and runs of tokens, as numba functions.

A model has dozens of small arrays. numpy and torch set out anew for each of them, which takes
longer than the copying, and hold the interpreter's lock meanwhile, which whoever packs or unpacks
the next run waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

BATCH = 8  # sides per call: numba compiles for a number of arrays

# All indices are unsigned: of a signed one numba would ask every time whether it is negative.


def _into_blocks(flats: Any, steps: Any, runs: Any, ids: Any, first: Any, count: Any) -> None:
    """Of ``count`` sides. ``steps``: of each, elements from block to block, head, token, channel.

    The axis that lies side by side in a block is the inner loop.
    """
    for number in range(count):
        flat, run = flats[number], runs[number]
        block_step, head_step, token_step, step, tokens = steps[number]
        heads, dim = np.uint64(run.shape[0]), np.uint64(run.shape[2])
        for i in range(np.uint64(len(ids))):
            start = (first + i) * tokens
            for head in range(heads):
                at = ids[i] * block_step + head * head_step
                if token_step == 1:
                    for d in range(dim):
                        for t in range(tokens):
                            flat[at + d * step + t] = run[head, start + t, d]
                else:
                    for t in range(tokens):
                        for d in range(dim):
                            flat[at + t * token_step + d * step] = run[head, start + t, d]


def _out_of_blocks(flats: Any, steps: Any, runs: Any, ids: Any, first: Any, count: Any) -> None:
    """The inverse: here the rows of a run are the inner loop."""
    for number in range(count):
        flat, run = flats[number], runs[number]
        block_step, head_step, token_step, step, tokens = steps[number]
        heads, dim = np.uint64(run.shape[0]), np.uint64(run.shape[2])
        for i in range(np.uint64(len(ids))):
            start = (first + i) * tokens
            for head in range(heads):
                at = ids[i] * block_step + head * head_step
                for t in range(tokens):
                    for d in range(dim):
                        run[head, start + t, d] = flat[at + t * token_step + d * step]


class BlockCopies:
    """Thread-safe for blocks that nobody else has to do with."""

    def __init__(self, sides: Sequence[np.ndarray]) -> None:
        """``sides``: views (num_blocks, num_kv_heads, block_tokens, head_dim) of integers."""
        self._num_blocks, self._block_tokens = sides[0].shape[0], sides[0].shape[2]
        self._dtype = sides[0].dtype
        self._rows = [(side.shape[1], side.shape[3]) for side in sides]
        steps = [(*_steps(side), side.shape[2]) for side in sides]
        self._flats = [_flat(side) for side in sides]
        self._steps = np.array(steps, np.uint64)
        self._into = _function(_into_blocks, self._dtype)
        self._out_of = _function(_out_of_blocks, self._dtype)

    def write(self, block_ids: Sequence[int], arrays: Sequence[np.ndarray], first: int) -> None:
        """Blocks ``first ..`` of a run into these blocks.

        ``arrays``: (num_kv_heads, num_tokens, head_dim), one for each side, of whole blocks.
        """
        self._each(self._into, block_ids, arrays, first)

    def read(self, block_ids: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """The inverse, into arrays that are C-contiguous and hold so many blocks."""
        if not all(array.flags.c_contiguous for array in arrays):
            raise ValueError("what is read goes to arrays that are C-contiguous")
        self._each(self._out_of, block_ids, arrays, 0)

    def _each(
        self, function: Any, block_ids: Sequence[int], arrays: Sequence[np.ndarray], first: int
    ) -> None:
        ids = self._checked(block_ids)
        needed = (first + len(ids)) * self._block_tokens
        if any(array.shape[1] < needed for array in arrays):
            raise IndexError(f"a run of fewer than {needed} tokens")
        if (found := [(array.shape[0], array.shape[2]) for array in arrays]) != self._rows:
            raise IndexError(f"rows of {found} where the blocks have {self._rows}")
        for flats, steps, runs, count in self._batches(arrays):
            function(flats, steps, runs, ids, first, count)

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """What a compiled loop gets goes unchecked into memory that is not ours."""
        ids = np.array(block_ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._num_blocks:
            raise IndexError(f"there are {self._num_blocks} blocks, not {ids.min()} to {ids.max()}")
        return ids.astype(np.uint64)

    def _batches(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[Any, ...]]:
        """``BATCH`` sides at a time, the last ones repeated, and how many of them count."""
        runs = [np.ascontiguousarray(array).view(self._dtype) for array in arrays]
        for at in range(0, len(runs), BATCH):
            count = len(runs[at : at + BATCH])
            flats = [*self._flats[at : at + BATCH], *self._flats[at : at + 1] * (BATCH - count)]
            batch = [*runs[at : at + BATCH], *runs[at : at + 1] * (BATCH - count)]
            yield tuple(flats), self._steps[at : at + BATCH], tuple(batch), count


def _steps(side: np.ndarray) -> tuple[int, ...]:
    """In elements."""
    return tuple(stride // side.itemsize for stride in side.strides)


def _flat(side: np.ndarray) -> np.ndarray:
    """All memory from the side's first element to its last, whatever else lies between them."""
    last = sum((n - 1) * step for n, step in zip(side.shape, _steps(side), strict=True))
    return np.lib.stride_tricks.as_strided(side, (last + 1,), (side.itemsize,))


@functools.cache
def _function(function: Any, dtype: np.dtype) -> Any:
    """Compiled, which takes seconds once on a machine.

    numba comes in here, when vLLM's worker is up: on CPUs that looks through all modules at its
    start, and stumbles over llvmlite's.
    """
    from numba import types

    from kvstore.codecs.numba_functions import array_of, compiled, tuple_of

    element = {2: types.int16, 4: types.int32}[dtype.itemsize]
    flats, runs = ([array_of(element, ndim)] * BATCH for ndim in (1, 3))
    return compiled(
        types.void,
        function,
        tuple_of(*flats),
        array_of(types.uint64, 2),
        tuple_of(*runs),
        array_of(types.uint64, 1),
        types.uint64,
        types.uint64,
    )
