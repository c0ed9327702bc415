"""The integers of one stack of a one-step preset: derived from a KLT, and checked before use.

A component is restored as a level times a row of integers. A one in the sums has the same value for
all components of a unit, so a finer level means a coarser row. The cost of rounding a row is in
proportion to the component's variance; the cost of rounding a level is the same at any size. The
range is shared between the two so that both together cost least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, TypeAlias

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
from kvstore.codecs.stages.integer_rows import BYTE, ENCODE_NORM, StepRows, input_scale
from kvstore.codecs.stages.uniform import LARGEST_LEVEL, NUM_SHIFTS, Predictors

# Ratios of deviation to step, from which on components have 16 bits: the first that is sufficient.
WIDE_RATIOS = (6.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.0)
MOST_NOISE = 0.004  # of rounded rows, relative to the error that quantising leaves
FINEST = 16  # levels of a step
FINEST_WIDE = 32
MOST_FINER = 8  # bits
REACH, REACH_WIDE = 4.5, 16.0  # largest level, in deviations; larger ones take longer, or are cut
ROOM = 2.0**30  # the largest sum
_Design: TypeAlias = tuple[np.ndarray, np.ndarray, tuple[int, int, int], float]
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


def rows_of(
    encode: np.ndarray, decode: np.ndarray, ratios: np.ndarray, shifts: np.ndarray
) -> tuple[StepRows, np.ndarray]:
    """Returns the rows, and the levels that ``UniformStep`` takes.

    Levels are int16 (units, components, NUM_SHIFTS). ``encode``: fp32 (units, components, width):
    its products with rows are components. ``decode``: of the same shape: the change of a row by one
    step of a component. ``ratios``: fp32 (units, components): deviations over steps, falling, zero
    for a dead component. ``shifts``: fp32 (units, components, NUM_SHIFTS), of centroids, in steps.
    """
    units = [_unit(x, r[r > 0].astype(np.float64)) for x, r in zip(decode, ratios, strict=True)]
    per_step = np.ones(ratios.shape)
    for number, (own, _, _, _) in enumerate(units):
        per_step[number, : len(own)] = own
    levels = np.rint(per_step[:, :, None] * shifts)
    levels[:, :, 0] = per_step
    wide = _stacked([rows[: counts[0]] for _, rows, counts, _ in units], np.int16)
    rows = _stacked([rows[counts[0] :] for _, rows, counts, _ in units], np.int8)
    counts = np.array([counts for _, _, counts, _ in units], np.int32)
    scales = np.array([scale for _, _, _, scale in units], np.float32)
    integers = (*_encode(encode), wide, rows, counts, scales)
    return StepRows(*integers), levels.astype(np.int16)


def _encode(encode: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    norms = np.maximum(np.linalg.norm(encode, axis=2), 1e-30)
    rows = np.rint(encode * (ENCODE_NORM / norms)[:, :, None])
    rates = norms / (ENCODE_NORM * input_scale(encode.shape[2]))
    return rows.astype(np.int16), rates.astype(np.float32)


def _unit(decode: np.ndarray, ratios: np.ndarray) -> _Design:
    """Returns levels per step, rows, counts and scale of one unit."""
    decode = decode[: len(ratios)]
    norms = np.maximum(np.linalg.norm(decode, axis=1), 1e-30)
    left = float((ratios**2 / (1 + 12 * ratios**2)).sum())  # a step's error, or the whole variance
    for ratio in WIDE_RATIOS:
        design = _design(decode, ratios, norms, int((ratios > ratio).sum()))
        per_step, rows, (wide, _, finer), scale = design
        worth = np.where(np.arange(len(ratios)) < wide, 2.0**-finer, 1.0) * per_step * scale
        missed = np.linalg.norm(rows * worth[:, None] - decode, axis=1) / norms * ratios
        if float((missed**2).sum()) <= MOST_NOISE * left:
            break
    return design


def _design(decode: np.ndarray, ratios: np.ndarray, norms: np.ndarray, wide: int) -> _Design:
    width, is_wide = decode.shape[1], np.arange(len(ratios)) < wide
    peaks = np.maximum(np.abs(decode).max(axis=1), 1e-30)
    reach = np.where(is_wide, REACH_WIDE, REACH) * ratios + NUM_SHIFTS / 2
    per_step = np.clip(np.floor(LARGEST_LEVEL / reach), 1, FINEST_WIDE)
    finest = float((peaks / per_step)[:wide].max(initial=0)) / LARGEST_LEVEL
    finest = max(finest, 4 * width**0.5 / ROOM)
    scale = max(float((peaks * reach)[wide:].max(initial=0)) / BYTE**2, finest)
    scale = float(2.0 ** np.ceil(np.log2(scale)))
    finer = min(int(np.log2(scale / finest)), MOST_FINER) if wide else 0
    noise = scale * ratios * np.sqrt(width) / norms
    shared = np.sqrt(np.sqrt(np.minimum(ratios, 1)) / noise)
    shared = np.clip(np.rint(shared), 1, np.minimum(np.floor(BYTE / reach), FINEST))
    shared = np.maximum(shared, np.ceil(peaks / (BYTE * scale)))
    per_step[wide:] = shared[wide:]
    worth = per_step * scale
    worth[:wide] /= 2**finer
    return per_step, np.rint(decode / worth[:, None]), (wide, len(ratios) - wide, finer), scale


def _stacked(parts: list[np.ndarray], kind: type[np.signedinteger]) -> np.ndarray:
    """Stacks the units' rows, padded with rows of zeros."""
    stacked = np.zeros((len(parts), max(len(x) for x in parts), parts[0].shape[1]), kind)
    for number, part in enumerate(parts):
        stacked[number, : len(part)] = part
    return stacked


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
