"""The KV of some texts that a profile is learned from, and how much each head matters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.rope import Rope
from kvstore.codecs.stacks.stack_shape import StackShape, Unit
from kvstore.codecs.stages.un_rope import UnRope
from kvstore.shapes import KVLayout, KVRun

RIDGE = 1.0  # of a head's mean sensitivity, added to every direction
SMALLEST_METRIC = 1e-6  # of the mean over all heads: one that never matters is still kept


@dataclass(frozen=True, eq=False)
class Samples:
    """KV of several texts, each from its first token on, as an engine holds it.

    ``metrics``: fp32 (dim, dim), one for each head of K and of V (layer by layer, K then V): the
    mean outer product of how fast the loss on *later* tokens moves per relative error in a stored
    vector, keys without RoPE. None: all errors matter alike.
    """

    layout: KVLayout
    ropes: tuple[Rope | None, ...]
    texts: Sequence[KVRun]
    metrics: Sequence[np.ndarray] | None = None

    def stack(self, shape: StackShape, text: KVRun) -> np.ndarray:
        """Returns fp32 (units, tokens, width) of one text behind its sinks, keys without RoPE."""
        stack = shape.gather(text, NUM_SINKS, self.layout.dtype)
        turned, _ = UnRope(shape, self.ropes).forward(stack, NUM_SINKS)
        return turned

    def roots(self, shape: StackShape) -> np.ndarray:
        """Returns the roots of the metrics for ``HeadMetric``.

        They are fp32 (units, sum of squared dims).
        """
        roots = [[_root(x).reshape(-1) for x in self._metrics_of(unit)] for unit in shape.units]
        return np.stack([np.concatenate(unit) for unit in roots])

    def importances(self, shape: StackShape) -> np.ndarray:
        """Returns how much an error in each head vector matters, fp64 (units, vectors)."""
        metrics = [self._metrics_of(unit) for unit in shape.units]
        return np.array([[np.trace(x) / len(x) for x in unit] for unit in metrics])

    def _metrics_of(self, unit: Unit) -> list[np.ndarray]:
        """Returns one metric for each head vector; all metrics together have a mean of one."""
        if self.metrics is None:
            return [np.eye(vector.dim) for vector in unit]
        numbers = [self._first_heads[vector.array] + vector.head for vector in unit]
        return [self.metrics[number] / self._mean_metric for number in numbers]

    @functools.cached_property
    def _first_heads(self) -> list[int]:
        """Numbers of the first heads of K of the first layer, of V of it, ..."""
        counts = [layer.num_kv_heads for layer in self.layout.layers for _ in range(2)]
        return [sum(counts[:i]) for i in range(len(counts))]

    @functools.cached_property
    def _mean_metric(self) -> float:
        metrics = self.metrics or ()
        return max(float(np.mean([np.trace(x) / len(x) for x in metrics])), 1e-30)


def _root(metric: np.ndarray) -> np.ndarray:
    """Returns the root of a metric, fp32 (dim, dim).

    Directions that were hardly ever noticed keep a share: what was seen is little.
    """
    dim = len(metric)
    ridge = RIDGE * np.trace(metric) / dim + SMALLEST_METRIC
    values, axes = np.linalg.eigh(metric.astype(np.float64) + ridge * np.eye(dim))
    root: np.ndarray = (axes * np.sqrt(np.maximum(values, ridge))) @ axes.T
    return root.astype(np.float32)
