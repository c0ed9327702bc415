"""Parts of which kernels of units are built: intrinsics of this host, arguments and their types.

Intrinsics emit code for the vectors of this host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit import dots
from kvstore.codecs.kernels.units import engine_rows
from kvstore.codecs.loops.numba_functions import (
    NBYTES,
    address_of,
    emitted,
    sources_of,
    tuple_of,
)
from kvstore.codecs.stages.integer_klt import MAX_BITS

SOURCES = sources_of(__file__)

HOST = dots.host_vectors()
GROUP, LANES, OFFSET = HOST.group, HOST.lanes, HOST.offset


def plain(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (literal digest of the sources, tuple of numbers) that returns nothing."""

    def typed(context: Any, sources: Any, values: Any) -> Any:
        return emitted(emit, sources, values)

    return intrinsic(prefer_literal=True)(typed)


def by_number(emit: Callable[..., None], numbers: Iterable[int]) -> Any:
    """Make such an intrinsic of whose numbers the first one, of ``numbers``, selects the code."""

    def emit_each(b: Any, args: Any) -> None:
        number, *others = args
        end = b.append_basic_block()
        cases = b.switch(number, end)
        for known in numbers:
            case = b.append_basic_block()
            cases.add_case(ir.Constant(number.type, known), case)
            b.position_at_end(case)
            emit(b, known, tuple(others))
            b.branch(end)
        b.position_at_end(end)

    return plain(emit_each)


_BITS, _IS_WORDS = range(1, MAX_BITS + 1), (0, 1)
put_levels: Any = by_number(lambda b, bits, args: dots.emit_levels(b, bits, OFFSET, args), _BITS)
put_groups: Any = plain(lambda b, args: dots.emit_groups(b, GROUP, args))
tile_of_levels: Any = plain(lambda b, args: dots.emit_tile(b, dots.dot_of_levels, args))
_put_rows: Any = by_number(lambda b, *x: engine_rows.emit_rows(b, LANES, *x), _IS_WORDS)
load_rows: Any = by_number(lambda b, *x: engine_rows.emit_load(b, LANES, *x), _IS_WORDS)
put_squares: Any = plain(lambda b, args: engine_rows.emit_squares(b, LANES, args))
put_integers: Any = plain(lambda b, args: engine_rows.emit_integers(b, LANES, args))
put_columns: Any = plain(lambda b, args: engine_rows.emit_transposed(b, LANES, args))
tile_of_rows: Any = plain(lambda b, args: dots.emit_tile(b, dots.dot_of_words, args))
put_codes: Any = by_number(lambda b, *x: engine_rows.emit_codes(b, LANES, *x), _BITS)


BLOCK = 64  # tokens that a kernel processes together
# The RoPE table of each segment (0: none), half the channels that each table rotates, cosines,
# sines, and head_dim.
ROPE_TABLES = ("i8:2 i8:1 f4:3 f4:3 i8",)
# Addresses of the engine's arrays and bytes from token to token, (units, segments) each.
SEGMENTS = tuple_of("i8:2 i8:2")


@njit
def put_tile(sums, width, mean, gain, place, ropes, targets):
    """Put the rows of one head of some tokens into the engine's array.

    ``sums``: the address of the first sum, and ``width`` the number of sums of a token. ``mean``:
    the address of the head's means. ``gain``: that of the first token's gain. ``place``: unit,
    segment, first token, number of tokens. ``ropes``: ``ROPE_TABLES`` and whether rows are fp32.
    """
    rope_of, halves, cosines, sines, dim, as_words = ropes
    addresses, strides = targets
    unit, segment, token, count = place
    rope, stride = rope_of[unit, segment], strides[unit, segment]
    angle = NBYTES * (rope * cosines.shape[1] + token) * cosines.shape[2]
    args = (
        as_words,
        sums,
        mean,
        address_of(cosines) + angle,
        address_of(sines) + angle,
        gain,
        addresses[unit, segment] + token * stride,
        NBYTES * width,
        NBYTES * cosines.shape[2],
        stride,
        count,
        halves[rope],
        dim,
    )
    _put_rows(SOURCES, args)


@njit
def count_of(runs):
    """Return the numbers of planes and components of a unit.

    ``runs``: int64 (MAX_BITS + 1,), the number of components that have each number of bits.
    """
    planes, components = 0, 0
    for bits in range(1, MAX_BITS + 1):
        planes += bits * runs[bits]
        components += runs[bits]
    return planes, components
