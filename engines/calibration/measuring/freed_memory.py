"""Hands memory that was freed back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Arrays of so many bytes get pages of their own while a model is measured.
LARGE_BYTES: Final = 4 << 20
# What glibc's threshold grows to by itself, as soon as blocks of such a size were freed.
_USUAL_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def return_freed_memory() -> None:
    """Empty the heaps of glibc, which keeps freed blocks of up to 32 MiB; elsewhere do nothing.

    Takes milliseconds.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def large_arrays_apart() -> Iterator[None]:
    """Keep large arrays out of glibc's heaps within the block; elsewhere do nothing.

    Pages of their own go back to the system the moment that an array is freed. In a heap a small
    block after one that was freed keeps all of it: the same measurement of the same model took 300
    MiB in one run and 640 in the next. Other threads of the process feel it as well: each large
    array of theirs is given fresh pages.
    """
    _set_threshold(LARGE_BYTES)
    try:
        yield
    finally:
        _set_threshold(_USUAL_BYTES)


def _set_threshold(nbytes: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(_M_MMAP_THRESHOLD, nbytes)
        # To set one ends glibc's own adjustment of both; a heap is not to be cut with each free.
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL_BYTES)
