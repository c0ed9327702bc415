"""Checks a profile's arrays, because kernels read them unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np

LARGEST_SIZE: Final = 2.0**20  # far above any row of unit size; sums of squares stay finite

# For each array, its dtype and the names of its axes.
ArraySpecs: TypeAlias = Mapping[str, tuple[str, tuple[str, ...]]]


def check_specs(
    arrays: Mapping[str, np.ndarray], specs: ArraySpecs, sizes: Mapping[str, int]
) -> None:
    """Checks dtypes and shapes. Raises ``ValueError`` for the first array that differs.

    ``sizes``: the length of each axis, by the names in ``specs``.
    """
    for name, (dtype, axes) in specs.items():
        array, wanted = arrays[name], tuple(sizes[axis] for axis in axes)
        if array.dtype != np.dtype(dtype) or array.shape != wanted:
            found = f"{array.dtype} {array.shape}"
            raise ValueError(f"integers {name} are {found}, not {np.dtype(dtype)} {wanted}")


def check_ranges(ranges: Mapping[str, bool]) -> None:
    """Raises ``ValueError`` for arrays whose values cannot have been learned.

    ``ranges``: for each array, whether its values are possible.
    """
    wrong = [name for name, good in ranges.items() if not good]
    if wrong:
        raise ValueError(f"integers out of range: {', '.join(wrong)}")


def length_of(array: np.ndarray, axis: int, ndim: int) -> int:
    """Returns the length of an axis; 0 if the array does not have ``ndim`` axes."""
    return int(array.shape[axis]) if array.ndim == ndim else 0


def are_sizes(array: np.ndarray) -> bool:
    """Returns whether all values are from 0 to ``LARGEST_SIZE``."""
    return bool(np.all((array >= 0) & (array <= LARGEST_SIZE)))  # a NaN fails both comparisons


def are_powers_of_two(array: np.ndarray) -> bool:
    """Returns whether all values are powers of two: multiplying by them never rounds."""
    return are_sizes(array) and bool(np.all(np.frexp(array)[0] == 0.5))


def ascends(array: np.ndarray) -> bool:
    """Returns whether no value is smaller than the one before it on the last axis."""
    return bool(np.all(array[..., 1:] >= array[..., :-1]))
