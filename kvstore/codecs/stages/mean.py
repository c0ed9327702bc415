"""Subtracts the model's means from every channel."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import StackShape


class ModelMean:
    """Subtracts the model's means, which takes no bytes. Implements ``Transform``."""

    def __init__(self, shape: StackShape, means: np.ndarray) -> None:
        """``means``: fp32 (elements of a token,), of keys without RoPE."""
        self._means = means[shape.elements][:, None].astype(np.float32)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        stack -= self._means
        return stack, b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        stack += self._means
        return stack

    def note_nbytes(self, num_tokens: int) -> int:
        return 0
