"""The KV of the texts from which a profile is learned: its means and axes, and how heads matter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, Unit, stack_shapes
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.shapes import DType, KVLayout, KVRun, Rope, slice_tokens

PIECE_TOKENS = 256  # tokens of a text at a time: a few rows of all layers take tens of mebibytes
RIDGE = 1.0  # times a head's mean sensitivity: added to every direction
SMALLEST_METRIC = 1e-6  # relative to all heads' mean: keeps a head that never matters
SMALLEST_GAIN = np.float32(2.0**-31)
# Maps rows, fp32 (units, tokens, width), to gains, fp32 (units, tokens, gain groups).
Sizes: TypeAlias = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Samples:
    """KV of several texts, each from its first token on, as an engine holds it.

    Texts of an fp32 engine may be in uint16 instead: the bf16 to which every codec rounds them.

    ``metrics``: fp32 (dim, dim), one for each head of K and of V (layer by layer, K then V): the
    mean outer product of the gradients of *later* tokens' attention by relative errors in a stored
    vector (see ``sensitivity``); keys without RoPE. None: all errors matter alike.
    """

    layout: KVLayout
    ropes: tuple[Rope | None, ...]
    texts: Sequence[KVRun]
    metrics: Sequence[np.ndarray] | None = None

    def stack(
        self, shape: StackShape, text: KVRun, first: int = NUM_SINKS, last: int | None = None
    ) -> np.ndarray:
        """Return fp32 (units, tokens, width) of tokens of one text, keys without RoPE.

        The tokens are those after the text's sinks, or ``first`` to ``last``.
        """
        part = text if last is None else slice_tokens(text, 0, last)
        stack = shape.gather(part, first, self._dtype_of(text))
        turned, _ = UnRope(shape, self.ropes).forward(stack, first)
        return turned

    def stacks(self, shape: StackShape) -> Iterator[np.ndarray]:
        """Yield ``stack`` of all texts, ``PIECE_TOKENS`` at a time."""
        for text in self.texts:
            for first in range(NUM_SINKS, text[0][0].shape[1], PIECE_TOKENS):
                yield self.stack(shape, text, first, first + PIECE_TOKENS)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all texts, sinks not counted."""
        return sum(max(0, text[0][0].shape[1] - NUM_SINKS) for text in self.texts)

    def _dtype_of(self, text: KVRun) -> DType:
        is_stored = text[0][0].dtype == np.uint16
        return "bfloat16" if self.layout.dtype == "float32" and is_stored else self.layout.dtype

    def roots(self, shape: StackShape) -> np.ndarray:
        """Return the roots of the metrics for ``HeadMetric``.

        They are fp32 (units, sum of squared dims).
        """
        roots = [[_root(x).reshape(-1) for x in self._metrics_of(unit)] for unit in shape.units]
        return np.stack([np.concatenate(unit) for unit in roots])

    def importances(self, shape: StackShape) -> np.ndarray:
        """Return how much an error in each head vector matters, fp64 (units, vectors)."""
        metrics = [self._metrics_of(unit) for unit in shape.units]
        return np.array([[np.trace(x) / len(x) for x in unit] for unit in metrics])

    def _metrics_of(self, unit: Unit) -> list[np.ndarray]:
        """Return one metric for each head vector; all metrics together have a mean of one."""
        if self.metrics is None:
            return [np.eye(vector.dim) for vector in unit]
        numbers = [self._first_heads[vector.array] + vector.head for vector in unit]
        return [self.metrics[number] / self._mean_metric for number in numbers]

    @functools.cached_property
    def _first_heads(self) -> list[int]:
        """The number of the first head of each array: K of the first layer, its V, ..."""
        counts = [layer.num_kv_heads for layer in self.layout.layers for _ in range(2)]
        return [sum(counts[:i]) for i in range(len(counts))]

    @functools.cached_property
    def _mean_metric(self) -> float:
        metrics = self.metrics or ()
        return max(float(np.mean([np.trace(x) / len(x) for x in metrics])), 1e-30)


def _root(metric: np.ndarray) -> np.ndarray:
    """Return the root of a metric, fp32 (dim, dim).

    Directions of hardly any sensitivity keep some weight, because samples are few.
    """
    dim = len(metric)
    ridge = RIDGE * np.trace(metric) / dim + SMALLEST_METRIC
    values, axes = np.linalg.eigh(metric.astype(np.float64) + ridge * np.eye(dim))
    root: np.ndarray = (axes * np.sqrt(np.maximum(values, ridge))) @ axes.T
    return root.astype(np.float32)


def element_means(samples: Samples) -> np.ndarray:
    """Return the mean of each element of a token, fp32 (elements,), keys without RoPE."""
    total = np.zeros(samples.layout.elements_per_token)
    for shape in stack_shapes(Scope("side"), samples.layout):
        for stack in samples.stacks(shape):
            total[shape.elements] += stack.sum(axis=1, dtype=np.float64)
    return (total / max(samples.num_tokens, 1)).astype(np.float32)


def unit_rows(
    samples: Samples,
    shape: StackShape,
    means: np.ndarray,
    sizes: Sizes,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all rows, piece by piece, without mean and of unit size, with their ``sizes``.

    Rows are fp32 (units, tokens, width), gains fp32 (units, tokens, gain groups). ``means``: fp32
    (elements of a token,).
    """
    centre = ModelMean(shape, means)
    for piece in samples.stacks(shape):
        stack, _ = centre.forward(piece, 0)
        gains = np.maximum(sizes(stack), SMALLEST_GAIN)
        for number, part in enumerate(shape.gain_groups):
            stack[:, :, part.start : part.stop] /= gains[:, :, number, None]
        yield stack, gains


def principal_axes(rows: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Learn the principal axes of stacks, fp32 (units, tokens, width), text by text.

    Returns deviations (units, width), largest first, and their axes as columns (units, width,
    width), fp32. Raises ``ValueError`` if there is no text.
    """
    covariance: np.ndarray | None = None
    num_tokens = 0
    for stack in rows:
        products = np.matmul(stack.swapaxes(1, 2), stack)
        covariance = products if covariance is None else covariance + products
        num_tokens += stack.shape[1]
    if covariance is None:
        raise ValueError("nothing can be learned from no text")
    variances, axes = np.linalg.eigh(covariance / num_tokens)
    deviations = np.sqrt(np.maximum(variances[:, ::-1], 0))
    return deviations, np.ascontiguousarray(axes[:, :, ::-1])
