"""q8: blocks of 32 values with 8 bits each, as llama.cpp's ``q8_0``; a baseline for comparison.

Idea: neighbours in a row share a scale, which maps the largest of them to 127.
Formula: x = scale * code, code from -127 to 127; the scale is fp16.
Size: 8.5 bits.
Project: llama.cpp, ``--cache-type-k q8_0 --cache-type-v q8_0``.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.literature.stages.half_numbers import HalfRange
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines, equal_bits, planes_of
from kvstore.codecs.literature.stages.min_max import Rounded
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.errors import Corrupt

BLOCK = 32  # values that share a scale
LARGEST = np.float32(127)
MIDDLE = np.float32(128)  # added, so that codes are positive
SMALLEST_SCALE = np.float32(2.0**-24)


def q8() -> Codec:
    """Makes the preset ``q8``."""
    return StackCodec("q8.1", HeadPipelines(_blocks, _blocks), least_bits=(8, 8))


class BlockScale:
    """Scales each block of a row to numbers from 1 to 255. Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape
        self._num_blocks = -(-shape.width // BLOCK)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        blocks = self._blocks(stack)
        largest = np.abs(blocks).max(-1)
        scales = np.clip(largest / LARGEST, SMALLEST_SCALE, FP16_LARGEST).astype("<f2")
        numbers = blocks / scales.astype(np.float32)[..., None]
        return self._rows(np.clip(numbers, -LARGEST, LARGEST) + MIDDLE), scales.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        shape = (self._shape.num_units, num_tokens, self._num_blocks)
        scales = reader.take("<f2", *shape).astype(np.float32)
        if not np.isfinite(scales).all():
            raise Corrupt("a block's scale is none that was written")
        return scales

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        assert isinstance(note, np.ndarray)
        return self._rows((self._blocks(stack) - MIDDLE) * note[..., None])

    def note_nbytes(self, num_tokens: int) -> int:
        return 2 * self._shape.num_units * num_tokens * self._num_blocks

    def _blocks(self, stack: np.ndarray) -> np.ndarray:
        """Returns (units, tokens, blocks, values); the last block repeats its last value."""
        padding = self._num_blocks * BLOCK - stack.shape[2]
        padded = np.pad(stack, ((0, 0), (0, 0), (0, padding)), mode="edge")
        return padded.reshape(*stack.shape[:2], self._num_blocks, BLOCK)

    def _rows(self, blocks: np.ndarray) -> np.ndarray:
        rows: np.ndarray = blocks.reshape(*blocks.shape[:2], -1)[:, :, : self._shape.width]
        return rows


def _blocks(shape: StackShape) -> Pipeline:
    coder = planes_of(shape, equal_bits(shape, 8))
    return Pipeline(shape, (), HalfRange(shape), (BlockScale(shape),), Rounded(8), coder)
