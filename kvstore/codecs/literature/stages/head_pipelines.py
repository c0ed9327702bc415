"""Pipelines that work head by head, with different stages for keys and for values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import KEY, Scope, StackShape, stack_shapes
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


@functools.lru_cache(maxsize=128)
def _assembled(pipelines: HeadPipelines, layout: KVLayout) -> tuple[Pipeline, ...]:
    return head_pipelines(layout, pipelines.keys, pipelines.values)


def head_pipelines(
    layout: KVLayout, make_keys: MakePipeline, make_values: MakePipeline
) -> tuple[Pipeline, ...]:
    """Makes one pipeline for the keys and one for the values of every head width."""
    pipelines = []
    for shape in stack_shapes(Scope("head"), layout):
        keys = tuple(unit for unit in shape.units if unit[0].side == KEY)
        values = tuple(unit for unit in shape.units if unit[0].side != KEY)
        for units, make in ((keys, make_keys), (values, make_values)):
            if units:
                pipelines.append(make(StackShape(units, shape.gain_groups)))
    return tuple(pipelines)


def planes_of(shape: StackShape, bits: np.ndarray) -> BitPlanes:
    """Makes the coder for codes of ``bits``, integers (columns,), the same in all units."""
    return BitPlanes(np.tile(bits, (shape.num_units, 1)))


def equal_bits(shape: StackShape, num_bits: int) -> np.ndarray:
    """Returns the bits of a code with ``num_bits`` in every column, int64 (width,)."""
    return np.full(shape.width, num_bits)
