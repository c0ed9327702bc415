"""Converts a run of KV to matrices, and back.

A method works on a *unit*: one head, K or V of a layer, K and V together, or ten layers, as a
matrix of tokens by ``width``. A scope divides the heads of all layers into units. Units of the same
composition lie in one array, a *stack* of shape (units, tokens, width), in fp32. The stages of a
pipeline see only stacks, never layers and heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.shapes import DType, KVLayout, KVRun, Rope

ScopeName: TypeAlias = Literal["head", "side", "layer", "group"]
KEY, VALUE = 0, 1


@dataclass(frozen=True)
class Scope:
    """The part of a token that one unit holds.

    It is one head, K or V of a layer (a side), a layer with K and V, or a group of layers.
    """

    name: ScopeName
    num_layers: int = 1  # layers of a group

    def __str__(self) -> str:
        several = f"{self.num_layers} layers"
        return {"head": "a head", "side": "K or V", "layer": "a layer", "group": several}[self.name]


@dataclass(frozen=True)
class HeadVector:
    """The K or V vector of one head of one layer."""

    layer: int
    side: int  # KEY or VALUE
    head: int
    dim: int
    first_element: int  # among all elements of a token: layer by layer, K then V, head by head

    @property
    def array(self) -> int:
        """The index of its array among K of the first layer, its V, K of the second, ..."""
        return 2 * self.layer + self.side

    def rope(self, ropes: Sequence[Rope | None]) -> Rope | None:
        """The rotation of this vector; ``ropes``: one for each layer, None for one without."""
        rope = ropes[self.layer]
        side = VALUE if rope is not None and rope.side == "values" else KEY
        return rope if self.side == side else None


Unit: TypeAlias = tuple[HeadVector, ...]


@dataclass(frozen=True)
class GainGroup:
    """Columns of a unit that share one gain: a head, or all heads of K or of V of one layer."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class StackShape:
    """The units of one stack, and the columns that they have in common."""

    units: tuple[Unit, ...]
    gain_groups: tuple[GainGroup, ...]

    @property
    def num_units(self) -> int:
        """The number of units."""
        return len(self.units)

    def gains_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """The shape of all gains: (units, tokens, gain groups)."""
        return len(self.units), num_tokens, len(self.gain_groups)

    @functools.cached_property
    def width(self) -> int:
        """The number of columns of a unit."""
        return sum(vector.dim for vector in self.units[0])

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first column of every head vector of a unit."""
        dims = (vector.dim for vector in self.units[0])
        return tuple(itertools.accumulate(dims, initial=0))[:-1]

    @functools.cached_property
    def elements(self) -> np.ndarray:
        """The index of every column's element in a token, int64 (units, width)."""
        columns = [
            np.concatenate([np.arange(s.first_element, s.first_element + s.dim) for s in unit])
            for unit in self.units
        ]
        return np.stack(columns)

    def gather(self, run: KVRun, first: int, dtype: DType) -> np.ndarray:
        """Return tokens ``first ..`` of ``run``, rounded to 16 bits, as fp32 (units, tokens,
        width).
        """
        num_tokens = run[0][0].shape[1] - first
        stack = np.empty((self.num_units, num_tokens, self.width), np.float32)
        target = stack.view(np.uint32) if dtype == "bfloat16" else stack
        for unit, start, vector in self._vectors():
            source = run[vector.layer][vector.side][vector.head, first:]
            target[unit, :, start : start + vector.dim] = source
        if dtype == "bfloat16":
            target <<= 16
        elif dtype == "float32":
            stack = floats.widen(floats.round_to_bf16(stack), dtype)
        return stack

    def scatter(self, stack: np.ndarray, out: KVRun, first: int, dtype: DType) -> None:
        """Write ``stack``, fp32 (units, tokens, width), to tokens ``first ..`` of ``out``.

        Values are rounded to the precision of the layout's stored rows.
        """
        narrow = _narrow(stack, dtype)
        for unit, start, vector in self._vectors():
            target = out[vector.layer][vector.side]
            target[vector.head, first:] = narrow[unit, :, start : start + vector.dim]

    def vectors_in(self, unit: int, part: GainGroup) -> Iterator[tuple[HeadVector, slice]]:
        """Yield a unit's head vectors in a gain group, and their columns among those of it."""
        for start, vector in zip(self.starts, self.units[unit], strict=True):
            if part.start <= start < part.stop:
                yield vector, slice(start - part.start, start - part.start + vector.dim)

    def _vectors(self) -> Iterator[tuple[int, int, HeadVector]]:
        for number, unit in enumerate(self.units):
            for start, vector in zip(self.starts, unit, strict=True):
                yield number, start, vector


def _narrow(stack: np.ndarray, dtype: DType) -> np.ndarray:
    """Round like ``floats.narrow``, but faster for the usual dtype."""
    fast = compiled_stages()
    if dtype != "bfloat16" or fast is None:
        return floats.narrow(stack, dtype)
    narrow = np.empty(stack.shape, np.uint16)
    words = np.ascontiguousarray(stack).view(np.uint32)
    fast.round_to_bf16(words.reshape(-1), narrow.reshape(-1))
    return narrow


@functools.lru_cache(maxsize=16)
def stack_shapes(scope: Scope, layout: KVLayout) -> tuple[StackShape, ...]:
    """Return one stack for each composition, in the order of their first units."""
    stacks: dict[tuple[int, ...], list[Unit]] = {}
    for unit in _units(scope, layout):
        make_up = tuple(x for s in unit for x in (s.layer - unit[0].layer, s.side, s.dim))
        if scope.name in ("head", "side"):  # to a method, K and V of one width are the same
            make_up = tuple(s.dim for s in unit)
        stacks.setdefault(make_up, []).append(unit)
    return tuple(StackShape(tuple(units), _gain_groups(units[0])) for units in stacks.values())


def _units(scope: Scope, layout: KVLayout) -> Iterator[Unit]:
    sides = _sides(layout)
    if scope.name == "head":
        return ((vector,) for side in sides for vector in side)
    if scope.name == "side":
        return filter(None, sides)
    per_unit = 2 * (scope.num_layers if scope.name == "group" else 1)
    units = (
        tuple(itertools.chain.from_iterable(sides[i : i + per_unit]))
        for i in range(0, len(sides), per_unit)
    )
    return filter(None, units)


def _sides(layout: KVLayout) -> list[Unit]:
    """Return K of the first layer, its V, K of the second, ...: each a tuple of its heads."""
    sides, element = [], 0
    for number, layer in enumerate(layout.layers):
        for side, dim in ((KEY, layer.head_dim), (VALUE, layer.value_dim)):
            heads = range(layer.num_kv_heads if dim else 0)
            sides.append(tuple(HeadVector(number, side, h, dim, element + h * dim) for h in heads))
            element += layer.num_kv_heads * dim
    return sides


def _gain_groups(unit: Unit) -> tuple[GainGroup, ...]:
    groups, start = [], 0
    for _, heads in itertools.groupby(unit, key=lambda s: (s.layer, s.side)):
        stop = start + sum(head.dim for head in heads)
        groups.append(GainGroup(start, stop))
        start = stop
    return tuple(groups)
