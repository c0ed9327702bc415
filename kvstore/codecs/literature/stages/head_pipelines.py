"""Pipelines that work head by head, with different stages for keys and for values.

Methods that store a number for each row (the size of a residual, a radius) put it among the codes
of a token, as two columns of bytes: bit planes write any columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST, limited_to_fp16
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import KEY, VALUE, Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import FP16_SMALLEST, NoGain, root_mean_squares
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout

# Makes the pipeline for a stack of heads of one width.
MakePipeline: TypeAlias = Callable[[StackShape], Pipeline]
COLUMN_BITS = (8, 8)  # of the two columns of a number


@dataclass(frozen=True)
class HeadPipelines:
    """Assembles a codec whose unit is one head. Implements ``stack_codec.Assemble``."""

    keys: MakePipeline
    values: MakePipeline

    def __call__(self, layout: KVLayout) -> tuple[Pipeline, ...]:
        return _assembled(self, layout)


@functools.lru_cache(maxsize=16)  # kilobytes for each head
def _assembled(pipelines: HeadPipelines, layout: KVLayout) -> tuple[Pipeline, ...]:
    return head_pipelines(layout, pipelines.keys, pipelines.values)


def head_pipelines(
    layout: KVLayout, make_keys: MakePipeline, make_values: MakePipeline
) -> tuple[Pipeline, ...]:
    """Make one pipeline for the keys and one for the values of every head width."""
    make = {KEY: make_keys, VALUE: make_values}
    return tuple(make[side](shape) for shape, side in sided_shapes(layout))


def sided_shapes(layout: KVLayout) -> Iterator[tuple[StackShape, int]]:
    """Yield the heads of each width, those of keys and of values apart, with their side."""
    for shape in stack_shapes(Scope("head"), layout):
        for side in (KEY, VALUE):
            if units := tuple(unit for unit in shape.units if unit[0].side == side):
                yield StackShape(units, shape.gain_groups), side


def planes_of(shape: StackShape, bits: int | np.ndarray) -> BitPlanes:
    """Make the coder for codes, the same in all units.

    ``bits``: of every column, or those of each, integers (columns,).
    """
    columns = np.full(shape.width, bits) if isinstance(bits, int) else bits
    return BitPlanes(np.tile(columns, (shape.num_units, 1)))


class HalfRange(NoGain):
    """Does not scale rows; keeps those that fp16 cannot hold unquantised. Implements ``Gain``."""

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sizes = root_mean_squares(stack, self._shape)
        largest = FP16_LARGEST / np.float32(2 * np.sqrt(self._shape.width))
        fits = (sizes == 0) | ((sizes >= 2 * FP16_SMALLEST) & (sizes <= largest))
        return np.ones_like(sizes), ~fits


def to_columns(values: np.ndarray) -> np.ndarray:
    """Pack fp32 (..., numbers) as fp16 to uint8 (..., 2 * numbers)."""
    return np.ascontiguousarray(limited_to_fp16(values)).view(np.uint8)


def from_columns(columns: np.ndarray) -> np.ndarray:
    """Unpack uint8 (..., 2 * numbers) to fp32; damaged columns also give finite numbers."""
    halves = np.ascontiguousarray(columns).view("<f2").astype(np.float32)
    usual = np.where(np.isnan(halves), np.float32(0), halves)
    return np.clip(usual, -FP16_LARGEST, FP16_LARGEST)
