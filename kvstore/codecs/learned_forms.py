"""What arrays of a profile have to look like, for kernels read them without looking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np

LARGEST_SIZE: Final = 2.0**20  # rows are of unit size, so that none comes near; squares add up

# Of each array its dtype, and which of the sizes its axes have.
Forms: TypeAlias = Mapping[str, tuple[str, tuple[str, ...]]]


def check_forms(arrays: Mapping[str, np.ndarray], forms: Forms, sizes: Mapping[str, int]) -> None:
    """Raises ``ValueError`` for the first array of another dtype or shape."""
    for name, (dtype, axes) in forms.items():
        array, wanted = arrays[name], tuple(sizes[axis] for axis in axes)
        if array.dtype != np.dtype(dtype) or array.shape != wanted:
            found = f"{array.dtype} {array.shape}"
            raise ValueError(f"integers {name} are {found}, not {np.dtype(dtype)} {wanted}")


def check_ranges(ranges: Mapping[str, bool]) -> None:
    """``ranges``: for each array whether what is in it can have been learned."""
    wrong = [name for name, good in ranges.items() if not good]
    if wrong:
        raise ValueError(f"integers out of range: {', '.join(wrong)}")


def length_of(array: np.ndarray, axis: int, ndim: int) -> int:
    """0 if it has not that many axes."""
    return int(array.shape[axis]) if array.ndim == ndim else 0


def are_sizes(array: np.ndarray) -> bool:
    return bool(np.all((array >= 0) & (array <= LARGEST_SIZE)))  # a NaN is neither


def are_powers_of_two(array: np.ndarray) -> bool:
    """Multiplying by them never rounds."""
    return are_sizes(array) and bool(np.all(np.frexp(array)[0] == 0.5))


def ascends(array: np.ndarray) -> bool:
    return bool(np.all(array[..., 1:] >= array[..., :-1]))
