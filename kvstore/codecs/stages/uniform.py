"""One step for all components, of values or of their differences from a prediction.

With entropy-coded integers and equal steps, each component automatically gets the optimal number of
bits: this *is* reverse water-filling (Berger 1971). Within a cell, small values are likelier than
large ones, so a code stands for its cell's centroid, a little below the middle. Centroids are also
whole numbers, of fractions of a step, so that all later results are the same on every host.

Layers are strongly related: the units before a unit, which are known when it is restored, predict a
large part of its first components. Packing codes the difference, and restoring adds the two in
levels. Both use restored levels and whole numbers. So they never drift apart on any host, even if
levels were clipped or rounded: this is differential coding in a closed loop (Cutler 1952), over
layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.stacks.int16_products import Int16Products

NUM_SHIFTS = 4  # codes of size 0, 1, 2, and 3 or more
LARGEST_CODE = 32767
LARGEST_LEVEL = 32767
# The largest predicted level: a code is added to it, and can reach any level half as large.
LARGEST_EXPECTED = LARGEST_LEVEL // 2
MOST_FINER = 14  # bits


class UniformStep:
    """Quantises all components by one step; codes are int16. Implements ``Quantiser``."""

    def __init__(self, step: float, levels: np.ndarray, rounding: float = 0.5) -> None:
        """``levels``: int16 (units, components, NUM_SHIFTS): the number of levels in a step, and
        the numbers added to codes of size 1, 2, and 3 or more.

        ``rounding`` below one half widens the cell of zero (a dead zone).
        """
        self._step = np.float32(step)
        self._levels = levels.astype(np.int32)
        self._rounding = np.float32(rounding)

    @property
    def sizes(self) -> tuple[np.float32, np.float32]:
        """One over the step, and what is added to sizes before they are rounded down."""
        return 1 / self._step, self._rounding

    def quantise(self, components: np.ndarray) -> np.ndarray:
        return self._codes(components * (1 / self._step))

    def quantise_beyond(
        self, unit: int, components: np.ndarray, expected: np.ndarray
    ) -> np.ndarray:
        """Returns the codes of one unit's prediction errors, int16 (tokens, components).

        ``components``: fp32 of the same shape. ``expected``: int32 levels (tokens, first
        components).
        """
        scaled = components * (1 / self._step)
        per_step = self._levels[unit, : expected.shape[1], 0]
        scaled[:, : expected.shape[1]] -= expected / np.maximum(per_step, 1).astype(np.float32)
        return self._codes(scaled)

    def _codes(self, scaled: np.ndarray) -> np.ndarray:
        if self._rounding == 0.5:
            codes = np.rint(scaled)
        else:
            codes = np.sign(scaled) * np.floor(np.abs(scaled) + self._rounding)
        limited: np.ndarray = np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int16)
        return limited

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Returns int32 levels (units, tokens, components)."""
        return np.stack([self.restore_unit(unit, x) for unit, x in enumerate(codes)])

    def restore_unit(self, unit: int, codes: np.ndarray) -> np.ndarray:
        """Returns the int32 levels of one unit's codes, (tokens, components)."""
        per_step, *added = self._levels[unit].T
        sizes = np.abs(np.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(np.int32))
        sums = [np.zeros_like(per_step), *added]
        chosen = np.select([sizes == k for k in range(NUM_SHIFTS - 1)], sums[:-1], sums[-1])
        levels = np.minimum(sizes * per_step + chosen, LARGEST_LEVEL)
        restored: np.ndarray = np.where(codes < 0, -levels, levels)
        return restored


@dataclass(frozen=True, eq=False)
class Predictors:
    """The linear prediction of a unit's first ``components`` from ``depth`` units before.

    ``factors``: int16 (units, components, depth * components), for the levels of the farthest unit
    first; zero where there is no unit so far before. ``finer``: int32 (units, components): the
    number of bits by which their sums are finer than levels. Raises ``ValueError`` if the arrays
    are inconsistent.
    """

    factors: np.ndarray
    finer: np.ndarray

    def __post_init__(self) -> None:
        units, components, known = self.factors.shape
        fits = not known % components if components else not known
        if self.finer.shape != (units, components) or not fits or components % 2:
            shapes = f"factors of shape {self.factors.shape} for {self.finer.shape}"
            raise ValueError(f"{shapes}; components go by pairs")
        if np.any(self.finer < 0) or np.any(self.finer > MOST_FINER):
            raise ValueError("sums that are finer than they can be")

    @classmethod
    def none(cls, units: int) -> Predictors:
        """Makes predictors that predict nothing."""
        return cls(np.zeros((units, 0, 0), np.int16), np.zeros((units, 0), np.int32))

    @property
    def components(self) -> int:
        """The number of components that are predicted; the first ones of a unit."""
        return int(self.factors.shape[1])

    @property
    def depth(self) -> int:
        """The number of earlier units that a prediction uses."""
        return int(self.factors.shape[2]) // max(self.components, 1)


class PredictedStep:
    """Quantises prediction errors, unit by unit; codes are int16. Implements ``Quantiser``."""

    def __init__(self, steps: UniformStep, predictors: Predictors, coded: np.ndarray) -> None:
        """``coded``: the mask of components that have codes at all, bool (units, components).

        Codes of the others are dropped here, since they are missing when the unit is restored.
        """
        self._steps, self._coded = steps, coded
        self._size, self._depth, self._finer = (
            predictors.components,
            predictors.depth,
            predictors.finer,
        )
        units, components, _ = predictors.factors.shape
        self._products = Int16Products(predictors.factors, np.full(units, components))
        self._half = (1 << predictors.finer) >> 1

    @property
    def sizes(self) -> tuple[np.float32, np.float32]:
        """See ``UniformStep.sizes``."""
        return self._steps.sizes

    @property
    def panels(self) -> np.ndarray:
        """The factors as kernels take them; see ``Int16Products.panels``."""
        return self._products.panels

    def quantise(self, components: np.ndarray) -> np.ndarray:
        codes = np.empty(components.shape, np.int16)
        levels = np.empty(components.shape, np.int32)
        for unit in range(len(components)):
            expected = self._expected(unit, levels)
            beyond = self._steps.quantise_beyond(unit, components[unit], expected)
            codes[unit] = beyond * self._coded[unit]
            levels[unit] = self._restored(unit, codes[unit], expected)
        return codes

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Returns int32 levels (units, tokens, components)."""
        levels = np.empty(codes.shape, np.int32)
        for unit in range(len(codes)):
            levels[unit] = self._restored(unit, codes[unit], self._expected(unit, levels))
        return levels

    def _restored(self, unit: int, codes: np.ndarray, expected: np.ndarray) -> np.ndarray:
        levels = self._steps.restore_unit(unit, codes)
        levels[:, : expected.shape[1]] += expected
        return np.clip(levels, -LARGEST_LEVEL, LARGEST_LEVEL, out=levels)

    def _expected(self, unit: int, levels: np.ndarray) -> np.ndarray:
        """Returns int32 levels (tokens, predicted components), from those of the units before."""
        first = max(self._depth - unit, 0) * self._size
        words = np.zeros((levels.shape[1], self._depth * self._size), np.int16)
        before = levels[max(unit - self._depth, 0) : unit, :, : self._size]
        words[:, first:] = before.swapaxes(0, 1).reshape(len(words), -1)
        sums = self._products.sums(unit, words)
        expected = (sums + self._half[unit, :, None]) >> self._finer[unit, :, None]
        limited: np.ndarray = np.clip(expected, -LARGEST_EXPECTED, LARGEST_EXPECTED).T
        return limited
