"""KIVI and KVQuant: the smallest value of each group of values, and uniform steps from it.

``kivi``: groups of 32 with 2 bits, keys by channel, values by token.
    Idea: channels of keys differ in size, and so do tokens of values; each is grouped along the
    axis on which sizes are even.
    Formula: code = round((x - smallest) / step), with fp16 smallest and step for each group.
    Size: 3 bits, including the two numbers of a group; b + 32 / group bits with other parameters.
    Paper: KIVI, arXiv 2402.02750.

``kvquant``: keys before RoPE by channel, values by token.
    Idea: before RoPE a channel of the keys has a size of its own, so it is grouped along tokens.
    Formula: as in KIVI, groups of a whole chunk for keys and of 64 for values, 3 bits. The paper's
    uneven levels and its list of outliers are left out.
    Size: 3.375 bits.
    Paper: KVQuant, arXiv 2401.18079.

The two numbers of a group are the note of ``MinMaxGroups``, which maps values to numbers from 0 to
``2 ** bits - 1``; ``Rounded`` makes codes of these. Other methods use both, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.floats import limited_to_fp16
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.literature.stages.head_pipelines import (
    HalfRange,
    HeadPipelines,
    head_pipelines,
    planes_of,
)
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout

SMALLEST_STEP = np.float32(2.0**-14)
GROUP = 32  # values that share a smallest value and a step
Axis: TypeAlias = Literal["tokens", "width"]


def kivi(bits: int = 2, group: int = GROUP) -> Codec:
    """Make the preset ``kivi``."""
    keys = functools.partial(grouped, bits=bits, along="tokens", group=group)
    values = functools.partial(grouped, bits=bits, along="width", group=group)
    return StackCodec("kivi.1", HeadPipelines(keys, values), least_bits=(bits, bits))


def grouped(shape: StackShape, bits: int, along: Axis, group: int = GROUP) -> Pipeline:
    """Make the pipeline of KIVI: groups of ``group`` values, codes of ``bits``."""
    groups, coder = MinMaxGroups(shape, bits, group, along), planes_of(shape, bits)
    return Pipeline(shape, (), HalfRange(shape), (groups,), Rounded(bits), coder)


@dataclass(frozen=True)
class KVQuant:
    """Learns nothing; uses the RoPE of the keys, which every profile has."""

    bits: int = 3

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        def grouped_before_rope(shape: StackShape, group: int, along: Axis) -> Pipeline:
            groups, turn = (
                MinMaxGroups(shape, self.bits, group, along),
                UnRope(shape, profile.ropes),
            )
            coder = planes_of(shape, self.bits)
            return Pipeline(shape, (turn,), HalfRange(shape), (groups,), Rounded(self.bits), coder)

        keys = functools.partial(grouped_before_rope, group=128, along="tokens")
        values = functools.partial(grouped_before_rope, group=64, along="width")
        return head_pipelines(layout, keys, values)


KVQUANT = KVQuant()


class MinMaxGroups:
    """Scales each group to numbers from 0 to ``2 ** bits - 1``. Implements ``Transform``."""

    def __init__(self, shape: StackShape, bits: int, group: int, along: Axis) -> None:
        """``group``: the number of values along that axis that share a smallest and a step."""
        self._shape, self._group, self._along = shape, group, along
        self._largest = np.float32((1 << bits) - 1)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        groups = self._groups(stack)
        lows = limited_to_fp16(groups.min(-1))
        wide_lows = lows.astype(np.float32)
        spans = groups.max(-1) - wide_lows
        steps = limited_to_fp16(np.maximum(spans / self._largest, SMALLEST_STEP))
        scaled = groups - wide_lows[..., None]
        scaled /= steps.astype(np.float32)[..., None]
        return self._ungrouped(scaled, stack.shape[1]), lows.tobytes() + steps.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        shape = self._note_shape(num_tokens)
        lows, steps = (reader.take("<f2", *shape).astype(np.float32) for _ in range(2))
        if not (np.isfinite(lows).all() and np.isfinite(steps).all()):
            raise Corrupt("a group's bounds are none that were written")
        return lows, steps

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        assert isinstance(note, tuple)
        lows, steps = note
        values = self._groups(stack) * steps[..., None]
        values += lows[..., None]
        return self._ungrouped(values, stack.shape[1])

    def note_nbytes(self, num_tokens: int) -> int:
        return 4 * math.prod(self._note_shape(num_tokens))

    def _note_shape(self, num_tokens: int) -> tuple[int, int, int]:
        others, length = self._shape.width, num_tokens
        if self._along == "width":
            others, length = length, others
        return self._shape.num_units, others, -(-length // self._group)

    def _groups(self, stack: np.ndarray) -> np.ndarray:
        """Return (units, others, groups, group); the last group repeats its last value."""
        moved = stack.swapaxes(1, 2) if self._along == "tokens" else stack
        return in_blocks(moved, self._group)

    def _ungrouped(self, groups: np.ndarray, num_tokens: int) -> np.ndarray:
        flat = groups.reshape(*groups.shape[:2], -1)
        if self._along == "tokens":
            return flat[:, :, :num_tokens].swapaxes(1, 2)
        return flat[:, :, : self._shape.width]


def in_blocks(stack: np.ndarray, length: int) -> np.ndarray:
    """Split the last axis, (..., blocks, length); its last value is repeated to a whole block."""
    if padding := -stack.shape[2] % length:
        stack = np.pad(stack, ((0, 0), (0, 0), (0, padding)), mode="edge")
    return stack.reshape(*stack.shape[:2], -1, length)


class Rounded:
    """Rounds to the nearest integer from 0 to ``2 ** bits - 1``. Implements ``Quantiser``."""

    def __init__(self, bits: int) -> None:
        self._largest = (1 << bits) - 1

    def quantise(self, components: np.ndarray) -> np.ndarray:
        whole = np.rint(components)
        return np.clip(whole, 0, self._largest, out=whole).astype(np.uint8)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)
