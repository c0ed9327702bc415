"""Servers of a benchmark that was ended from outside end, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.stacks.fake_stack import ROOT, FakeStack

BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.stacks.fake_stack import FakeStack
with FakeStack(Path(sys.argv[1])) as stack:
    print(stack.process.pid, stack.engine.pid, flush=True)
    time.sleep(600)
"""
WAIT_S = 60


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # another test's, which has ended
        return []


def test_a_benchmark_that_is_ended_leaves_no_server(tmp_path: Path):
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        servers = [psutil.Process(int(x)) for x in benchmark.stdout.readline().split()]
        assert len(servers) == 2
        benchmark.kill()
    _, left = psutil.wait_procs(servers, timeout=WAIT_S)
    assert left == []
    assert "ended in good order" in (tmp_path / "log.txt").read_text()


def test_a_benchmark_that_ends_its_server_leaves_no_watch(tmp_path: Path):
    with FakeStack(tmp_path) as stack:  # others of the same process may be there
        own = str(stack.process.pid)
        watches = [x for x in psutil.Process().children() if own in words_of(x)]
        assert len(watches) == 1
    assert not watches[0].is_running()
