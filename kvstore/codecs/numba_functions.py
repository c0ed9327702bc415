"""How loops of Python become numba functions here: typed ahead, cached, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types


def compiled(result: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles now, or takes it from numba's cache; never on a first call."""
    signature = result(*arguments)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(signature, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder that it may write its cache to
        return njit(signature, **options)(function)


def tuple_of(*kinds: Any) -> Any:
    make: Any = types.Tuple
    return make(kinds)


def array_of(kind: Any, ndim: int) -> Any:
    return types.Array(kind, ndim, "C")
