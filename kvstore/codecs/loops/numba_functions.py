"""Compiles Python loops to numba functions: typed ahead of time, cached, run without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

LINE = 64  # bytes of a cache line; vectors that cross two lines take twice as long
NBYTES = 4  # of a float or a word


def compiled(result: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Compile ``function`` for these numba types now, or take it from numba's cache."""
    signature = result(*arguments)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(signature, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder in which it may write its cache
        return njit(signature, **options)(function)


def tuple_of(*kinds: Any) -> Any:
    """The numba type of a tuple of these types."""
    make: Any = types.Tuple
    return make(kinds)


def array_of(kind: Any, ndim: int) -> Any:
    """The numba type of a contiguous array of ``ndim`` axes."""
    return types.Array(kind, ndim, "C")


def tuple_items(builder: Any, kind: Any, values: Any) -> tuple[Any, ...]:
    """Return the LLVM values in ``values``, a tuple of numba type ``kind``."""
    return tuple(builder.extract_value(values, k) for k in range(len(kind)))


@njit
def address_of(array: Any) -> Any:
    """The address of an array's first element, int64."""
    return np.int64(array.ctypes.data)


@njit
def first_line_of(array: Any) -> Any:
    """The address of the first whole cache line inside an array, int64."""
    return np.int64(array.ctypes.data + LINE - 1) // LINE * LINE
