"""Lloyd-Max levels for normal values, and the rotation that makes values nearly normal.

A component, over its deviation, becomes the nearest level. Random signs, then a Hadamard matrix,
make all channels alike, without statistics of them; they are those of ``rows.rotation``, but here
the product is orthonormal.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.literature.stages.head_pipelines import planes_of
from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.lloyd_max import MAX_LEVELS, gauss_table
from kvstore.codecs.stacks.pipeline import Pipeline, Quantiser, WithoutNote
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import HalfGain
from kvstore.errors import UnknownCodec


class LloydMax:
    """Takes the number of bounds below a value as its code. Implements ``Quantiser``."""

    def __init__(self, num_levels: np.ndarray, deviations: np.ndarray) -> None:
        """``num_levels``: integers, ``deviations``: floats, both (units, components).

        One level means that the component is not stored.
        """
        self._shape = num_levels.shape
        self._deviations = np.array(deviations, np.float32).reshape(-1)
        self._scales = 1 / np.maximum(self._deviations, np.float32(1e-12))
        numbers, kinds = np.unique(num_levels, return_inverse=True)
        self._kinds = kinds.reshape(-1).astype(np.int64)
        self._counts = numbers.astype(np.int64) - 1
        self._are_alike = len(numbers) == 1 and bool(
            (self._deviations == self._deviations[0]).all()
        )
        self._bounds = np.full((len(numbers), MAX_LEVELS), np.inf, np.float32)
        self._levels = np.zeros((len(numbers), MAX_LEVELS), np.float32)
        for kind, number in enumerate(numbers.tolist()):
            self._bounds[kind, : number - 1] = gauss_table(number).all_bounds()
            self._levels[kind, :number] = gauss_table(number).all_levels()

    def quantise(self, components: np.ndarray) -> np.ndarray:
        scales, kinds = self._scales, self._kinds
        if self._are_alike:  # then rows need not be components
            rows = np.ascontiguousarray(components).reshape(-1, components.shape[2])
            scales, kinds = np.full(len(rows), scales[0]), np.zeros(len(rows), np.int64)
        else:
            rows = self._rows(components)
        codes = np.zeros(rows.shape, np.uint8)
        fast = compiled_stages()
        (fast.quantise_levels if fast else _quantise)(
            rows, scales, kinds, self._bounds, self._counts, codes
        )
        return codes.reshape(components.shape) if self._are_alike else self._stack(codes)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        rows = self._rows(codes)
        out = np.empty(rows.shape, np.float32)
        fast = compiled_stages()
        known = (self._kinds, self._levels, self._counts)
        (fast.restore_levels if fast else _restore)(rows, self._deviations, *known, out)
        return self._stack(out)

    def _rows(self, stack: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(stack.swapaxes(1, 2))
        return rows.reshape(len(self._kinds), stack.shape[1])

    def _stack(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(*self._shape, rows.shape[1]).swapaxes(1, 2)


def _quantise(
    rows: np.ndarray,
    scales: np.ndarray,
    kinds: np.ndarray,
    bounds: np.ndarray,
    counts: np.ndarray,
    codes: np.ndarray,
) -> None:
    for kind, count in enumerate(counts.tolist()):
        chosen = kinds == kind
        values = rows[chosen] * scales[chosen, None]
        below = np.zeros(values.shape, np.uint8)
        for bound in bounds[kind, :count]:
            below += values > bound
        codes[chosen] = below


def _restore(
    codes: np.ndarray,
    deviations: np.ndarray,
    kinds: np.ndarray,
    levels: np.ndarray,
    counts: np.ndarray,
    out: np.ndarray,
) -> None:
    for kind, count in enumerate(counts.tolist()):
        chosen = kinds == kind
        values = levels[kind][np.minimum(codes[chosen], count)]
        out[chosen] = values * deviations[chosen, None]


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
    shape: StackShape, quantiser: Quantiser, bits: int | np.ndarray, is_fitted: bool = False
) -> Pipeline:
    """Make a pipeline of norm (fp16), signs and Hadamard, ``quantiser``, bit planes.

    ``bits``: of every column of codes, or of each. ``is_fitted``: see ``HalfGain``.
    """
    gain = HalfGain(shape, is_fitted)
    return Pipeline(shape, (), gain, (SignHadamard(shape),), quantiser, planes_of(shape, bits))


def rotated_levels(shape: StackShape, num_bits: int) -> Pipeline:
    """Make ``rotated`` with Lloyd-Max levels and the norm correction: TurboQuant-MSE."""
    levels = normal_levels(shape, 1 << num_bits)
    return rotated(shape, levels, num_bits, is_fitted=True)


def normal_levels(shape: StackShape, num_levels: int) -> LloydMax:
    """Make a Lloyd-Max quantiser for components of deviation one."""
    size = (shape.num_units, shape.width)
    return LloydMax(np.full(size, num_levels), np.ones(size, np.float32))
