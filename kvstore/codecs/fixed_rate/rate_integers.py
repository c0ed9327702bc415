"""The integers of one stack of a fixed-rate preset: derived from a KLT, and checked before use.

A component is restored as a level times a row of the basis; both are stored as bytes. The KLT
determines the product, but not how its range is split between the two. A level with few steps and a
coarse row both add noise in proportion to the component. The split minimises the sum of both.

Levels are fitted to observed values where those for normal values are not optimal, by Lloyd's
iteration (1957) on histograms of sizes: a boundary lies half-way between two levels, a level is the
mean of its cell. All components of a unit that have the same number of bits share one table: a
single component has too few observed values.

A profile holds the integers. They are checked when it is opened, since kernels read them unchecked:
with an array of another shape they would read beyond its end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from kvstore.codecs.profile import (
    ArraySpecs,
    are_powers_of_two,
    are_sizes,
    ascends,
    check_ranges,
    check_specs,
    length_of,
)
from kvstore.codecs.rows.lloyd_max import gauss_table
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import CODES
from kvstore.codecs.stages.integer_klt import LARGEST_INPUT, MAX_BITS, NUM_MAGNITUDES, input_scale

NUM_BINS = 1024
FURTHEST = 8.0  # deviations; larger sizes are counted as this one
LEAST_SEEN = 200  # observed values per level; with fewer, the levels for normal values are safer
ROUNDS = 50
LARGEST = 127
ENCODE_NORM = 32000.0
NEVER = np.iinfo(np.int32).max
_SPECS: Final[ArraySpecs] = {
    "encode": ("i2", ("units", "components", "width")),
    "decode": ("i1", ("units", "components", "width")),
    "scales": ("f4", ("units",)),
    "units": ("f4", ("units", "components")),
    "rates": ("f4", ("units", "components")),
    "levels": ("u1", ("units", "components", "magnitudes")),
    "bounds": ("i4", ("units", "components", "magnitudes")),
    "bits": ("u1", ("units", "components")),
    "gain_steps": ("i2", ("units", "codes")),
}


class SizeCounts:
    """Histograms of the sizes of components of unit deviation, by unit and number of bits."""

    def __init__(self, bits: np.ndarray) -> None:
        """``bits``: integers (units, components)."""
        self._bits = bits.astype(np.int64)
        self._counts = np.zeros((len(bits), MAX_BITS + 1, NUM_BINS), np.int64)

    def add(self, components: np.ndarray) -> None:
        """Count ``components``, fp32 (units, tokens, components)."""
        bins = np.minimum(np.abs(components) * (NUM_BINS / FURTHEST), NUM_BINS - 1).astype(np.int64)
        bins += (self._bits * NUM_BINS)[:, None]
        for counts, seen in zip(self._counts, bins, strict=True):
            counts += np.bincount(seen.reshape(-1), minlength=counts.size).reshape(counts.shape)

    def levels(self) -> np.ndarray:
        """Return the fitted levels, fp64 (units, MAX_BITS + 1, NUM_MAGNITUDES), ascending.

        Unused places at the end are zero. Where too few values were counted, the levels are those
        for normal values.
        """
        levels = gauss_levels(len(self._counts))
        for unit, counts in zip(levels, self._counts, strict=True):
            for bits in range(1, MAX_BITS + 1):
                size = 1 << (bits - 1)
                if counts[bits].sum() >= LEAST_SEEN * size:
                    unit[bits, :size] = _fitted(unit[bits, :size], counts[bits])
        return levels


def gauss_levels(num_units: int) -> np.ndarray:
    """Return the levels for normal values, in the shape of ``SizeCounts.levels``."""
    levels = np.zeros((num_units, MAX_BITS + 1, NUM_MAGNITUDES))
    for bits in range(1, MAX_BITS + 1):
        levels[:, bits, : 1 << (bits - 1)] = gauss_table(1 << bits).level_array
    return levels


def _fitted(levels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    middles = (np.arange(NUM_BINS) + 0.5) * (FURTHEST / NUM_BINS)
    for _ in range(ROUNDS):
        cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, middles)
        seen = np.bincount(cells, counts, len(levels))
        sums = np.bincount(cells, counts * middles, len(levels))
        levels = np.where(seen > 0, sums / np.maximum(seen, 1), levels)
    return levels


def integers_of(
    encode: np.ndarray,
    decode: np.ndarray,
    deviations: np.ndarray,
    bits: np.ndarray,
    levels: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return the arrays of ``IntegerKlt`` and ``IntegerLevels``, components with most bits first.

    ``encode``, ``decode``: fp32 (units, components, width). Products of a row with ``encode`` are
    its components; the sum of components times rows of ``decode`` restores it. ``deviations``: fp32
    (units, components), of the components of rows of unit size. ``bits``: integers of the same
    shape. ``levels``: see ``SizeCounts``.
    """
    order = np.argsort(-bits.astype(np.int64), axis=1, kind="stable")
    order = order[:, : int((bits > 0).sum(axis=1).max(initial=1))]
    unit = np.arange(len(bits))[:, None]
    designs = [
        _unit(*parts)
        for parts in zip(
            encode[unit, order], decode[unit, order], deviations[unit, order], bits[unit, order],
            gauss_levels(len(bits)) if levels is None else levels, strict=True,
        )
    ]  # fmt: skip
    learned = {name: np.stack([design[name] for design in designs]) for name in designs[0]}
    learned["bits"] = bits[unit, order].astype(np.uint8)
    return learned


