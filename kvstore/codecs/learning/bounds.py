"""The least bits that an error takes in theory, for a model's own KV.

A codec that rotates rows to their principal axes spends bits on components of known variances. If
these were Gaussian, reverse water-filling (Cover and Thomas, 10.3.3) would give the minimum: every
component keeps the same error, the water's level, or its whole variance if that is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvstore.codecs.learning.samples import SMALLEST_GAIN, Samples, unit_rows
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import root_mean_squares
from kvstore.codecs.stages.model_transforms import HeadMetric, ModelMean
from kvstore.shapes import KVRun

BISECTIONS = 60


class RateDistortionBound:
    """The least error of the codecs of one scope, in the measure by which they learn.

    That measure is of rows without RoPE and without the model's mean, relative to their own size,
    and weighted by how much errors matter. At an error of 1, nothing of the rows is left.
    """

    def __init__(self, samples: Samples, scope: Scope, means: np.ndarray) -> None:
        """Computes the variances, which takes as long as learning a codec of this scope.

        ``means``: fp32 (elements of a token,).
        """
        self.scope = scope
        self._shapes = stack_shapes(scope, samples.layout)
        self._means = means
        parts = [_variances(samples, x, means).reshape(-1) for x in self._shapes]
        variances = np.maximum(np.concatenate(parts), 0)
        self._total = float(variances.mean())
        self._variances = variances / self._total
        self._samples = replace(samples, texts=())

    def error(self, exact: KVRun, restored: KVRun) -> float:
        """Returns the mean square error of ``restored``.

        Both runs begin with a session's first token.
        """
        squares, count = 0.0, 0
        for shape in self._shapes:
            stack = self._samples.stack(shape, exact)
            missed = self._samples.stack(shape, restored) - stack
            centred, _ = ModelMean(shape, self._means).forward(stack, 0)
            gains = np.maximum(root_mean_squares(centred, shape), SMALLEST_GAIN)
            for number, part in enumerate(shape.gain_groups):
                missed[:, :, part.start : part.stop] /= gains[:, :, number, None]
            missed, _ = HeadMetric(shape, self._samples.roots(shape)).forward(missed, 0)
            squares += float(np.square(missed).sum(dtype=np.float64))
            count += missed.size
        return squares / count / self._total

    def bits(self, error: float) -> float:
        """Returns the fewest bits per element that leave this error. Gains are not counted."""
        low, high = 0.0, float(self._variances.max())
        for _ in range(BISECTIONS):
            level = (low + high) / 2
            too_much = float(np.minimum(self._variances, level).mean()) > error
            low, high = (low, level) if too_much else (level, high)
        return self._at(high)[0]

    def curve(self, most_bits: float, num_points: int = 40) -> Iterator[tuple[float, float]]:
        """Yields bits per element and the error that they leave, starting at 0 bits."""
        for level in np.geomspace(float(self._variances.max()), 1e-9, 12 * num_points):
            bits, error = self._at(float(level))
            if bits > most_bits:
                return
            yield bits, error

    def _at(self, level: float) -> tuple[float, float]:
        if level <= 0:
            return float("inf"), 0.0
        shares = np.maximum(self._variances / level, 1)
        return float(np.log2(shares).mean() / 2), float(np.minimum(self._variances, level).mean())


def gaussian_gap_db(bits: float, error: float) -> float:
    """Returns how far an error lies above the least error of a white Gaussian source, in dB.

    ``error``: relative; ``bits``: per element.
    """
    return float(10 * np.log10(error) + 20 * np.log10(2) * bits)


def _variances(samples: Samples, shape: StackShape, means: np.ndarray) -> np.ndarray:
    """Returns the variances of principal components, fp32 (units, width), ascending."""
    metric = HeadMetric(shape, samples.roots(shape))
    covariance = np.zeros((shape.num_units, shape.width, shape.width), np.float32)
    count = 0
    for stack, _ in unit_rows(samples, shape, means, lambda x: root_mean_squares(x, shape)):
        rows, _ = metric.forward(stack, 0)
        covariance += np.matmul(rows.swapaxes(1, 2), rows)
        count += rows.shape[1]
    variances: np.ndarray = np.linalg.eigvalsh(covariance / max(count, 1))
    return variances
