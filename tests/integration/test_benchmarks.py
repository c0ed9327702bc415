"""Benchmarks in their smallest runs: each measures something and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLAIN = {
    "codec_speed": "--codec tq3 --dims 64 --threads 1 --seconds 0.1",
    "relay": "--readers 2 --chunks 10 --answers 1 --rounds 1 --ttft-rounds 5",
}
RARELY = {
    "fuzz": "--count 200 --only tq3",
}
OF_THE_SAMPLE_MODEL = {
    "capacity": "--sessions 5 --tokens 200 --hot-for 4 --room 2",
    "cycles": "--cycles 2 --tokens 100",
    "density": "--codec tq3",
    "live_sessions": "--tokens 200 --users 2 --rounds 1 --answer 4 --hot-mib 64 --enough 1",
    "methods": "--only tq3 --context 256 --texts 1 --learn 1",
    "restore_ttft": "--tokens 300 --rounds 1",
}


def run(name: str, options: str, folder: Path) -> None:
    figures = folder / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *options.split(), "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(figures.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_a_benchmark_runs(name, tmp_path):
    run(name, PLAIN[name], tmp_path)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", RARELY)
def test_a_benchmark_that_takes_longer_runs(name, tmp_path):
    run(name, RARELY[name], tmp_path)


@pytest.mark.thorough
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_SAMPLE_MODEL)
def test_a_benchmark_of_the_sample_model_runs(name, tmp_path):
    run(name, OF_THE_SAMPLE_MODEL[name], tmp_path)
