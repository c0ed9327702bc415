"""Checks the learned arrays of a one-step preset before kernels use them unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

import numpy as np

from kvstore.codecs.entropy.class_coder import DEAD
from kvstore.codecs.entropy.tables import FIRST_WIDE, MOST_NARROW, NUM_CLASSES
from kvstore.codecs.learning.array_checks import (
    ArraySpecs,
    are_sizes,
    ascends,
    check_ranges,
    check_specs,
    length_of,
)
from kvstore.codecs.one_step.closed_loop import BYTE, MOST_BITS, NUM_LEVELS, LoopIntegers
from kvstore.codecs.one_step.loop_learning import MOST_FINER, least_unit
from kvstore.codecs.stacks.stack_shape import StackShape

LEVELS: Final = "levels"  # the same for all stacks
OF_GAINS: Final = ("gain_centres", "gain_classes")
# The arrays of each stack.
ARRAYS: Final = (*(x.name for x in fields(LoopIntegers) if x.name != LEVELS), *OF_GAINS)
LARGEST_EXPONENT: Final = 20
_SPECS: Final[ArraySpecs] = {
    "known": ("i1", ("units", "reach", "width")),
    "up": ("u1", ("units", "width")),
    "wide": ("i2", ("units", "wide", "width")),
    "own": ("i1", ("units", "others", "width")),
    "finer": ("u1", ("units",)),
    "exponents": ("i1", ("units", "width")),
    "down": ("u1", ("units", "width")),
    "encode": ("i2", ("units", "components", "width")),
    "rates": ("f4", ("units", "components")),
    "rest": ("u1", ("units", "width")),
    "classes": ("u1", ("units", "components")),
    LEVELS: ("i2", ("classes", "levels")),
    "gain_centres": ("i2", ("units", "parts")),
    "gain_classes": ("u1", ("units", "parts")),
}


def checked_integers(shape: StackShape, arrays: Mapping[str, np.ndarray]) -> LoopIntegers:
    """Returns the integers of one stack.

    ``arrays``: those of ``ARRAYS`` and the levels. Raises ``ValueError`` for arrays that cannot
    have been learned.
    """
    sizes = {
        "units": shape.num_units,
        "width": shape.width,
        "parts": len(shape.gain_groups),
        "reach": length_of(arrays["known"], 1, 3),
        "wide": length_of(arrays["wide"], 1, 3),
        "others": length_of(arrays["own"], 1, 3),
        "components": length_of(arrays["classes"], 1, 2),
        "classes": NUM_CLASSES,
        "levels": NUM_LEVELS,
    }
    check_specs(arrays, _SPECS, sizes)
    if sizes["reach"] > shape.num_units * shape.width or sizes["components"] > shape.width:
        raise ValueError("integers of more channels than there are")
    integers = LoopIntegers(**{x.name: arrays[x.name] for x in fields(LoopIntegers)})
    check_ranges(_ranges(shape, arrays))
    if np.any(integers.counts > (sizes["wide"], sizes["others"])):
        raise ValueError("a component is coded that has no row of integers")
    return integers


def _ranges(shape: StackShape, arrays: Mapping[str, np.ndarray]) -> Mapping[str, bool]:
    exponents = arrays["exponents"].astype(np.int64)
    span = exponents.max(axis=1) - exponents.min(axis=1)
    least = np.log2(least_unit(shape.width))
    shifts = {
        name: int(arrays[name].max(initial=0)) <= MOST_BITS for name in ("up", "down", "rest")
    }
    return {
        **shifts,
        "finer": int(arrays["finer"].max()) <= MOST_FINER,
        "exponents": bool(
            exponents.min() >= least
            and exponents.max() <= LARGEST_EXPONENT
            and span.max() <= MOST_BITS
        ),
        "rates": are_sizes(arrays["rates"]),
        "classes": int(arrays["classes"].max(initial=DEAD)) < NUM_CLASSES
        and ascends(-arrays["classes"].astype(np.int64)),
        LEVELS: _are_levels(arrays[LEVELS].astype(np.int64)),
        "gain_classes": int(arrays["gain_classes"].max()) < NUM_CLASSES,
    }


def _are_levels(levels: np.ndarray) -> bool:
    """Returns whether levels grow with codes, and whether bytes hold those of narrow classes."""
    per_step, added = levels[:, :1], levels[:, 1:]
    firsts = added + per_step * np.arange(1, NUM_LEVELS)
    largest = MOST_NARROW * per_step + np.maximum(added, 0).max(axis=1, keepdims=True)
    return bool(per_step.min() > 0 and firsts.min() >= 0 and largest[:FIRST_WIDE].max() <= BYTE)
