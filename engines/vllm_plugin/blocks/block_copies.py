"""Copies rows between the blocks of a cache in host memory and runs of tokens, with numba.

A model has dozens of small arrays. With numpy and torch the calls take longer than the copies, and
they hold the interpreter's lock, so the threads that pack or unpack the next run have to wait.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


class BlockCopies:
    """Copies between the blocks of several views and runs of tokens.

    Thread-safe, as long as no other code touches the same blocks.
    """

    def __init__(self, views: Sequence[np.ndarray]) -> None:
        """``views``: (num_blocks, num_kv_heads, block_tokens, head_dim), int16 or int32."""
        self._num_blocks, self._block_tokens = views[0].shape[0], views[0].shape[2]
        self._dtype = views[0].dtype
        self._rows = [(view.shape[1], view.shape[3]) for view in views]
        self._views = views  # keeps the memory alive that ``_places`` addresses
        places = [(view.ctypes.data, *view.strides, view.shape[2]) for view in views]
        self._places = np.array(places, np.int64)
        self._copy, self._places_of = _functions(self._dtype)

    def write(self, block_ids: Sequence[int], arrays: Sequence[np.ndarray], first: int) -> None:
        """Copy a run from its block ``first`` on into these blocks.

        ``arrays``: the run, (num_kv_heads, num_tokens, head_dim), one array for each view, in whole
        blocks. Raises ``IndexError``: a block or the run's end is out of bounds.
        """
        self._copy_run(block_ids, arrays, first, into_blocks=True)

    def read(self, block_ids: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Copy these blocks into ``arrays``, shaped as in ``write``.

        Raises:
            ValueError: an array is read only.
            IndexError: a block or the run's end is out of bounds.
        """
        self._copy_run(block_ids, arrays, 0, into_blocks=False)

    def _copy_run(
        self,
        block_ids: Sequence[int],
        arrays: Sequence[np.ndarray],
        first: int,
        *,
        into_blocks: bool,
    ) -> None:
        ids = self._checked(block_ids)
        needed = (first + len(ids)) * self._block_tokens
        if any(array.shape[1] < needed for array in arrays):
            raise IndexError(f"a run of fewer than {needed} tokens")
        if (found := [(array.shape[0], array.shape[2]) for array in arrays]) != self._rows:
            raise IndexError(f"rows of {found} where the blocks have {self._rows}")
        if any(array.itemsize != self._dtype.itemsize for array in arrays):
            raise ValueError(f"arrays whose values do not have the size of {self._dtype}")
        runs = self._places_of(arrays, written=not into_blocks)
        self._copy(self._places, runs, ids, first, into_blocks)

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """Check the ids and return them as int64: compiled loops use vLLM's memory unchecked."""
        ids = np.array(block_ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._num_blocks:
            raise IndexError(f"there are {self._num_blocks} blocks, not {ids.min()} to {ids.max()}")
        return ids


@functools.cache
def _functions(dtype: np.dtype) -> tuple[Any, Any]:
    """Return the compiled copy for values of this size, and ``places_of``; see ``copy_blocks``.

    numba is imported here, after vLLM's worker has started: on CPUs the worker inspects all loaded
    modules when it starts, and that fails for llvmlite's modules.
    """
    from engines.vllm_plugin.blocks import copy_blocks
    from kvstore.codecs.loops.numba_functions import places_of

    copy = copy_blocks.copies_of(dtype.itemsize)
    copy.prepare()  # compiles now, when the server starts, not in its first request
    return copy, places_of
