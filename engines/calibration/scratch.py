"""Bounds the memory and the threads of a measurement, which runs beside users' requests.

It limits BLAS threads, returns freed memory to the system, and keeps arrays in an unnamed file, so
that the system can reclaim their memory. A measurement inside an engine learns from hundreds of
mebibytes of rows, of which it uses a few at a time.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from kvstore.codecs.floats import to_stored
from kvstore.shapes import DType, KVPair, KVRun
from kvstore.workers import usable_cores

# Arrays of at least so many bytes get pages of their own while a model is measured.
LARGE_BYTES: Final = 4 << 20
ALIGNED: Final = 64  # bytes, of an array in a file
FREE_SHARE: Final = 4  # at most a quarter of a disk's free space
# To this value glibc raises its threshold by itself, once blocks of such a size were freed.
_USUAL_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LOOK_EVERY_S = 1.0
DISTURBED: Final = 0.3  # a core counts as idle if others use at most this part of it
NUM_CORES: Final = os.cpu_count() or 1


class OtherPrograms:
    """Measures the load of the machine, less that of this process. Use it on one thread."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.cores_used()

    def cores_used(self) -> float:
        """Return the average number of cores that other programs have used since the last call."""
        percent: float = psutil.cpu_percent() * NUM_CORES - self._own.cpu_percent()
        return percent / 100


class FewThreads:
    """Makes numpy's BLAS compute on the calling thread, with that thread's low priority.

    BLAS's own threads have the priority of the process. On a busy machine two of them wait for each
    other: an ``eigh`` took ten times the processor time. So BLAS gets further threads only by
    ``take_idle_cores``. mlx and torch have BLAS of their own. Use this in a ``with`` block, on one
    thread.
    """

    def __init__(
        self, look: Callable[[], OtherPrograms] = OtherPrograms, num_cores: int = NUM_CORES
    ) -> None:
        """Find numpy's BLAS; nothing is changed yet. ``num_cores``: the cores of the machine."""
        from threadpoolctl import ThreadpoolController  # engines have it, the gateway has not

        blas = ThreadpoolController().select(user_api="blas")
        self._own = [x for x in blas.lib_controllers if "numpy" in x.filepath]
        self._before = [x.num_threads for x in self._own]
        self._look, self._num_cores = look, num_cores

    def __enter__(self) -> FewThreads:
        self._set([1] * len(self._own))
        self._others, self._looked_s = self._look(), time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self._set(self._before)

    def take_idle_cores(self) -> None:
        """Make BLAS use as many cores as other programs have left idle since the last call."""
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        idle = int(self._num_cores - self._others.cores_used() + DISTURBED)
        self._set([max(1, min(idle, usable_cores(), x)) for x in self._before])

    def _set(self, num_threads: list[int]) -> None:
        for library, number in zip(self._own, num_threads, strict=True):
            library.set_num_threads(number)


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

    An array with pages of its own returns them to the system as soon as it is freed. In a heap, one
    small block after a freed array keeps all its memory: the same measurement of the same model
    took 300 MiB in one run and 640 in the next. Other threads of the process are affected, too:
    each of their large arrays is given fresh pages.
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
        # Setting one ends glibc's own adjustment of both; a low one would trim a heap at each free.
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _USUAL_BYTES)


def room_on_disk(folder: str | Path, most: int) -> int:
    """Return the bytes that a measurement's files may take in ``folder``, at most ``most``."""
    return min(most, shutil.disk_usage(folder).free // FREE_SHARE)


class Scratch:
    """An unnamed file, which the system removes with this process. Use it in a ``with`` block.

    Arrays stay valid after the block's end, for as long as they are referenced.
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder``: the folder of the file; None = that of temporary files.

        Raises ``OSError``.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def keep(self, arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Write ``arrays``, and return them mapped from the file, with the same shapes and dtypes.

        Later changes to a returned array do not reach the file. The file is written, not only
        mapped, so that a full disk raises an error instead of a signal. All arrays share one
        mapping, since each mapping takes one of a process's open files, of which mlx_lm allows
        2,048.

        Raises:
            OSError: the disk is full.
        """
        start = end = self._file.seek(_next(self._file.tell(), mmap.ALLOCATIONGRANULARITY))
        places = list[tuple[int, np.dtype, tuple[int, ...]]]()
        for array in arrays:
            at = self._file.seek(_next(self._file.tell(), ALIGNED))
            places.append((at - start, array.dtype, array.shape))
            if array.size:
                self._file.write(np.ascontiguousarray(array).data)
                end = self._file.tell()
        self._file.flush()
        mapped: mmap.mmap | bytes = b""
        if end > start:
            mapped = mmap.mmap(self._file.fileno(), end - start, mmap.MAP_PRIVATE, offset=start)
        return [
            np.frombuffer(mapped, dtype, size, at).reshape(shape)
            if (size := math.prod(shape))
            else np.empty(shape, dtype)
            for at, dtype, shape in places
        ]

    def keep_stored(self, run: KVRun, dtype: DType) -> list[KVPair]:
        """Keep ``run`` in the 16 bits that lossy codecs use: fp16, or else bf16 as uint16."""
        arrays = (x for pair in run for x in pair)
        # Codecs see fp16 unchanged, so it keeps its dtype, as bf16 keeps its bits.
        kept = iter(self.keep(x if dtype == "float16" else to_stored(x, dtype) for x in arrays))
        return list(zip(kept, kept, strict=True))


def _next(at: int, multiple_of: int) -> int:
    return -(-at // multiple_of) * multiple_of
