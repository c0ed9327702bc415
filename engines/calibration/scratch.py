"""Bounds the memory and the threads of a measurement, which runs beside users' requests.

Few BLAS threads, freed memory returned, and arrays in a file without a name: they take disk and no
memory that the system could not reclaim. A measurement inside an engine learns from hundreds of
mebibytes of rows, of which it looks at a few at a time.
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

# Arrays of so many bytes get pages of their own while a model is measured.
LARGE_BYTES: Final = 4 << 20
ALIGNED: Final = 64  # bytes, of an array in a file
FREE_SHARE: Final = 4  # at most a quarter of a disk's free space
# What glibc's threshold grows to by itself, as soon as blocks of such a size were freed.
_USUAL_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LOOK_EVERY_S = 1.0
DISTURBED: Final = 0.3  # of a core: as much of it may be used by others, and it counts as idle
NUM_CORES: Final = os.cpu_count() or 1


class OtherPrograms:
    """Looks at the load of the machine, less that of this process. Belongs to one thread."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.cores_used()

    def cores_used(self) -> float:
        """The number of cores that they have used since the last call, on average."""
        percent: float = psutil.cpu_percent() * NUM_CORES - self._own.cpu_percent()
        return percent / 100


class FewThreads:
    """Has numpy's BLAS compute on the calling thread, which can then be of low priority.

    Its other threads are as old as the process, and as important. On a busy machine two of them
    wait for each other: an ``eigh`` took ten times the processor time. So there are others only for
    who asks for them, and as many as there are cores that others leave idle. mlx and torch have
    BLAS of their own. Use it in a ``with`` block, on one thread.
    """

    def __init__(
        self, look: Callable[[], OtherPrograms] = OtherPrograms, num_cores: int = NUM_CORES
    ) -> None:
        """Change nothing yet; ``num_cores``: the machine's."""
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
        """Have it compute on as many cores as other programs have left since the last look."""
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


def room_on_disk(folder: str | Path, most: int) -> int:
    """Return the bytes that files of a measurement may take there, ``most`` at most."""
    return min(most, shutil.disk_usage(folder).free // FREE_SHARE)


class Scratch:
    """A file that is gone when this process is, however it ends. Use it in a ``with`` block.

    Arrays stay valid after the block's end, for as long as they are referenced.
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder``: where the file is made; None = where temporary files are.

        Raises ``OSError``.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def keep(self, arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Write ``arrays``; returns them as memory of the file, same shapes and dtypes.

        What is written to that memory stays there, and does not reach the file. The arrays
        themselves are written and not only mapped, so that a full disk is an error and no signal.
        All of them are one mapping: each takes one of the files that a process may have open, and
        mlx_lm allows 2,048.

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
        """Keep ``run`` in the 16 bits that lossy codecs see of it: fp16, else bf16 as uint16."""
        arrays = (x for pair in run for x in pair)
        # Codecs see fp16 unchanged, so it keeps its dtype, as bf16 keeps its bits.
        kept = iter(self.keep(x if dtype == "float16" else to_stored(x, dtype) for x in arrays))
        return list(zip(kept, kept, strict=True))


def _next(at: int, multiple_of: int) -> int:
    return -(-at // multiple_of) * multiple_of
