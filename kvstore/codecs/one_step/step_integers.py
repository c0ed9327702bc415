"""The integers that a one-step preset learned for a stack, checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from kvstore.codecs.entropy.class_coder import DEAD
from kvstore.codecs.entropy.tables import NUM_CLASSES, classes_of
from kvstore.codecs.learning.array_checks import (
    ArraySpecs,
    are_powers_of_two,
    are_sizes,
    check_ranges,
    check_specs,
    length_of,
)
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.integer_rows import StepRows
from kvstore.codecs.stages.prediction import Predictors
from kvstore.codecs.stages.uniform import NUM_SHIFTS

_SPECS: Final[ArraySpecs] = {
    "encode": ("i2", ("units", "components", "width")),
    "rates": ("f4", ("units", "components")),
    "wide": ("i2", ("units", "wide", "width")),
    "rows": ("i1", ("units", "others", "width")),
    "counts": ("i4", ("units", "three")),
    "scales": ("f4", ("units",)),
    "levels": ("i2", ("units", "components", "shifts")),
    "left": ("f4", ("units", "components")),
    "gain_centres": ("i2", ("units", "parts")),
    "gain_classes": ("u1", ("units", "parts")),
    "factors": ("i2", ("units", "stored", "known")),
    "finer": ("i4", ("units", "stored")),
}


@dataclass(frozen=True, eq=False)
class StepIntegers:
    """The arrays of ``StepRows``, ``UniformStep``, ``Predictors`` and ``LogGain`` for one stack.

    ``left``: the deviations of coded values, fp32 (units, components); see ``Spectrum``. Raises
    ``ValueError`` for arrays that cannot have been learned.
    """

    shape: StackShape
    step: float
    encode: np.ndarray
    rates: np.ndarray
    wide: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    scales: np.ndarray
    levels: np.ndarray
    left: np.ndarray
    gain_centres: np.ndarray
    gain_classes: np.ndarray
    factors: np.ndarray
    finer: np.ndarray

    def __post_init__(self) -> None:
        if not 0 < self.step < np.inf:
            raise ValueError(f"a step of {self.step}")
        check_specs(vars(self), _SPECS, self._sizes())
        check_ranges(self._ranges())
        rows, _ = self.step_rows, self.predictors  # each checks its own arrays
        places = np.arange(self.left.shape[1])
        if np.any(self.coded & (places >= rows.live[:, None])):
            raise ValueError("a component is coded that has no row of integers")

    def _sizes(self) -> dict[str, int]:
        components = length_of(self.left, 1, 2)
        stored = length_of(self.finer, 1, 2)
        if not 0 < components <= self.shape.width or stored > components:
            raise ValueError(f"integers of {components} components, {stored} of them stored")
        return {
            "units": self.shape.num_units,
            "width": self.shape.width,
            "parts": len(self.shape.gain_groups),
            "components": components,
            "wide": length_of(self.wide, 1, 3),
            "others": length_of(self.rows, 1, 3),
            "stored": stored,
            "known": length_of(self.factors, 2, 3),
            "shifts": NUM_SHIFTS,
            "three": 3,
        }

    def _ranges(self) -> Mapping[str, bool]:
        return {
            "rates": are_sizes(self.rates),
            "scales": are_powers_of_two(self.scales),
            "levels": int(self.levels[:, :, 0].min()) > 0,
            "left": are_sizes(self.left),
            "gain_classes": int(self.gain_classes.max()) < NUM_CLASSES,
        }

    @property
    def step_rows(self) -> StepRows:
        """The rows, in the form that stages take."""
        names = (x.name for x in fields(StepRows))
        return StepRows(*(getattr(self, name) for name in names))

    @property
    def predictors(self) -> Predictors:
        """The predictors, in the form that stages take."""
        return Predictors(self.factors, self.finer)

    @property
    def classes(self) -> np.ndarray:
        """The class of every component, int64 (units, components)."""
        return classes_of(self.left / self.step)

    @property
    def coded(self) -> np.ndarray:
        """The mask of components that get codes: those whose class is not ``DEAD``."""
        coded: np.ndarray = self.classes != DEAD
        return coded


ARRAYS: Final = tuple(x.name for x in fields(StepIntegers) if x.name not in ("shape", "step"))
