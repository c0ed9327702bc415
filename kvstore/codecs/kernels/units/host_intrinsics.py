"""Intrinsics that the kernels of units call: emitted code for the vectors of this host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from kvstore.codecs.kernels.emit import dots
from kvstore.codecs.kernels.emit.emitter import Emitter
from kvstore.codecs.kernels.units import codes, rows_in, rows_out
from kvstore.codecs.loops.numba_functions import tuple_items

HOST = dots.host_vectors()
GROUP, LANES, TILE_VECTORS, OFFSET = HOST.group, HOST.lanes, HOST.tile_vectors, HOST.offset


def _plain(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (literal digest of the sources, tuple of numbers) that returns nothing."""

    def typed(context: Any, sources: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(builder, tuple_items(builder, values, args[1]))
            return context.get_dummy_value()

        return types.void(sources, values), generate

    return intrinsic(prefer_literal=True)(typed)


def _with_number(emit: Callable[..., None]) -> Any:
    """Make an intrinsic (literal digest of the sources, literal number, tuple of numbers)."""

    def typed(context: Any, sources: Any, number: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(builder, number.literal_value, tuple_items(builder, values, args[2]))
            return context.get_dummy_value()

        return types.void(sources, number, values), generate

    return intrinsic(prefer_literal=True)(typed)


def _emit_tile_of_levels(b: Any, args: Any) -> None:
    dot = dots.dot_of_bytes if GROUP == 4 else dots.dot_of_words
    dots.emit_tile(Emitter(b, LANES), dots.TILE_TOKENS, TILE_VECTORS, dot, args)


def _emit_split_tile(b: Any, args: Any) -> None:
    dot = dots.dot_of_bytes if GROUP == 4 else dots.dot_of_words
    dots.emit_split_tile(Emitter(b, LANES), dots.TILE_TOKENS, TILE_VECTORS, dot, args)


def _emit_tile_of_rows(b: Any, args: Any) -> None:
    dots.emit_tile(Emitter(b, LANES), dots.TILE_TOKENS, TILE_VECTORS, dots.dot_of_words, args)


put_levels: Any = _with_number(lambda b, bits, args: dots.emit_levels(b, bits, OFFSET, args))
put_groups: Any = _plain(lambda b, args: dots.emit_groups(b, GROUP, args))
tile_of_levels: Any = _plain(_emit_tile_of_levels)
split_tile: Any = _plain(_emit_split_tile)
put_rows: Any = _with_number(lambda b, words, args: rows_out.emit_rows(b, LANES, words == 1, args))

load_rows: Any = _with_number(lambda b, words, args: rows_in.emit_load(b, LANES, words == 1, args))
put_squares: Any = _plain(lambda b, args: rows_in.emit_squares(b, LANES, args))
put_integers: Any = _plain(lambda b, args: rows_in.emit_integers(b, LANES, args))
put_columns: Any = _plain(lambda b, args: rows_in.emit_transposed(b, LANES, args))
tile_of_rows: Any = _plain(_emit_tile_of_rows)
put_codes: Any = _with_number(lambda b, bits, args: codes.emit_codes(b, LANES, bits, args))
