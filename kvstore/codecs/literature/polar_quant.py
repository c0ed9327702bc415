"""PolarQuant: recursive polar coordinates of rotated rows.

Idea: sixteen neighbours are eight pairs; each pair is an angle and a radius; radii are paired
again, and so on for four levels, which leaves fifteen angles and one radius. For a rotated row, the
first angles are uniform, and later ones concentrate around 45 degrees, more with each level.
Formula: an angle of level l has the density sin(2 a)^(2^l - 1); it is quantised to Lloyd's levels
for that density.
Size: angles of 4, 2, 2 and 2 bits and a radius of 16: 3.875 bits.
Paper: PolarQuant, arXiv 2502.02617.
"""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import (
    COLUMN_BITS,
    HalfRange,
    HeadPipelines,
    from_columns,
    planes_of,
    to_columns,
)
from kvstore.codecs.literature.stages.levels import SignHadamard
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.errors import UnknownCodec

BLOCK = 16
LEVEL_BITS = (4, 2, 2, 2)  # of an angle, from the finest
GRID = 1 << 14  # points on the quarter circle, to compute levels
ROUNDS = 200


def polar() -> Codec:
    """Make the preset ``polar``."""
    return StackCodec("polar.1", HeadPipelines(_polar, _polar), least_bits=(3, 3))


class Polar:
    """Codes angles level by level, then the blocks' radii as fp16. Implements ``Quantiser``."""

    def __init__(self, width: int) -> None:
        """Raises ``UnknownCodec`` for a width that is not a multiple of a block."""
        if width % BLOCK:
            raise UnknownCodec(f"vectors of {width} values are no blocks of {BLOCK}; use codec raw")
        self._num_blocks = width // BLOCK

    @property
    def bits(self) -> np.ndarray:
        """The bits of every column of codes, int64 (angles + 2 * blocks,)."""
        angles = [[n] * self._angles_of(level) for level, n in enumerate(LEVEL_BITS)]
        return np.concatenate([*angles, COLUMN_BITS * self._num_blocks])

    def quantise(self, components: np.ndarray) -> np.ndarray:
        radii, columns = components, []
        for level in range(len(LEVEL_BITS)):
            first, second = radii[..., ::2], radii[..., 1::2]
            columns.append(_angle_codes(np.arctan2(second, first), level))
            radii = np.hypot(first, second)
        return np.concatenate([*columns, to_columns(radii)], axis=-1)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        ends = np.cumsum([self._angles_of(level) for level in range(len(LEVEL_BITS))])
        *columns, halves = np.split(codes, ends, axis=-1)
        radii = from_columns(halves)
        for level in range(len(LEVEL_BITS) - 1, -1, -1):
            angles, pairs = angle_levels(level), np.empty((*radii.shape, 2), np.float32)
            np.multiply(radii, np.cos(angles)[columns[level]], out=pairs[..., 0])
            np.multiply(radii, np.sin(angles)[columns[level]], out=pairs[..., 1])
            radii = pairs.reshape(*radii.shape[:-1], 2 * radii.shape[-1])
        return radii

    def _angles_of(self, level: int) -> int:
        return self._num_blocks * BLOCK >> (level + 1)


def _angle_codes(angles: np.ndarray, level: int) -> np.ndarray:
    levels = angle_levels(level)
    if level == 0:  # equal cells of the whole circle
        cells = np.floor(angles * np.float32(len(levels) / (2 * np.pi)))
        return cells.astype(np.int8).view(np.uint8) % len(levels)
    codes = np.zeros(angles.shape, np.uint8)
    for bound in (levels[1:] + levels[:-1]) / 2:
        codes += angles > bound
    return codes


@functools.cache
def angle_levels(level: int) -> np.ndarray:
    """Return Lloyd's levels for the angles of normal values, fp32 (2 ** bits,)."""
    num_levels = 1 << LEVEL_BITS[level]
    if level == 0:
        circle = (np.arange(num_levels) + 0.5) * (2 * np.pi / num_levels)
        return circle.astype(np.float32)
    angles = (np.arange(GRID) + 0.5) * (np.pi / 2 / GRID)
    density = np.sin(2 * angles) ** ((1 << level) - 1)
    shares = (np.arange(num_levels) + 0.5) / num_levels
    levels = np.interp(shares, np.cumsum(density) / density.sum(), angles)
    for _ in range(ROUNDS):
        cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, angles)
        levels = np.bincount(cells, density * angles) / np.bincount(cells, density)
    return levels.astype(np.float32)


def _polar(shape: StackShape) -> Pipeline:
    rotation, quantiser = SignHadamard(shape), Polar(shape.width)
    coder = planes_of(shape, quantiser.bits)
    return Pipeline(shape, (), HalfRange(shape), (rotation,), quantiser, coder)
