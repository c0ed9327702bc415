"""Transforms that a model determines: undoes its RoPE, subtracts its means, weights its heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.codecs.stacks.pipeline import WithoutNote
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.shapes import Rope, angle_tables


@dataclass(frozen=True)
class _Turn:
    """Columns of some units with the same rotation: whole units, or one head of a unit."""

    units: tuple[int, ...]
    start: int
    rope: Rope


class UnRope(WithoutNote):
    """Rotates keys back to position zero, where neighbouring tokens resemble each other.

    A channel that RoPE rotated has no mean and no preferred direction; rotated back, a key has
    both, and a basis can be learned for it. The rotation is orthogonal, so errors keep their size.
    Implements ``Transform``.
    """

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

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return self._turned(stack, first_token, 1)

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


class ModelMean(WithoutNote):
    """Subtracts the model's means, which takes no bytes. Implements ``Transform``."""

    def __init__(self, shape: StackShape, means: np.ndarray) -> None:
        """``means``: fp32 (elements of a token,), of keys without RoPE."""
        self._means = means[shape.elements][:, None].astype(np.float32)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        stack -= self._means
        return stack, b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        stack += self._means
        return stack


class HeadMetric(WithoutNote):
    """Multiplies each head vector by the root of its sensitivities to errors, a matrix.

    Later tokens are sensitive to errors of a head along some directions, and not along others.
    Afterwards an error of one size costs the same in any direction, so one step for all is right.
    Implements ``Transform``.
    """

    def __init__(self, shape: StackShape, roots: np.ndarray) -> None:
        """``roots``: fp32 (units, sum of squared head dims): the symmetric matrix of each head
        vector of a unit, row by row.

        All are invertible.
        """
        self._columns, self._forward, self._backward = [], [], []
        first = 0
        for start, vector in zip(shape.starts, shape.units[0], strict=True):
            dim = vector.dim
            root = roots[:, first : first + dim * dim].reshape(-1, dim, dim).astype(np.float64)
            self._columns.append(slice(start, start + dim))
            self._forward.append(root.astype(np.float32))
            self._backward.append(np.linalg.inv(root).astype(np.float32))
            first += dim * dim

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        return self._mapped(stack, self._forward), b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return self._mapped(stack, self._backward)

    def _mapped(self, stack: np.ndarray, matrices: list[np.ndarray]) -> np.ndarray:
        mapped = np.empty(stack.shape, np.float32)
        for columns, matrix in zip(self._columns, matrices, strict=True):
            np.matmul(stack[:, :, columns], matrix, out=mapped[:, :, columns])
        return mapped
