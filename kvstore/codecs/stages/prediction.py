"""One step for all components, and codes of the differences from a prediction by earlier units.

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
from kvstore.codecs.stages.uniform import LARGEST_EXPECTED, LARGEST_LEVEL, UniformStep

MOST_FINER = 14  # bits


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
