"""Random signs, then a Hadamard matrix: makes all channels alike, without statistics of them.

The signs and matrices are those of ``rows.rotation``; here the product is orthonormal.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.literature.stages.head_pipelines import equal_bits, planes_of
from kvstore.codecs.literature.stages.levels import LloydMax
from kvstore.codecs.rows import rotation
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stacks.stage_protocols import Quantiser, WithoutNote
from kvstore.codecs.stages.gain import HalfGain
from kvstore.errors import UnknownCodec


class SignHadamard(WithoutNote):
    """Multiplies rows by signs and a Hadamard matrix. Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        """Raises ``UnknownCodec`` for a width for which no Hadamard matrix is known."""
        if rotation.order_of(shape.width) is None:
            raise UnknownCodec(f"vectors of {shape.width} values cannot be rotated; use codec raw")
        self._width = shape.width
        self._unit = np.float32(1 / np.sqrt(shape.width))

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        rows = np.ascontiguousarray(stack).reshape(-1, self._width)
        signed = rotation.flip_signs(rows, rotation.sign_masks(self._width))
        return (rotation.rotate(signed) * self._unit).reshape(stack.shape), b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        rows = np.ascontiguousarray(stack).reshape(-1, self._width)
        turned = rotation.rotate_back(rows) * self._unit
        return rotation.flip_signs(turned, rotation.sign_masks(self._width)).reshape(stack.shape)


def rotated(
    shape: StackShape, quantiser: Quantiser, bits: np.ndarray, is_fitted: bool = False
) -> Pipeline:
    """Makes a pipeline of norm (fp16), signs and Hadamard, ``quantiser``, bit planes.

    ``bits``: integers (columns of codes,). ``is_fitted``: see ``HalfGain``.
    """
    gain = HalfGain(shape, is_fitted)
    return Pipeline(shape, (), gain, (SignHadamard(shape),), quantiser, planes_of(shape, bits))


def rotated_levels(shape: StackShape, num_bits: int) -> Pipeline:
    """Makes ``rotated`` with Lloyd-Max levels and the norm correction: TurboQuant-MSE."""
    levels = normal_levels(shape, 1 << num_bits)
    return rotated(shape, levels, equal_bits(shape, num_bits), is_fitted=True)


def normal_levels(shape: StackShape, num_levels: int) -> LloydMax:
    """Makes a Lloyd-Max quantiser for components of deviation one."""
    size = (shape.num_units, shape.width)
    return LloydMax(np.full(size, num_levels), np.ones(size, np.float32))
