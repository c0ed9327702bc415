"""Memory of a measurement: arrays in a file without a name, and heaps that do not grow."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from threadpoolctl import ThreadpoolController

from engines.calibration import scratch as module
from engines.calibration.instrument import HeldSession
from engines.calibration.measuring.stopwatch import Speed
from engines.calibration.measuring.trials import Exact
from engines.calibration.scratch import LARGE_BYTES, FewThreads, OtherPrograms, Scratch
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.workers import usable_cores
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_run, ropes_of

SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=40)


@given(st.lists(arrays.arrays(st.sampled_from([np.uint16, np.float32]), SHAPES), max_size=5))
def test_kept_arrays_come_back(several: list[np.ndarray]) -> None:
    with Scratch(None) as scratch:
        kept = [*scratch.keep(several[:2]), *scratch.keep(several[2:])]
    for array, other in zip(several, kept, strict=True):
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(array, other)


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        (kept,) = scratch.keep([np.arange(100_000).reshape(100, 1000).T])
        assert not list(tmp_path.iterdir())
    assert kept[7, 5] == 5007


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kept_rows_teach_the_same(dtype: str) -> None:
    layout = model_layout(dtype)  # type: ignore[arg-type]
    texts = [model_run(layout, 300, seed=seed) for seed in range(2)]
    with Scratch(None) as scratch:
        kept = [scratch.keep_stored(x, layout.dtype) for x in texts]
    plain, stored = (Samples(layout, ropes_of(layout), x) for x in (texts, kept))
    np.testing.assert_array_equal(element_means(plain), element_means(stored))


def test_blas_takes_the_cores_that_others_leave_and_is_as_it_was_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Others(OtherPrograms):
        def __init__(self) -> None:
            self.used = iter([0.2, 1.0])

        def cores_used(self) -> float:
            return next(self.used)

    blas = [x for x in ThreadpoolController().lib_controllers if "numpy" in x.filepath]
    before = [x.num_threads for x in blas]
    try:
        for library in blas:
            library.set_num_threads(2)
        with FewThreads(Others, num_cores=2) as few:
            seen = [{x.num_threads for x in blas}]
            for look_every_s in (1e9, 0, 0):  # the first is too soon to say
                monkeypatch.setattr(module, "LOOK_EVERY_S", look_every_s)
                few.take_idle_cores()
                seen.append({x.num_threads for x in blas})
        after = [x.num_threads for x in blas]
    finally:
        for library, number in zip(blas, before, strict=True):
            library.set_num_threads(number)
    assert after == [2] * len(blas)
    most = min(2, usable_cores())
    assert seen == [{1}, {1}, {most}, {1}]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed on Linux")
def test_a_text_of_many_layers_takes_one_open_file() -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    text = [(np.ones((2, 40, 8), np.float32), np.zeros((2, 40, 8), np.float32))] * 50
    with Scratch(None) as scratch:
        before = num_open()
        kept = scratch.keep_stored(text, "float32")
        assert num_open() <= before + 1
        exact = Exact((1,), HeldSession(text, 40), Speed(1.0)).kept(scratch)
        assert num_open() <= before + 3
    assert kept[49][0][1, 39, 7] == 0x3F80 and exact.session.run[49][0][1, 39, 7] == 1


needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc, whose heaps this is about"
)

# A process of its own: other tests have had the heaps of this one grow.
PROBLEM = f"""
import ctypes
from contextlib import nullcontext
from engines.calibration.scratch import large_arrays_apart

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def held_mib() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("RssAnon:")) >> 10

def grown(apart: bool) -> int:
    libc.free(libc.malloc(31 << 20))  # glibc's own threshold is as large from now on
    before = held_mib()
    with large_arrays_apart() if apart else nullcontext():
        for _ in range(10):
            large = libc.malloc(2 * {LARGE_BYTES})
            ctypes.memset(large, 1, 2 * {LARGE_BYTES})
            libc.malloc(64)  # a small one after it stays
            libc.free(large)
            small = [libc.malloc(1 << 16) for _ in range(40)]  # some of the room is taken again
            for block in small:
                ctypes.memset(block, 1, 1 << 16)
    return held_mib() - before

print(grown(apart=%s))
"""


@needs_glibc
def test_large_arrays_do_not_stay_in_the_heap() -> None:
    grown = {
        apart: int(subprocess.check_output([sys.executable, "-c", PROBLEM % apart], text=True))
        for apart in (False, True)
    }
    small = 10 * 40 * (1 << 16) >> 20
    assert grown[True] <= small + 8  # a huge page or two
    assert grown[False] > grown[True]  # it is this that makes the difference
