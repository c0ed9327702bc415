"""A run of KV as matrices, and back.

What a method works on (one head, K or V of a layer, K and V together, ten layers) is a *unit*: a
matrix of tokens by ``width``. A scope deals the heads of all layers out to units; units of the same
make-up lie in one array, a *stack* of shape (units, tokens, width), in fp32. Everything behind this
file sees stacks only and never knows of layers and heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.fast import compiled_pieces
from kvstore.shapes import DType, KVLayout, KVRun

ScopeName: TypeAlias = Literal["head", "side", "layer", "group"]
KEY, VALUE = 0, 1


@dataclass(frozen=True)
class Scope:
    """How much of a token one unit holds: one head, K or V of a layer, layers with K and V."""

    name: ScopeName
    num_layers: int = 1  # of a group

    def __str__(self) -> str:
        several = f"{self.num_layers} layers"
        return {"head": "a head", "side": "K or V", "layer": "a layer", "group": several}[self.name]


@dataclass(frozen=True)
class Segment:
    """One head's K or V of one layer."""

    layer: int
    side: int  # KEY or VALUE
    head: int
    dim: int
    first_element: int  # among all elements of a token: layer by layer, K then V, head by head

    @property
    def array(self) -> int:
        """Number of the array among K and V of the first layer, of the second, ..."""
        return 2 * self.layer + self.side


Unit: TypeAlias = tuple[Segment, ...]


@dataclass(frozen=True)
class Part:
    """Columns of a unit that share one gain: a head, or all heads of K or of V of one layer."""

    start: int
    stop: int


class Place(NamedTuple):
    """Of whole segments."""

    unit: int
    token: int
    columns: slice


@dataclass(frozen=True, eq=False)
class StackShape:
    """What the units of one stack have in common, and what is in each."""

    units: tuple[Unit, ...]
    parts: tuple[Part, ...]

    @property
    def num_units(self) -> int:
        return len(self.units)

    @functools.cached_property
    def width(self) -> int:
        return sum(segment.dim for segment in self.units[0])

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """First column of every segment of a unit."""
        dims = (segment.dim for segment in self.units[0])
        return tuple(itertools.accumulate(dims, initial=0))[:-1]

    @functools.cached_property
    def elements(self) -> np.ndarray:
        """Which element of a token each column is, int64 (units, width)."""
        columns = [
            np.concatenate([np.arange(s.first_element, s.first_element + s.dim) for s in unit])
            for unit in self.units
        ]
        return np.stack(columns)

    def gather(self, run: KVRun, first: int, dtype: DType) -> np.ndarray:
        """Tokens ``first ..`` of ``run`` as fp32 (units, tokens, width), rounded to 16 bits."""
        num_tokens = run[0][0].shape[1] - first
        stack = np.empty((self.num_units, num_tokens, self.width), np.float32)
        target = stack.view(np.uint32) if dtype == "bfloat16" else stack
        for unit, start, segment in self._segments():
            source = run[segment.layer][segment.side][segment.head, first:]
            target[unit, :, start : start + segment.dim] = source
        if dtype == "bfloat16":
            target <<= 16
        elif dtype == "float32":
            stack = floats.widen(floats.round_to_bf16(stack), dtype)
        return stack

    def scatter(self, stack: np.ndarray, out: KVRun, first: int, dtype: DType) -> None:
        """The inverse: ``stack`` rounded to what the layout's rows are kept in."""
        narrow = _narrow(stack, dtype)
        for unit, start, segment in self._segments():
            target = out[segment.layer][segment.side]
            target[segment.head, first:] = narrow[unit, :, start : start + segment.dim]

    def stored(self, run: KVRun, first: int, place: Place, dtype: DType) -> np.ndarray:
        """The bits in which one place of ``run`` is kept as it is, uint16 (columns,)."""
        rows = [
            run[x.layer][x.side][x.head, first + place.token] for _, x in self._segments_at(place)
        ]
        return np.concatenate([floats.to_stored(row, dtype) for row in rows])

    def put_stored(
        self, out: KVRun, first: int, place: Place, bits: np.ndarray, dtype: DType
    ) -> None:
        """The inverse: bit for bit, infinities and all."""
        row = floats.from_stored(bits, dtype)
        for at, segment in self._segments_at(place):
            target = out[segment.layer][segment.side][segment.head, first + place.token]
            target[:] = row[at : at + segment.dim]

    def _segments_at(self, place: Place) -> Iterator[tuple[int, Segment]]:
        """Each with where it begins among the columns of the place."""
        for start, segment in zip(self.starts, self.units[place.unit], strict=True):
            if place.columns.start <= start < place.columns.stop:
                yield start - place.columns.start, segment

    def _segments(self) -> Iterator[tuple[int, int, Segment]]:
        for number, unit in enumerate(self.units):
            for start, segment in zip(self.starts, unit, strict=True):
                yield number, start, segment


def _narrow(stack: np.ndarray, dtype: DType) -> np.ndarray:
    """``floats.narrow``, quicker for the usual dtype."""
    fast = compiled_pieces()
    if dtype != "bfloat16" or fast is None:
        return floats.narrow(stack, dtype)
    narrow = np.empty(stack.shape, np.uint16)
    words = np.ascontiguousarray(stack).view(np.uint32)
    fast.round_to_bf16(words.reshape(-1), narrow.reshape(-1))
    return narrow


@functools.lru_cache(maxsize=64)
def stack_shapes(scope: Scope, layout: KVLayout) -> tuple[StackShape, ...]:
    """One stack for each make-up, in the order in which the first unit of each appears."""
    stacks: dict[tuple[int, ...], list[Unit]] = {}
    for unit in _units(scope, layout):
        make_up = tuple(x for s in unit for x in (s.layer - unit[0].layer, s.side, s.dim))
        if scope.name in ("head", "side"):  # K and V of one width are the same to a method
            make_up = tuple(s.dim for s in unit)
        stacks.setdefault(make_up, []).append(unit)
    return tuple(StackShape(tuple(units), _parts(units[0])) for units in stacks.values())


def _units(scope: Scope, layout: KVLayout) -> Iterator[Unit]:
    sides = _sides(layout)
    if scope.name == "head":
        return ((segment,) for side in sides for segment in side)
    if scope.name == "side":
        return iter(sides)
    per_unit = 2 * (scope.num_layers if scope.name == "group" else 1)
    return (
        tuple(itertools.chain.from_iterable(sides[i : i + per_unit]))
        for i in range(0, len(sides), per_unit)
    )


def _sides(layout: KVLayout) -> list[Unit]:
    """K of the first layer, V of it, K of the second, ...: each a tuple of its heads."""
    sides, element = [], 0
    for number, layer in enumerate(layout.layers):
        for side, dim in ((KEY, layer.head_dim), (VALUE, layer.value_dim)):
            heads = range(layer.num_kv_heads)
            sides.append(tuple(Segment(number, side, h, dim, element + h * dim) for h in heads))
            element += layer.num_kv_heads * dim
    return sides


def _parts(unit: Unit) -> tuple[Part, ...]:
    parts, start = [], 0
    for _, segments in itertools.groupby(unit, key=lambda s: (s.layer, s.side)):
        stop = start + sum(segment.dim for segment in segments)
        parts.append(Part(start, stop))
        start = stop
    return tuple(parts)
