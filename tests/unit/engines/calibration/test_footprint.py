"""Memory of a measurement goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from engines.calibration.footprint import LARGE_BYTES

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc, whose heaps this is about"
)

# A process of its own: other tests have had the heaps of this one grow.
PROBLEM = f"""
import ctypes
from contextlib import nullcontext
from engines.calibration.footprint import large_arrays_apart

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


def test_large_arrays_do_not_stay_in_the_heap() -> None:
    grown = {
        apart: int(subprocess.check_output([sys.executable, "-c", PROBLEM % apart], text=True))
        for apart in (False, True)
    }
    small = 10 * 40 * (1 << 16) >> 20
    assert grown[True] <= small + 8  # a huge page or two
    assert grown[False] > grown[True]  # it is this that makes the difference
