"""Keeps numpy's BLAS to one thread while a model is measured beside those who are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


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
