"""Our threads may use the parent process' CPUs, even if the model's thread is bound to one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from engines.vllm_plugin.process.processes import unbind_thread, unbound_threads

if sys.platform != "linux" or len(os.sched_getaffinity(os.getppid())) < 2:
    pytest.skip("needs two different CPUs", allow_module_level=True)


@pytest.fixture
def bound() -> Iterator[set[int]]:
    """This thread, bound to one CPU as vLLM binds the model's."""
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    yield one
    os.sched_setaffinity(0, before)


def cpus_of_a_new_thread() -> set[int]:
    found: set[int] = set()
    thread = threading.Thread(target=lambda: found.update(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found


def test_threads_that_are_started_while_roaming_stay_free(bound):
    with unbound_threads():
        assert cpus_of_a_new_thread() == os.sched_getaffinity(os.getppid())
    assert os.sched_getaffinity(0) == bound


def test_a_thread_can_free_itself(bound):
    free: set[int] = set()

    def run() -> None:
        unbind_thread()
        free.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert free == os.sched_getaffinity(os.getppid())
    assert os.sched_getaffinity(0) == bound
