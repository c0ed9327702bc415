"""QJL: a sketch of signs for keys, groups for values.

Idea: a key needs no scale or zero point if only its norm is kept, and the signs of its projections
onto m random directions. Values go in groups of 32 with 2 bits, as in KIVI.
Formula: k is restored as sqrt(pi / 2) / m |k| S^T sign(S k), which is unbiased.
Size: keys m / D + 16 / D bits (m is D by default), values 3 bits.
Paper: QJL, arXiv 2406.03482.
"""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.groups import grouped
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines, planes_of
from kvstore.codecs.literature.stages.vectors import MOST_SKETCHED, directions, sign_size
from kvstore.codecs.stacks.pipeline import Pipeline, WithoutNote
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import HalfGain

VALUE_BITS = 2


def qjl(signs: int = 0) -> Codec:
    """Make the preset ``qjl`` with so many signs for each key; 0 = one for each value."""
    keys = functools.partial(_sketched, num_signs=signs)
    values = functools.partial(grouped, bits=VALUE_BITS, along="width")
    least = signs / MOST_SKETCHED if signs else 1
    return StackCodec("qjl.1", HeadPipelines(keys, values), least_bits=(least, VALUE_BITS))


class Sketch(WithoutNote):
    """Projects rows onto the directions; ``Sign`` follows. Implements ``Transform``."""

    def __init__(self, width: int, num_signs: int) -> None:
        self._directions = directions(width, num_signs)
        self._size = sign_size(width, num_signs)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        return np.matmul(stack, self._directions.T), b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return np.matmul(stack, self._directions * self._size)


class Sign:
    """Keeps the sign, two levels of size one; code 1 is positive. Implements ``Quantiser``."""

    def quantise(self, components: np.ndarray) -> np.ndarray:
        return (components > 0).astype(np.uint8)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return np.where(codes > 0, np.float32(1), np.float32(-1))


def _sketched(shape: StackShape, num_signs: int) -> Pipeline:
    num_signs = num_signs or shape.width
    sketch, gain = Sketch(shape.width, num_signs), HalfGain(shape, is_fitted=False)
    coder = planes_of(shape, np.ones(num_signs, np.int64))
    return Pipeline(shape, (), gain, (sketch,), Sign(), coder)
