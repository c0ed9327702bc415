"""Subtracts means from every channel: the model's, learned once, or the chunk's own."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import FP16_LARGEST
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.sources import Shifted, Source
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


class ChunkMean:
    """Subtracts the chunk's means, stored in it as fp16; needs no profile.

    Implements ``Transform``.
    """

    def __init__(self, shape: StackShape) -> None:
        self._shape = (shape.num_units, 1, shape.width)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        with np.errstate(all="ignore"):
            means = np.where(np.isfinite(stack), stack, 0).mean(axis=1, keepdims=True)
            means = np.clip(np.nan_to_num(means), -FP16_LARGEST, FP16_LARGEST).astype("<f2")
            stack -= means.astype(np.float32)
        return stack, means.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> object:
        return np.nan_to_num(reader.take("<f2", *self._shape).astype(np.float32))

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        stack += note
        return stack

    def attended(self, source: Source, note: object) -> Source:
        assert isinstance(note, np.ndarray)
        return Shifted(source, note)

    def note_nbytes(self, num_tokens: int) -> int:
        return 2 * self._shape[0] * self._shape[2]
