"""The integers of one stack of a fixed-rate preset, as a profile holds them, checked before use.

Kernels read them unchecked: with an array of another shape they would read beyond its end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from kvstore.codecs.fixed_rate.integer_design import LARGEST, NEVER
from kvstore.codecs.learning.array_checks import (
    ArraySpecs,
    are_powers_of_two,
    are_sizes,
    ascends,
    check_ranges,
    check_specs,
    length_of,
)
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.integer_klt import LARGEST_INPUT, MAX_BITS, NUM_MAGNITUDES
from kvstore.codecs.stages.octave_gain import CODES

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


@dataclass(frozen=True, eq=False)
class RateIntegers:
    """The arrays that ``integers_of`` and ``gain_steps`` made for the units of ``shape``.

    Raises ``ValueError`` if those functions cannot have made them. Such values could lead to sums
    beyond 32 bits, to codes beyond their bits, or to reads outside an array.
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
        """Returns, for each array, whether its values can have been learned."""
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
        """Returns whether bounds ascend, and end with ``NEVER``.

        Otherwise a code could have more bits than its component.
        """
        sizes = (1 << np.minimum(self.bits, MAX_BITS).astype(np.int64)) >> 1
        beyond = np.arange(NUM_MAGNITUDES) >= np.maximum(sizes - 1, 0)[..., None]
        ends = bool(np.all(self.bounds[beyond] == NEVER))
        return ends and int(self.bounds.min()) >= 0 and ascends(self.bounds)


ARRAYS: Final = tuple(x.name for x in fields(RateIntegers) if x.name != "shape")
