"""Benchmarks in their smallest runs: each measures something and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.stacks.fake_stack import ROOT, FakeStack

BENCHMARKS = {
    "codec_speed": "--codec tq3 --dims 64 --threads 1 --seconds 0.1",
    "relay": "--readers 2 --chunks 10 --answers 1 --rounds 1 --ttft-rounds 5",
}
RARELY = {"fuzz": "--count 200 --only tq3"}
OF_THE_SAMPLE_MODEL = {
    "capacity": "--sessions 5 --tokens 200 --hot-for 4 --room 2",
    "cycles": "--cycles 2 --tokens 100",
    "density": "--codec tq3",
    "live_sessions": "--tokens 200 --users 2 --rounds 1 --answer 4 --hot-mib 64 --enough 1",
    "methods": "--only tq3 --context 256 --texts 1 --learn 1",
    "restore_ttft": "--tokens 300 --rounds 1",
}
THOROUGH = (pytest.mark.thorough,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *BENCHMARKS.items(),
        *(pytest.param(*x, marks=THOROUGH) for x in RARELY.items()),
        *(
            pytest.param(*x, marks=(*THOROUGH, pytest.mark.model))
            for x in OF_THE_SAMPLE_MODEL.items()
        ),
    ],
)
def test_a_benchmark_runs(name: str, options: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *options.split(), "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(figures.read_text())


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
