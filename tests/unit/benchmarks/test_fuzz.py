"""What a reader may not do with a changed input is found, and what it may do is no defect."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.forging import mutated
from benchmarks.fuzz import MOST_BYTES, MOST_CPU_S, Target, fuzz


def as_documented(data: bytes) -> None:
    raise ValueError("no such input")


def within_bounds(data: bytes) -> None:
    np.ones(MOST_BYTES // 2, np.uint8)


def another_error(data: bytes) -> None:
    raise KeyError("a bare one")


def much_memory(data: bytes) -> None:
    np.ones(2 * MOST_BYTES, np.uint8)


def memory_that_is_only_claimed(data: bytes) -> None:
    np.empty(1 << 40, np.uint8)


def much_time(data: bytes) -> None:
    end = time.thread_time() + 1.5 * MOST_CPU_S
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(
    ("read", "defects"),
    [
        (as_documented, 0),
        (within_bounds, 0),
        (another_error, 3),
        (much_memory, 3),
        (memory_that_is_only_claimed, 3),
        (much_time, 3),
    ],
)
def test_defects_are_found(read: Callable[[bytes], None], defects: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    found = fuzz(Target("a reader", (bytes(99),), read, (ValueError,), (mutated,)), 3, 60.0, 1)
    assert (len(found.defects), found.outcomes.total()) == (defects, 3)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
