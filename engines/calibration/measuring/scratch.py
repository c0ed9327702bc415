"""Arrays in a file without a name: they take disk and no memory that the system could not reclaim.

A measurement inside an engine learns from hundreds of mebibytes of rows, of which it looks at a few
at a time.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np

from kvstore.codecs.floats import to_stored
from kvstore.shapes import DType, KVPair, KVRun


class Scratch:
    """A file that is gone when this process is, however it ends. Use it in a ``with`` block.

    Arrays stay valid after the block's end, for as long as they are referenced.
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder``: where the file is made; None = where temporary files are.

        Raises ``OSError``.
        """
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by __exit__
        self._end = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def keep(self, array: np.ndarray) -> np.ndarray:
        """Write ``array``; returns it as read-only memory of the file, same shape and dtype.

        Written and not only mapped, so that a full disk is an error and no signal.

        Raises:
            OSError: the disk is full.
        """
        if not array.size:
            return array
        values = np.ascontiguousarray(array)
        self._write(values.data.cast("B"))
        start, self._end = self._end, _next_page(self._end + values.nbytes)
        mapped = mmap.mmap(self._file.fileno(), values.nbytes, prot=mmap.PROT_READ, offset=start)
        return np.frombuffer(mapped, values.dtype, math.prod(values.shape)).reshape(values.shape)

    def keep_stored(self, run: KVRun, dtype: DType) -> list[KVPair]:
        """Keep ``run`` in the 16 bits that lossy codecs see of it: fp16, else bf16 as uint16."""
        # Codecs see fp16 unchanged, so it keeps its dtype, as bf16 keeps its bits.
        kept = to_stored if dtype != "float16" else _as_it_is
        return [(self.keep(kept(k, dtype)), self.keep(kept(v, dtype))) for k, v in run]

    def _write(self, content: memoryview) -> None:
        done = 0
        while done < len(content):
            done += os.pwrite(self._file.fileno(), content[done:], self._end + done)


def _next_page(at: int) -> int:
    return -(-at // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _as_it_is(array: np.ndarray, dtype: DType) -> np.ndarray:
    return array
