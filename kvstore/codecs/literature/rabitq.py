"""RaBitQ: rotated keys without their cluster's centroid, as a few bits per value.

Idea: keys fall into clusters, as in an inverted file (IVF). The residual to the nearest centroid is
rotated and replaced by the point of a grid with the most similar direction: a corner of a cube for
one bit, and with more bits the best of several sizes of a grid (extended RaBitQ). Centroids are
learned from a model's keys without RoPE, or from the packed rows, which then store them. Values are
TurboQuant's with 4 bits here, because RaBitQ does not cover values.
Formula: k = centroid + f H^T g with the grid point g and f = |r|^2 / <H r, g> of the residual r,
which makes products with a query unbiased; ``unbiased=0`` takes the f of the least error. The paper
counts common bits of g and of a query of 4 bits (Hamming); here planes of g are multiplied by the
query itself, which adds no error, and compiled takes less time than a product with fp32 keys.
Size: keys ``bits`` + 16 / D bits and log2(clusters) for each key; 16 clusters / tokens bits more
for centroids that are stored. Usually 2.5 + 16 / D bits with values, and one centroid a chunk.
Paper: RaBitQ, SIGMOD 2024, arXiv 2405.12497; extended: arXiv 2409.09913.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.floats import FP16_LARGEST, limited_to_fp16
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.literature.stages.head_pipelines import (
    HeadPipelines,
    head_pipelines,
    planes_of,
    sided_shapes,
)
from kvstore.codecs.literature.stages.levels import SignHadamard, rotated_levels
from kvstore.codecs.literature.stages.vectors import UNIT, k_means, nearest
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import Pipeline, Transform, gain_factors
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import KEY, StackShape
from kvstore.codecs.stages.gain import HalfGain
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout

VALUE_BITS = 4
ROUNDS = 10  # of k-means
# For 2 to 8 bits, the spacing of the grid with the least error for normal values (Max, 1960).
SPACINGS = (2.0, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
SIZES = np.linspace(0.7, 1.45, 16, dtype=np.float32)  # of the grid that are tried


def rabitq(bits: int = 1, clusters: int = 1, unbiased: int = 1) -> Codec:
    """Make the preset ``rabitq`` with centroids of the packed rows."""

    def keys(shape: StackShape) -> Pipeline:
        return _grid(shape, (Clusters(shape, clusters),), bits, bool(unbiased))

    return StackCodec("rabitq.2", HeadPipelines(keys, _values), least_bits=(bits, VALUE_BITS))


@dataclass(frozen=True)
class RaBitQ:
    """Learns ``clusters`` centroids of each head's keys."""

    bits: int = 1
    clusters: int = 1
    unbiased: int = 1
    most_tokens: int = 4096

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        learned = {}
        for shape, side in sided_shapes(samples.layout):
            if side == KEY:
                rows = np.concatenate(list(samples.stacks(shape)), axis=1)
                rows = rows[:, :: -(-rows.shape[1] // self.most_tokens)]
                learned[f"centroids.{shape.width}"] = centroids_of(rows, self.clusters)
        return learned

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        def keys(shape: StackShape) -> Pipeline:
            centroids = learned[f"centroids.{shape.width}"]
            before = UnRope(shape, profile.ropes), Clusters(shape, self.clusters, centroids)
            return _grid(shape, before, self.bits, bool(self.unbiased))

        return head_pipelines(layout, keys, _values)


RABITQ = RaBitQ()


class Clusters:
    """Subtracts the nearest centroid from each row. Implements ``Transform``.

    The note has the centroids in fp16, unless they are learned, and each row's cluster.
    """

    def __init__(
        self, shape: StackShape, num_clusters: int, centroids: np.ndarray | None = None
    ) -> None:
        """``centroids``: fp16 (units, clusters, width); None = of the packed rows."""
        self._shape = (shape.num_units, num_clusters, shape.width)
        if centroids is not None and centroids.shape != self._shape:
            raise ValueError(f"centroids of {centroids.shape}, not {self._shape}")
        self._learned = centroids
        num_bits = (num_clusters - 1).bit_length()
        self._numbers = BitPlanes(np.full((shape.num_units, 1), num_bits))

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        usual = np.clip(np.nan_to_num(stack), -FP16_LARGEST, FP16_LARGEST)
        stored = self._learned
        if stored is None:
            stored = centroids_of(usual, self._shape[1])
        centroids = stored.astype(np.float32)
        numbers = np.zeros(stack.shape[:2], np.uint8)
        if self._shape[1] > 1:
            numbers[:] = [nearest(x, y) for x, y in zip(usual, centroids, strict=True)]
        note = b"" if self._learned is not None else stored.tobytes()
        stack -= np.take_along_axis(centroids, numbers[:, :, None], axis=1)
        return stack, note + self._numbers.write(numbers[:, :, None])

    def read(self, reader: Reader, num_tokens: int) -> object:
        stored = self._learned
        if stored is None:
            stored = np.nan_to_num(reader.take("<f2", *self._shape))
        numbers = self._numbers.read(reader, num_tokens)
        return stored.astype(np.float32), np.minimum(numbers, self._shape[1] - 1)

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        assert isinstance(note, tuple)
        centroids, numbers = note
        stack += np.take_along_axis(centroids, numbers, axis=1)
        return stack

    def note_nbytes(self, num_tokens: int) -> int:
        stored = 2 * int(np.prod(self._shape)) if self._learned is None else 0
        return stored + self._numbers.nbytes(num_tokens)


def centroids_of(rows: np.ndarray, num_clusters: int) -> np.ndarray:
    """Return the centroids of the rows of each unit, fp16 (units, clusters, width).

    ``rows``: fp32 (units, tokens, width) within the range of fp16.
    """
    if num_clusters == 1:  # sums of whole numbers are exact in fp64
        total = np.rint(rows / np.float32(UNIT)).sum(axis=1, keepdims=True, dtype=np.float64)
        return limited_to_fp16(np.rint(total / rows.shape[1]) * UNIT)
    starts = np.arange(num_clusters) * rows.shape[1] // num_clusters
    found = []
    for unit in np.rint(rows.astype(np.float64) / UNIT):
        found.append(k_means(unit, unit[starts], ROUNDS) * UNIT)
    return limited_to_fp16(np.stack(found))


class Grid:
    """Takes the point of a grid with the most similar direction. Implements ``Quantiser``."""

    def __init__(self, num_bits: int) -> None:
        self._num_bits = num_bits
        self._spacing = np.float32(SPACINGS[num_bits - 1])
        self._middle = np.float32((1 << num_bits) / 2 - 0.5)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        best = self._nearest(components, np.float32(1))
        if self._num_bits == 1:
            return best.astype(np.uint8)
        most = self._cosine(components, best)
        for size in SIZES:
            codes = self._nearest(components, size)
            cosine = self._cosine(components, codes)
            is_better = cosine > most
            best[is_better] = codes[is_better]
            most = np.maximum(most, cosine)
        return best.astype(np.uint8)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        return (codes - self._middle) * self._spacing

    def _nearest(self, components: np.ndarray, size: np.float32) -> np.ndarray:
        """Return the codes in a grid of that size, fp32; the same shape."""
        codes = components / (self._spacing * size)
        codes += self._middle
        np.rint(codes, out=codes)
        return np.clip(codes, 0, 2 * self._middle, out=codes)

    def _cosine(self, components: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return cosines times the components' lengths, fp32 (units, tokens)."""
        points = codes - self._middle
        along = np.einsum("utw,utw->ut", components, points)
        return along / np.sqrt(np.einsum("utw,utw->ut", points, points))


def _unbiased(grid: Grid, components: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the factors that make products unbiased, fp32 (units, tokens, 1)."""
    along = np.einsum("utw,utw->ut", components, grid.restore(codes))
    return gain_factors(np.einsum("utw,utw->ut", components, components), along)


def _grid(
    shape: StackShape, before: tuple[Transform, ...], bits: int, is_unbiased: bool
) -> Pipeline:
    grid = Grid(bits)
    return Pipeline(
        shape,
        before,
        HalfGain(shape),
        (SignHadamard(shape),),
        grid,
        planes_of(shape, bits),
        functools.partial(_unbiased, grid) if is_unbiased else None,
    )


def _values(shape: StackShape) -> Pipeline:
    return rotated_levels(shape, VALUE_BITS)