def _unit(
    encode: np.ndarray,
    decode: np.ndarray,
    deviations: np.ndarray,
    bits: np.ndarray,
    levels: np.ndarray,
) -> dict[str, np.ndarray]:
    norms = np.maximum(np.linalg.norm(encode, axis=1), 1e-30)
    rates = norms / (ENCODE_NORM * input_scale(encode.shape[1]))
    live = bits > 0
    spread = np.where(live, levels.max(axis=1)[bits], 1.0)
    outermost = spread * deviations
    rows = np.maximum(np.abs(decode).max(axis=1), 1e-30)
    scale = _scale(float((outermost * rows)[live].max(initial=1e-30)))
    room = outermost * rows / scale
    shape = np.sqrt(encode.shape[1]) * rows / np.maximum(np.linalg.norm(decode, axis=1), 1e-30)
    share = np.clip(np.sqrt(spread * room / shape), room / LARGEST, LARGEST)
    share = np.maximum(np.rint(share), 1)
    units = np.where(live, outermost / share, 1.0)
    factors = np.rint(decode * (units / scale)[:, None]) * live[:, None]
    tables = [levels[b, : (1 << int(b)) >> 1] for b in bits]
    sizes, bounds = _tables(tables, deviations, units, rates)
    return {
        "encode": np.rint(encode * (ENCODE_NORM / norms)[:, None]).astype(np.int16),
        "decode": np.clip(factors, -LARGEST, LARGEST).astype(np.int8),
        "scales": np.float32(scale),
        "units": units.astype(np.float32),
        "rates": rates.astype(np.float32),
        "levels": sizes,
        "bounds": bounds,
    }


def _scale(most: float) -> float:
    """Return the scale of sums, a power of two: multiplying by it never rounds."""
    return float(2.0 ** np.ceil(np.log2(most / LARGEST**2)))


def _tables(
    tables: list[np.ndarray], deviations: np.ndarray, units: np.ndarray, rates: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    levels = np.zeros((len(tables), NUM_MAGNITUDES), np.uint8)
    bounds = np.full((len(tables), NUM_MAGNITUDES), NEVER, np.int32)
    for k, table in enumerate(tables):
        sizes = np.clip(np.rint(table * (deviations[k] / units[k])), 0, LARGEST)
        levels[k, : len(sizes)] = sizes
        between = np.rint((sizes[1:] + sizes[:-1]) / 2 * (units[k] / rates[k]))
        bounds[k, : len(between)] = np.clip(between, 0, NEVER)
    return levels, bounds


@dataclass(frozen=True, eq=False)
class RateIntegers:
    """The arrays that ``integers_of`` and ``gain_steps`` made for the units of ``shape``.

    ``_SPECS`` lists their dtypes and shapes. The constructor raises ``ValueError`` for arrays that
    those functions cannot have made. Such values could lead to sums beyond 32 bits, to codes beyond
    their bits, or to reads outside an array.
    """

    shape: StackShape
    encode: np.ndarray
    decode: np.ndarray
    scales: np.ndarray
    units: np.ndarray
    rates: np.ndarray
    levels: np.ndarray
    bounds: np.ndarray
    bits: np.ndarray
    gain_steps: np.ndarray

    def __post_init__(self) -> None:
        check_specs(vars(self), _SPECS, self._sizes())
        check_ranges(self._ranges())

    def _sizes(self) -> dict[str, int]:
        components = length_of(self.bits, 1, 2)
        if not 0 < components <= self.shape.width:
            raise ValueError(f"integers of {components} components")
        sizes = {"units": self.shape.num_units, "components": components, "codes": CODES}
        sizes |= {"width": self.shape.width, "magnitudes": NUM_MAGNITUDES}
        return sizes

    def _ranges(self) -> dict[str, bool]:
        """Return, for each array, whether its values can have been learned."""
        norms = np.einsum("ucw,ucw->uc", self.encode, self.encode, dtype=np.float64)
        return {
            "encode": bool(norms.max() <= LARGEST_INPUT**2),
            "decode": int(self.decode.min()) >= -LARGEST,
            "scales": are_powers_of_two(self.scales),
            "units": are_sizes(self.units),
            "rates": are_sizes(self.rates),
            "levels": int(self.levels.max()) <= LARGEST,
            "bits": int(self.bits.max()) <= MAX_BITS and ascends(self.bits[:, ::-1]),
            "bounds": self._bounds_end(),
            "gain_steps": ascends(self.gain_steps),
        }

    def _bounds_end(self) -> bool:
        """Return whether bounds ascend, and end with ``NEVER``.

        Otherwise a code could have more bits than its component.
        """
        sizes = (1 << np.minimum(self.bits, MAX_BITS).astype(np.int64)) >> 1
        beyond = np.arange(NUM_MAGNITUDES) >= np.maximum(sizes - 1, 0)[..., None]
        ends = bool(np.all(self.bounds[beyond] == NEVER))
        return ends and int(self.bounds.min()) >= 0 and ascends(self.bounds)


ARRAYS: Final = tuple(x.name for x in fields(RateIntegers) if x.name != "shape")
