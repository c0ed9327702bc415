"""Random signs, then a Hadamard matrix: makes all channels alike without knowing any of them.

See ``codecs.rotation``, whose signs and matrices these are; here the product is orthonormal.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs import rotation
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks import StackShape
from kvstore.errors import UnknownCodec


class SignHadamard:
    """Implements ``Transform``."""

    def __init__(self, shape: StackShape) -> None:
        """Raises ``UnknownCodec`` for a width that no Hadamard matrix is known for."""
        if rotation.order_of(shape.width) is None:
            raise UnknownCodec(f"vectors of {shape.width} values cannot be rotated; use codec raw")
        self._width = shape.width
        self._unit = np.float32(1 / np.sqrt(shape.width))

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        rows = np.ascontiguousarray(stack).reshape(-1, self._width)
        signed = rotation.flip_signs(rows, rotation.sign_masks(self._width))
        return (rotation.rotate(signed) * self._unit).reshape(stack.shape), b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        rows = np.ascontiguousarray(stack).reshape(-1, self._width)
        turned = rotation.rotate_back(rows) * self._unit
        return rotation.flip_signs(turned, rotation.sign_masks(self._width)).reshape(stack.shape)

    def note_nbytes(self, num_tokens: int) -> int:
        return 0
