"""Keeps a measurement small beside those who are served: one BLAS thread, freed memory returned."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from threadpoolctl import ThreadpoolController

# Arrays of so many bytes get pages of their own while a model is measured.
LARGE_BYTES: Final = 4 << 20
# What glibc's threshold grows to by itself, as soon as blocks of such a size were freed.
_USUAL_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@contextmanager
def one_thread() -> Iterator[None]:
    """Have numpy's BLAS compute on the calling thread, which can then be of low priority.

    Its other threads are as old as the process, and as important. mlx and torch have BLAS of their
    own.
    """
    blas = ThreadpoolController().select(user_api="blas")
    own = [x for x in blas.lib_controllers if "numpy" in x.filepath]
    before = [x.num_threads for x in own]
    try:
        for library in own:
            library.set_num_threads(1)
        yield
    finally:
        for library, num_threads in zip(own, before, strict=True):
            library.set_num_threads(num_threads)


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
