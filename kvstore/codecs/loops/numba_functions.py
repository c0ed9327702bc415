"""Compiles Python loops to numba functions: typed ahead of time, cached, run without the GIL.

numba's cache checks only the file that contains a cached function. So a digest of all sources is a
constant in every function that emits code from others, and a change anywhere under
``kvstore/codecs`` compiles all of them again. Files are read by path and never imported: a new or
moved file cannot be forgotten, and kernels need not import the modules that they only depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import njit, types

ROOT: Final = Path(__file__).parents[1]
LINE = 64  # bytes of a cache line; vectors that cross two lines take twice as long
NBYTES = 4  # of a float or a word


def digest_of(root: Path) -> int:
    """Returns a 48-bit digest of the path and content of every ``*.py`` file under ``root``."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return int.from_bytes(digest.digest(), "big")


SOURCES: Final = digest_of(ROOT)


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


def emitted(emit: Callable[[Any, tuple[Any, ...]], None], *kinds: Any) -> tuple[Any, Any]:
    """Return what an intrinsic returns to numba: its signature, and the code that ``emit`` emits.

    ``emit`` takes a builder, and the LLVM values of the last argument, a tuple. ``kinds``: the
    numba types of all arguments. The intrinsic returns nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(builder, tuple(builder.extract_value(args[-1], k) for k in range(len(kinds[-1]))))
        return context.get_dummy_value()

    return types.void(*kinds), generate


@njit
def address_of(array: Any) -> Any:
    """The address of an array's first element, int64."""
    return np.int64(array.ctypes.data)


@njit
def first_line_of(array: Any) -> Any:
    """The address of the first whole cache line inside an array, int64."""
    return np.int64(array.ctypes.data + LINE - 1) // LINE * LINE
