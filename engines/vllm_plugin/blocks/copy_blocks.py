"""The one compiled loop of ``block_copies``; importing it imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from kvstore.codecs.loops.numba_functions import CompiledFunction, compiled, sources_of

SOURCES = sources_of(__file__)
_VALUES: dict[int, Any] = {2: types.int16, 4: types.int32}
_array_at: Any = vars(numba)["carray"]  # numba does not list it as public for type checkers


def _typed_pointer(context: Any, address: Any, like: Any) -> Any:
    """Type an address as a pointer to values of the type of ``like``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    make: Any = types.CPointer
    return make(like)(types.int64, like), generate


_pointer: Any = intrinsic(_typed_pointer)


@njit
def _copy_plane(target: Any, source: Any, shape: Any, like: Any) -> None:
    """Copy the tokens of one head.

    ``target``, ``source``: addresses, and the values from one row and from one column to the next.
    The innermost loop is over the columns. Indices are unsigned: numba would check a signed one
    for being negative.
    """
    (into, row_step, step), (out_of, from_row, from_step) = target, source
    rows, columns = shape
    places = _array_at(_pointer(into, like), ((rows - 1) * row_step + (columns - 1) * step + 1,))
    values = _array_at(
        _pointer(out_of, like), ((rows - 1) * from_row + (columns - 1) * from_step + 1,)
    )
    to_next, from_next = np.uint64(step), np.uint64(from_step)
    for row in range(rows):
        at, start = np.uint64(row * row_step), np.uint64(row * from_row)
        if step == 1:
            for column in range(np.uint64(columns)):
                places[at + column] = values[start + column * from_next]
        else:
            for column in range(np.uint64(columns)):
                places[at + column * to_next] = values[start + column * from_next]


def copies_of(value_nbytes: int) -> CompiledFunction:
    """Make the function for values of so many bytes."""
    kind, size, sources = _VALUES[value_nbytes], value_nbytes, SOURCES

    def copy_blocks(blocks: Any, runs: Any, ids: Any, first: Any, into_blocks: Any) -> int:
        """Copy blocks ``ids`` and the run from its block ``first`` on, one into the other.

        ``blocks``: int64 (views, 6): the address of each view, the bytes from one block, head,
        token and channel to the next, and the tokens of a block. ``runs``: from ``places_of``.
        """
        like = kind(0)
        for number in range(len(blocks)):
            base, to_block, to_head, to_token, to_channel, tokens = blocks[number]
            run, run_head, run_token, run_channel, heads, _, channels, _ = runs[number]
            for i in range(len(ids)):
                for head in range(heads):
                    block = base + ids[i] * to_block + head * to_head
                    rows = run + head * run_head + (first + i) * tokens * run_token
                    there = (block, to_token // size, to_channel // size)
                    here = (rows, run_token // size, run_channel // size)
                    target, source = (there, here) if into_blocks else (here, there)
                    if target[1] < target[2]:
                        target = (target[0], target[2], target[1])
                        source = (source[0], source[2], source[1])
                        _copy_plane(target, source, (channels, tokens), like)
                    else:
                        _copy_plane(target, source, (tokens, channels), like)
        return sources

    return compiled("i8", copy_blocks, "i8:2 i8:2 i8:1 i8 b1")
