"""Un-RoPE: rotates keys back to position zero, where neighbouring tokens resemble each other.

RoPE (arXiv 2104.09864) rotates pairs of channels by position times frequency. A rotated channel has
no mean and no preferred direction; rotated back, a key has both, and a basis can be learned for it.
The rotation is orthogonal, so errors keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.codecs.reader import Reader
from kvstore.codecs.rope import Rope, angle_tables
from kvstore.codecs.stacks.stack_shape import StackShape


@dataclass(frozen=True)
class _Turn:
    """Columns of some units with the same rotation: whole units, or one head of a unit."""

    units: tuple[int, ...]
    start: int
    rope: Rope


class UnRope:
    """Rotates keys back to position zero. Implements ``Transform``."""

    def __init__(self, shape: StackShape, ropes: tuple[Rope | None, ...]) -> None:
        """``ropes``: one for each layer, None for a layer without RoPE."""
        turns: dict[tuple[int, Rope], list[int]] = {}
        for number, unit in enumerate(shape.units):
            for start, vector in zip(shape.starts, unit, strict=True):
                rope = vector.rope(ropes)
                if rope is not None:
                    turns.setdefault((start, rope), []).append(number)
        self._turns = [_Turn(tuple(u), start, rope) for (start, rope), u in turns.items()]

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        return self._turned(stack, first_token, -1), b""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return self._turned(stack, first_token, 1)

    def note_nbytes(self, num_tokens: int) -> int:
        return 0

    def _turned(self, stack: np.ndarray, first_token: int, direction: int) -> np.ndarray:
        stack = np.ascontiguousarray(stack)
        fast = compiled_stages()
        for turn in self._turns:
            cos, sin = angle_tables(turn.rope, first_token, stack.shape[1])
            units = np.array(turn.units)
            if fast is not None:
                known = (cos, sin, np.float32(direction), turn.rope.interleaved)
                fast.turn_keys(stack, units, turn.start, *known)
                continue
            for part in np.array_split(units, max(len(units) // 8, 1)):  # parts stay in the cache
                columns = slice(turn.start, turn.start + turn.rope.num_channels)
                x = stack[part, :, columns]
                stack[part, :, columns] = _turn(x, cos, direction * sin, turn.rope.interleaved)
        return stack


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    half = x.shape[-1] // 2
    pair = (
        (np.s_[..., ::2], np.s_[..., 1::2])
        if interleaved
        else (np.s_[..., :half], np.s_[..., half:])
    )
    first, second = x[pair[0]], x[pair[1]]
    turned = np.empty_like(x)
    turned[pair[0]] = first * cos - second * sin
    turned[pair[1]] = first * sin + second * cos
    return turned
