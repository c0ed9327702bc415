"""VecInfer: smoothed keys, rotated, and four neighbours as one of 256 vectors.

Idea: a vector quantiser has a smaller error than a scalar one with as many bits, and smoothing
prepares keys for it.
Formula: each channel of the keys over the root of its largest value, then signs and Hadamard, then
the nearest vector of a codebook. The paper learns smoothing and codebook. Here the factors are
computed from the chunk, at two bytes a channel, and the codebook by k-means of normal vectors: no
profile is needed.
Size: 2 + 16 / D bits, keys 16 / 128 bits more. With 1 bit, a vector has eight neighbours.
Paper: VecInfer, arXiv 2510.06175.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.levels import rotated
from kvstore.codecs.literature.stages.vectors import NUM_VECTORS, ProductVectors, normal_vectors
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.errors import Corrupt

CODE_BITS = NUM_VECTORS.bit_length() - 1  # for all neighbours of a vector
SMALLEST, LARGEST = np.float32(2.0**-10), np.float32(2.0**10)


def vecinfer(bits: int = 2) -> Codec:
    """Make the preset ``vecinfer``."""
    make = (functools.partial(x, dim=CODE_BITS // bits) for x in (_smoothed_vectors, _vectors))
    return StackCodec("vecinfer.1", HeadPipelines(*make), least_bits=(bits, bits))


class ChunkScale:
    """Divides each channel by the root of its largest value. Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        self._shape = (shape.num_units, 1, shape.width)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        with np.errstate(all="ignore"):
            sizes = np.abs(np.where(np.isfinite(stack), stack, 0)).max(axis=1, keepdims=True)
            scales = np.clip(np.sqrt(sizes), SMALLEST, LARGEST).astype("<f2")
            return stack / scales.astype(np.float32), scales.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        scales = reader.take("<f2", *self._shape).astype(np.float32)
        if not np.all((scales >= SMALLEST) & (scales <= LARGEST)):
            raise Corrupt("a channel's scale is none that was written")
        return scales

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return stack * note

    def note_nbytes(self, num_tokens: int) -> int:
        return 2 * self._shape[0] * self._shape[2]


def _vectors(shape: StackShape, dim: int) -> Pipeline:
    bits = np.full(shape.width // dim, CODE_BITS)
    return rotated(shape, ProductVectors(normal_vectors(dim)), bits)


def _smoothed_vectors(shape: StackShape, dim: int) -> Pipeline:
    return dataclasses.replace(_vectors(shape, dim), before=(ChunkScale(shape),))
