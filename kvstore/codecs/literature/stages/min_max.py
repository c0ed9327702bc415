"""The smallest value of each group of values, and uniform steps from it, as in KIVI.

KIVI (arXiv 2402.02750) groups keys along tokens, channel by channel, and values along channels. The
two numbers of a group are fp16. They are the note of this transform, which maps values to numbers
from 0 to ``2 ** bits - 1``; ``Rounded`` makes codes of these.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.literature.stages.half_numbers import HalfRange
from kvstore.codecs.literature.stages.head_pipelines import equal_bits, planes_of
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.errors import Corrupt

SMALLEST_STEP = np.float32(2.0**-14)
GROUP = 32  # values that share a smallest value and a step
Axis: TypeAlias = Literal["tokens", "width"]


class MinMaxGroups:
    """Scales each group to numbers from 0 to ``2 ** bits - 1``. Implements ``Transform``."""

    def __init__(self, shape: StackShape, bits: int, group: int, along: Axis) -> None:
        """``group``: the number of values along that axis that share a smallest and a step."""
        self._shape, self._group, self._along = shape, group, along
        self._largest = np.float32((1 << bits) - 1)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        groups = self._groups(stack)
        lows = np.clip(groups.min(-1), -FP16_LARGEST, FP16_LARGEST).astype("<f2")
        wide_lows = lows.astype(np.float32)
        spans = groups.max(-1) - wide_lows
        steps = np.clip(spans / self._largest, SMALLEST_STEP, FP16_LARGEST).astype("<f2")
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
        return 4 * int(np.prod(self._note_shape(num_tokens)))

    def _note_shape(self, num_tokens: int) -> tuple[int, int, int]:
        others, length = self._shape.width, num_tokens
        if self._along == "width":
            others, length = length, others
        return self._shape.num_units, others, -(-length // self._group)

    def _groups(self, stack: np.ndarray) -> np.ndarray:
        """Returns (units, others, groups, group); the last group repeats its last value."""
        moved = stack.swapaxes(1, 2) if self._along == "tokens" else stack
        if padding := -moved.shape[2] % self._group:
            moved = np.pad(moved, ((0, 0), (0, 0), (0, padding)), mode="edge")
        return moved.reshape(*moved.shape[:2], -1, self._group)

    def _ungrouped(self, groups: np.ndarray, num_tokens: int) -> np.ndarray:
        flat = groups.reshape(*groups.shape[:2], -1)
        if self._along == "tokens":
            return flat[:, :, :num_tokens].swapaxes(1, 2)
        values: np.ndarray = flat[:, :, : self._shape.width]
        return values


class Rounded:
    """Rounds to the nearest integer from 0 to ``2 ** bits - 1``. Implements ``Quantiser``."""

    def __init__(self, bits: int) -> None:
        self._largest = (1 << bits) - 1

    def quantise(self, components: np.ndarray) -> np.ndarray:
        whole = np.rint(components)
        codes: np.ndarray = np.clip(whole, 0, self._largest, out=whole).astype(np.uint8)
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)


def grouped(shape: StackShape, bits: int, along: Axis, group: int = GROUP) -> Pipeline:
    """Makes the pipeline of KIVI: groups of ``group`` values, codes of ``bits``."""
    groups = MinMaxGroups(shape, bits, group, along)
    coder = planes_of(shape, equal_bits(shape, bits))
    return Pipeline(shape, (), HalfRange(shape), (groups,), Rounded(bits), coder)
