"""Pipelines that work head by head, with different stages for keys and for values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import KEY, VALUE, Scope, StackShape, stack_shapes
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout

# Makes the pipeline for a stack of heads of one width.
MakePipeline: TypeAlias = Callable[[StackShape], Pipeline]


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
    """Makes one pipeline for the keys and one for the values of every head width."""
    make = {KEY: make_keys, VALUE: make_values}
    return tuple(make[side](shape) for shape, side in sided_shapes(layout))


def sided_shapes(layout: KVLayout) -> Iterator[tuple[StackShape, int]]:
    """Yields the heads of each width, those of keys and of values apart, with their side."""
    for shape in stack_shapes(Scope("head"), layout):
        for side in (KEY, VALUE):
            if units := tuple(unit for unit in shape.units if unit[0].side == side):
                yield StackShape(units, shape.gain_groups), side


def planes_of(shape: StackShape, bits: np.ndarray) -> BitPlanes:
    """Makes the coder for codes of ``bits``, integers (columns,), the same in all units."""
    return BitPlanes(np.tile(bits, (shape.num_units, 1)))


def equal_bits(shape: StackShape, num_bits: int) -> np.ndarray:
    """Returns the bits of a code with ``num_bits`` in every column, int64 (width,)."""
    return np.full(shape.width, num_bits)
