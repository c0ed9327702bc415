"""Axes and components of the samples of one stack, while a preset of one step is learned."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.codecs.entropy.tables import classes_of
from kvstore.codecs.pieces.gain import COARSE, root_mean_squares
from kvstore.codecs.pieces.integer_rows import StepRows
from kvstore.codecs.pieces.metric import HeadMetric
from kvstore.codecs.pieces.prediction import Predictors
from kvstore.codecs.prediction_design import Reach, band_of, expectations, predictors_of
from kvstore.codecs.samples import Samples
from kvstore.codecs.stacks import StackShape
from kvstore.codecs.statistics import principal_axes, unit_rows
from kvstore.codecs.step_design import rows_of

SAMPLED_TOKENS = 2048  # of all texts together: enough for the step and the symbol tables
# Deviation over step below which a component's rare codes cost more than they mend.
LIVE_RATIO = 0.3
COMPONENTS_ROUNDED_TO = 16
# Below a half: a code of one costs several bits more than a zero, and has to be worth them.
ROUNDING = 0.4


class Spectrum:
    """``deviations``: of components, fp32 (units, components), falling; ``left``: of what is not
    expected of them, the same where nothing is. ``basis``: columns (units, width, components).
    """

    def __init__(self, samples: Samples, shape: StackShape, means: np.ndarray) -> None:
        self._samples, self._shape, self._means = samples, shape, means
        self._metric = HeadMetric(shape, samples.roots(shape))
        self._sampled: list[np.ndarray] = []
        steps: list[np.ndarray] = []
        most = -(-SAMPLED_TOKENS // len(samples.texts))
        self.deviations, self.basis = principal_axes(self._rows(steps, most))
        self.left = self.deviations
        self._weights: list[np.ndarray] = []
        self._components = np.empty(0)
        self._reach = Reach(0, 0)
        self._gain_steps = np.rint(np.concatenate(steps, axis=1)).astype(np.int64)
        self._gain_centres = np.rint(self._gain_steps.mean(axis=1)).astype(np.int64)
        self._project()

    def _rows(self, steps: list[np.ndarray], most: int) -> Iterator[np.ndarray]:
        """All rows, once. Some are kept, for what needs less than a covariance does."""
        for stack, gains in unit_rows(self._samples, self._shape, self._means, self._sizes):
            steps.append(COARSE * np.log2(gains))
            rows, _ = self._metric.forward(stack, 0)
            self._sampled.append(rows[:, :: -(-rows.shape[1] // most)].copy())
            yield rows

    def _sizes(self, stack: np.ndarray) -> np.ndarray:
        sizes = root_mean_squares(stack, self._shape)
        steps = np.rint(COARSE * np.log2(np.maximum(sizes, 1e-9)))
        gains: np.ndarray = np.exp2(steps / COARSE).astype(np.float32)
        return gains

    def _project(self) -> None:
        """Components of the rows that were kept, fp32 (units, components, tokens)."""
        rows = np.concatenate(self._sampled, axis=1)
        self._components = np.matmul(self.basis.swapaxes(1, 2), rows.swapaxes(1, 2))

    def predict(self, reach: Reach, step: float) -> None:
        """Learn what first components are expected to be; goes through all samples again."""
        size = min(reach.components, self._shape.width) // 2 * 2
        depth = min(reach.depth, self._shape.num_units - 1)
        if not size or not depth:
            return
        self._reach = Reach(size, depth)
        found = expectations(band_of(self._first_components(size), self._reach), self._reach, step)
        self.left = self.deviations.copy()
        for unit, known in enumerate(found):
            self.basis[unit, :, :size] = self.basis[unit, :, :size] @ known.turn
            self.deviations[unit, :size] = known.deviations
            self.left[unit, :size] = known.left
        self._weights = [known.weights.astype(np.float32) for known in found]
        self._project()

    def _first_components(self, size: int) -> Iterator[np.ndarray]:
        first = np.ascontiguousarray(self.basis[:, :, :size])
        for stack, _ in unit_rows(self._samples, self._shape, self._means, self._sizes):
            rows, _ = self._metric.forward(stack, 0)
            yield np.matmul(rows, first)

    def truncate(self, step: float) -> None:
        """Forget components that this step leaves at zero."""
        live = int((self.deviations > LIVE_RATIO * step).sum(axis=1).max())
        rounded = -(-max(live, 1) // COMPONENTS_ROUNDED_TO) * COMPONENTS_ROUNDED_TO
        live = min(rounded, self._shape.width)
        self.basis = self.basis[:, :, :live]
        self._components = self._components[:, :live]
        self.deviations = self.deviations[:, :live].astype(np.float32)
        self.left = self.left[:, :live].astype(np.float32)
        self._forget(live)

    def _forget(self, live: int) -> None:
        size, depth = self._reach.components, self._reach.depth
        if live >= size:
            return
        self._reach = Reach(live // 2 * 2, depth)
        kept = self._reach.components
        by_unit = [x.reshape(-1, size, size)[:, :kept, :kept] for x in self._weights]
        self._weights = [x.reshape(-1, kept) for x in by_unit]

    def beyond(self, step: float) -> tuple[np.ndarray, np.ndarray]:
        """What is not expected of the sampled components, fp32 (rows, tokens), if those of the
        units before are known as ``step`` leaves them; and its deviations (rows,)."""
        beyond = self._components.copy()
        size, known = self._reach.components, list[np.ndarray]()
        for unit, weights in enumerate(self._weights):
            first = beyond[unit, :size]
            before = known[max(unit - self._reach.depth, 0) :]
            expected = weights.T @ np.concatenate(before) if len(weights) else np.zeros_like(first)
            first -= expected
            known.append(expected + np.float32(step) * codes_of(first, step))
        return beyond.reshape(self.left.size, -1), self.left.reshape(-1)

    def codes(self, step: float) -> tuple[np.ndarray, np.ndarray]:
        """Of the sampled components, and their classes."""
        components, deviations = self.beyond(step)
        return codes_of(components, step), classes_of(deviations / step)

    def integers(self, step: float, shifts: np.ndarray) -> tuple[StepRows, np.ndarray, Predictors]:
        """Rows, levels and predictors. ``shifts``: of the centroids of all classes."""
        axes = self.basis.swapaxes(1, 2)
        # The metric's roots are symmetric, so rows go through it as columns would.
        encode, _ = self._metric.forward(axes, 0)
        decode = self._metric.backward(axes, 0, None) * np.float32(step)
        known = (self.deviations / step, shifts[classes_of(self.left / step)])
        rows, levels = rows_of(encode, decode, *known)
        return rows, levels, predictors_of(self._weights, levels[:, :, 0], self._reach)

    def learned(self) -> dict[str, np.ndarray]:
        return {
            "left": self.left,
            "gain_centres": self._gain_centres.astype(np.int16),
            "gain_classes": self._gain_classes().astype(np.uint8),
        }

    def _gain_classes(self) -> np.ndarray:
        deviations = (self._gain_steps - self._gain_centres[:, None]).std(axis=1)
        classes: np.ndarray = np.maximum(classes_of(deviations), 1)
        return classes

    def gain_codes(self) -> tuple[np.ndarray, np.ndarray]:
        codes = (self._gain_steps - self._gain_centres[:, None]).swapaxes(1, 2)
        classes = self._gain_classes().reshape(-1)
        return codes.reshape(len(classes), -1), classes


def codes_of(components: np.ndarray, step: float) -> np.ndarray:
    """int64; what ``UniformStep`` makes of them."""
    sizes = np.floor(np.abs(components) / step + ROUNDING)
    codes: np.ndarray = (np.sign(components) * sizes).astype(np.int64)
    return codes
