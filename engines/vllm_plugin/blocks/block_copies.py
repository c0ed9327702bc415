"""Copies rows between the blocks of a cache in host memory and runs of tokens, with numba.

A model has dozens of small arrays. With numpy and torch the calls take longer than the copies, and
they hold the interpreter's lock, so the threads that pack or unpack the next run have to wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

BATCH = 8  # views per call: numba compiles for a fixed number of arrays

# All indices are unsigned: numba would check every signed index for being negative.


def _into_blocks(flats: Any, steps: Any, runs: Any, ids: Any, first: Any, count: Any) -> None:
    """Copy rows of ``count`` runs into blocks ``ids``.

    ``flats``: the memory of each view, flat. ``steps``: for each view, the distances in elements
    from one block, head, token and channel to the next, and the tokens per block. ``runs``:
    (num_kv_heads, num_tokens, head_dim). ``first``: the first block of the run to copy.

    The innermost loop is over the axis that is contiguous in a block.
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
    """Copy blocks ``ids`` into runs; the innermost loop is over the channels of a run's rows."""
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
    """Copies between the blocks of several views and runs of tokens.

    Thread-safe, as long as no other code touches the same blocks.
    """

    def __init__(self, views: Sequence[np.ndarray]) -> None:
        """``views``: (num_blocks, num_kv_heads, block_tokens, head_dim), int16 or int32."""
        self._num_blocks, self._block_tokens = views[0].shape[0], views[0].shape[2]
        self._dtype = views[0].dtype
        self._rows = [(view.shape[1], view.shape[3]) for view in views]
        steps = [(*_steps(view), view.shape[2]) for view in views]
        self._flats = [_flat(view) for view in views]
        self._steps = np.array(steps, np.uint64)
        self._into = _function(_into_blocks, self._dtype)
        self._out_of = _function(_out_of_blocks, self._dtype)

    def write(self, block_ids: Sequence[int], arrays: Sequence[np.ndarray], first: int) -> None:
        """Copy a run from its block ``first`` on into these blocks.

        ``arrays``: the run, (num_kv_heads, num_tokens, head_dim), one array for each view, in whole
        blocks. Raises ``IndexError``: a block or the run's end is out of bounds.
        """
        self._each(self._into, block_ids, arrays, first)

    def read(self, block_ids: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Copy these blocks into ``arrays``, shaped as in ``write`` and C-contiguous.

        Raises:
            ValueError: an array is not C-contiguous.
            IndexError: a block or the run's end is out of bounds.
        """
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
        """Check the ids and return them as uint64: compiled loops use vLLM's memory unchecked."""
        ids = np.array(block_ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._num_blocks:
            raise IndexError(f"there are {self._num_blocks} blocks, not {ids.min()} to {ids.max()}")
        return ids.astype(np.uint64)

    def _batches(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[Any, ...]]:
        """Yield arguments for ``BATCH`` views at a time.

        The last batch is padded; ``count`` is the number of its views to copy.
        """
        runs = [np.ascontiguousarray(array).view(self._dtype) for array in arrays]
        for at in range(0, len(runs), BATCH):
            count = len(runs[at : at + BATCH])
            flats = [*self._flats[at : at + BATCH], *self._flats[at : at + 1] * (BATCH - count)]
            batch = [*runs[at : at + BATCH], *runs[at : at + 1] * (BATCH - count)]
            yield tuple(flats), self._steps[at : at + BATCH], tuple(batch), count


def _steps(view: np.ndarray) -> tuple[int, ...]:
    """The strides of all axes, in elements."""
    return tuple(stride // view.itemsize for stride in view.strides)


def _flat(view: np.ndarray) -> np.ndarray:
    """All memory from the view's first element to its last, as a flat array."""
    last = sum((n - 1) * step for n, step in zip(view.shape, _steps(view), strict=True))
    return np.lib.stride_tricks.as_strided(view, (last + 1,), (view.itemsize,))


@functools.cache
def _function(function: Any, dtype: np.dtype) -> Any:
    """The compiled function. Compiling takes seconds, once per machine.

    numba is imported here, after vLLM's worker has started: on CPUs the worker inspects all loaded
    modules when it starts, and that fails for llvmlite's modules.
    """
    from numba import types

    from kvstore.codecs.loops.numba_functions import array_of, compiled, tuple_of

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
