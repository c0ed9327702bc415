"""Axes and components of the samples of one stack, while a one-step preset is learned."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.codecs.entropy.tables import classes_of
from kvstore.codecs.learning.samples import Samples, principal_axes, unit_rows
from kvstore.codecs.one_step.prediction_design import (
    PredictionWindow,
    band_of,
    expectations,
    predictors_of,
)
from kvstore.codecs.one_step.step_integers import rows_of
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import COARSE, root_mean_squares
from kvstore.codecs.stages.integer_rows import StepRows
from kvstore.codecs.stages.model_transforms import HeadMetric
from kvstore.codecs.stages.uniform import Predictors

# Rows of all texts together that are enough for the step and the symbol tables: so many tokens, or
# fewer if they hold very many values, each of which takes some forty bytes here.
SAMPLED_TOKENS, LEAST_TOKENS = 2048, 512
SAMPLED_VALUES = 6 << 20
# A component whose deviation is less than this share of a step is dropped: its rare codes cost more
# bits than their effect is worth.
LIVE_RATIO = 0.3
COMPONENTS_ROUNDED_TO = 16
# Less than a half, since a code of one costs several bits more than a zero.
ROUNDING = 0.4


class Spectrum:
    """Principal axes of a stack, and the components of some sampled rows on them.

    ``deviations``: of components, fp32 (units, components), falling. ``left``: the deviations of
    the components' residuals after prediction; without prediction the same. ``basis``: columns,
    fp32 (units, width, components).
    """

    def __init__(self, samples: Samples, shape: StackShape, means: np.ndarray) -> None:
        self._samples, self._shape, self._means = samples, shape, means
        self._metric = HeadMetric(shape, samples.roots(shape))
        self._sampled: list[np.ndarray] = []
        steps: list[np.ndarray] = []
        values = shape.num_units * shape.width
        wanted = min(max(SAMPLED_VALUES // values, LEAST_TOKENS), SAMPLED_TOKENS)
        stride = max(-(-samples.num_tokens // wanted), 1)
        self.deviations, self.basis = principal_axes(self._rows(steps, stride))
        self.left = self.deviations
        self._weights: list[np.ndarray] = []
        self._components = np.empty(0)
        self._window = PredictionWindow(0, 0)
        self._gain_steps = np.rint(np.concatenate(steps, axis=1)).astype(np.int64)
        self._gain_centres = np.rint(self._gain_steps.mean(axis=1)).astype(np.int64)
        self._project()

    def _rows(self, steps: list[np.ndarray], stride: int) -> Iterator[np.ndarray]:
        """Yields all rows, once. Keeps some, for computations that need fewer than a covariance."""
        for stack, gains in unit_rows(self._samples, self._shape, self._means, self._sizes):
            steps.append(COARSE * np.log2(gains))
            rows, _ = self._metric.forward(stack, 0)
            self._sampled.append(rows[:, ::stride].copy())
            yield rows

    def _sizes(self, stack: np.ndarray) -> np.ndarray:
        sizes = root_mean_squares(stack, self._shape)
        steps = np.rint(COARSE * np.log2(np.maximum(sizes, 1e-9)))
        gains: np.ndarray = np.exp2(steps / COARSE).astype(np.float32)
        return gains

    def _project(self) -> None:
        """Computes the components of the kept rows, fp32 (units, components, tokens)."""
        self._components = np.empty(0)  # frees the old array first
        parts = [np.matmul(x, self.basis) for x in self._sampled]
        self._components = np.concatenate(parts, axis=1).swapaxes(1, 2)

    def predict(self, window: PredictionWindow, step: float) -> None:
        """Learns to predict first components; goes through all samples again."""
        size = min(window.components, self._shape.width) // 2 * 2
        depth = min(window.depth, self._shape.num_units - 1)
        if not size or not depth:
            return
        self._window = PredictionWindow(size, depth)
        found = expectations(
            band_of(self._first_components(size), self._window), self._window, step
        )
        self.left = self.deviations.copy()
        for unit, known in enumerate(found):
            self.basis[unit, :, :size] = self.basis[unit, :, :size] @ known.turn
            self.deviations[unit, :size] = known.deviations
            self.left[unit, :size] = known.left
        self._weights = [known.weights for known in found]
        self._project()

    def _first_components(self, size: int) -> Iterator[np.ndarray]:
        first = np.ascontiguousarray(self.basis[:, :, :size])
        for stack, _ in unit_rows(self._samples, self._shape, self._means, self._sizes):
            rows, _ = self._metric.forward(stack, 0)
            yield np.matmul(rows, first)

    def truncate(self, step: float) -> None:
        """Drops components that this step leaves at zero."""
        live = int((self.deviations > LIVE_RATIO * step).sum(axis=1).max())
        rounded = -(-max(live, 1) // COMPONENTS_ROUNDED_TO) * COMPONENTS_ROUNDED_TO
        live = min(rounded, self._shape.width)
        self.basis = self.basis[:, :, :live]
        self._components = self._components[:, :live]
        self.deviations = self.deviations[:, :live].astype(np.float32)
        self.left = self.left[:, :live].astype(np.float32)
        self._forget(live)

    def _forget(self, live: int) -> None:
        size, depth = self._window.components, self._window.depth
        if live >= size:
            return
        self._window = PredictionWindow(live // 2 * 2, depth)
        kept = self._window.components
        by_unit = [x.reshape(-1, size, size)[:, :kept, :kept] for x in self._weights]
        self._weights = [x.reshape(-1, kept) for x in by_unit]

    def beyond(self, step: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the residuals of the sampled components, and their deviations.

        Both are fp32, (rows, tokens) and (rows,). The units before a unit are assumed to be known
        with the error of ``step``.
        """
        beyond = self._components.copy()
        size, known = self._window.components, list[np.ndarray]()
        for unit, weights in enumerate(self._weights):
            first = beyond[unit, :size]
            before = known[max(unit - self._window.depth, 0) :]
            expected = weights.T @ np.concatenate(before) if len(weights) else np.zeros_like(first)
            first -= expected
            known.append(expected + np.float32(step) * codes_of(first, step))
        return beyond.reshape(self.left.size, -1), self.left.reshape(-1)

    def codes(self, step: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes of the sampled components and their classes.

        They are int32 (rows, tokens) and int64 (rows,).
        """
        components, deviations = self.beyond(step)
        return codes_of(components, step), classes_of(deviations / step)

    def integers(self, step: float, shifts: np.ndarray) -> tuple[StepRows, np.ndarray, Predictors]:
        """Returns rows, levels and predictors.

        ``shifts``: fp32 (NUM_CLASSES, NUM_SHIFTS), of centroids.
        """
        axes = self.basis.swapaxes(1, 2)
        # The metric's roots are symmetric, so it may be applied to rows as if they were columns.
        encode, _ = self._metric.forward(axes, 0)
        decode = self._metric.backward(axes, 0, None) * np.float32(step)
        known = (self.deviations / step, shifts[classes_of(self.left / step)])
        rows, levels = rows_of(encode, decode, *known)
        return rows, levels, predictors_of(self._weights, levels[:, :, 0], self._window)

    def learned(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a profile other than the integers of rows."""
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
        """Returns the codes of the samples' gains and their classes.

        Both int64, (gain groups of all units, tokens) and (gain groups of all units,).
        """
        codes = (self._gain_steps - self._gain_centres[:, None]).swapaxes(1, 2)
        classes = self._gain_classes().reshape(-1)
        return codes.reshape(len(classes), -1), classes


def codes_of(components: np.ndarray, step: float) -> np.ndarray:
    """Returns the codes that ``UniformStep`` gives components, int32 of the same shape."""
    sizes = np.abs(components)
    sizes /= step
    sizes += ROUNDING
    np.floor(sizes, out=sizes)
    codes: np.ndarray = np.copysign(sizes, components, out=sizes).astype(np.int32)
    return codes
