"""The 8-bit KV caches of engines, ``fp8`` and ``q8``, as baselines for comparison.

``fp8``: floats with a sign, four bits of exponent and three of mantissa (e4m3, no infinity, the
    largest is 448), with a scale for K and one for V of a layer, so that their largest value fits.
    Formula: x = scale * e4m3; the scale is fp32, here one for each chunk.
    Size: 8 bits, and almost nothing for the scales.
    Format: FP8 formats for deep learning, arXiv 2209.05433; vLLM's ``kv_cache_dtype = "fp8"``.

``q8``: blocks of 32 values with 8 bits each, as llama.cpp's ``q8_0``.
    Idea: neighbours in a row share a scale, which maps the largest of them to 127.
    Formula: x = scale * code, code from -127 to 127; the scale is fp16.
    Size: 8.5 bits.
    Project: llama.cpp, ``--cache-type-k q8_0 --cache-type-v q8_0``.
"""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.floats import limited_to_fp16
from kvstore.codecs.literature.groups import Rounded, in_blocks
from kvstore.codecs.literature.stages.head_pipelines import HalfRange, HeadPipelines, planes_of
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import NoGain
from kvstore.errors import Corrupt

LARGEST = np.float32(448)  # of e4m3
LARGEST_CODE = 0x7E  # 0x7F is NaN
SMALLEST_NORMAL = np.float32(2.0**-6)
STEPS_BELOW = np.float32(2.0**9)  # steps per 1.0 below that: smaller values have equal steps
SMALLEST_SCALE = np.float32(2.0**-100)

BLOCK = 32  # values that share a scale in q8
LARGEST_NUMBER = np.float32(127)
MIDDLE = np.float32(128)  # added, so that codes are positive
SMALLEST_BLOCK_SCALE = np.float32(2.0**-24)


def fp8() -> Codec:
    """Make the preset ``fp8``."""
    return StackCodec("fp8.1", HeadPipelines(_scaled, _scaled), least_bits=(8, 8))


def q8() -> Codec:
    """Make the preset ``q8``."""
    return StackCodec("q8.1", HeadPipelines(_blocks, _blocks), least_bits=(8, 8))


def _scaled(shape: StackShape) -> Pipeline:
    scale, coder = TensorScale(shape), planes_of(shape, 8)
    return Pipeline(shape, (), NoGain(shape), (scale,), Float8(), coder)


def _blocks(shape: StackShape) -> Pipeline:
    scale, coder = BlockScale(shape), planes_of(shape, 8)
    return Pipeline(shape, (), HalfRange(shape), (scale,), Rounded(8), coder)


class TensorScale:
    """Divides K, or V, of a layer so that its largest value fits e4m3. Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        arrays = np.array([unit[0].array for unit in shape.units])
        # The number of each unit's array among those of this stack.
        self._arrays = np.unique(arrays, return_inverse=True)[1].reshape(-1)
        self._count = int(self._arrays.max()) + 1

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        largest = np.zeros(self._count, np.float32)
        np.maximum.at(largest, self._arrays, np.abs(stack).max((1, 2), initial=0))
        scales = np.maximum(largest / LARGEST, SMALLEST_SCALE)
        stack /= self._of_units(scales)
        return stack, scales.astype("<f4").tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        scales = reader.take("<f4", self._count)
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise Corrupt("a scale is none that was written")
        return scales

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        assert isinstance(note, np.ndarray)
        return stack * self._of_units(note)

    def note_nbytes(self, num_tokens: int) -> int:
        return 4 * self._count

    def _of_units(self, scales: np.ndarray) -> np.ndarray:
        return scales[self._arrays][:, None, None]


class Float8:
    """Rounds to the nearest e4m3, ties to even. Implements ``Quantiser``."""

    def quantise(self, components: np.ndarray) -> np.ndarray:
        sizes = np.minimum(np.abs(components), LARGEST)
        bits = sizes.view(np.uint32)
        rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # exponent, and three bits
        normal = np.minimum(rounded.astype(np.int32) - (120 << 3), LARGEST_CODE)
        below = np.rint(sizes * STEPS_BELOW).astype(np.int32)
        codes = np.where(sizes < SMALLEST_NORMAL, below, normal).astype(np.uint8)
        return codes | (np.signbit(components).astype(np.uint8) << 7)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return float8_values()[codes]


@functools.cache
def float8_values() -> np.ndarray:
    """The value of each code, fp32 (256,); NaN counts as the largest value."""
    codes = np.minimum(np.arange(128), LARGEST_CODE)
    exponents, mantissas = np.divmod(codes, 8)
    normal = (1 + mantissas / 8) * np.exp2(exponents - 7.0)
    sizes = np.where(exponents > 0, normal, mantissas / STEPS_BELOW)
    return np.concatenate([sizes, -sizes]).astype(np.float32)


class BlockScale:
    """Scales each block of a row to numbers from 1 to 255. Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        self._shape = shape
        self._num_blocks = -(-shape.width // BLOCK)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        blocks = in_blocks(stack, BLOCK)
        largest = np.abs(blocks).max(-1)
        scales = limited_to_fp16(np.maximum(largest / LARGEST_NUMBER, SMALLEST_BLOCK_SCALE))
        numbers = blocks / scales.astype(np.float32)[..., None]
        numbers = np.clip(numbers, -LARGEST_NUMBER, LARGEST_NUMBER) + MIDDLE
        return self._rows(numbers), scales.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        shape = (self._shape.num_units, num_tokens, self._num_blocks)
        scales = reader.take("<f2", *shape).astype(np.float32)
        if not np.isfinite(scales).all():
            raise Corrupt("a block's scale is none that was written")
        return scales

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        assert isinstance(note, np.ndarray)
        return self._rows((in_blocks(stack, BLOCK) - MIDDLE) * note[..., None])

    def note_nbytes(self, num_tokens: int) -> int:
        return 2 * self._shape.num_units * num_tokens * self._num_blocks

    def _rows(self, blocks: np.ndarray) -> np.ndarray:
        return blocks.reshape(*blocks.shape[:2], -1)[:, :, : self._shape.width]
