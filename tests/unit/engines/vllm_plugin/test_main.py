"""The process that starts vLLM, with a stand-in for vLLM: nothing is left, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import psutil
import pytest

from engines.config import EngineConfig
from engines.vllm_environment.environment import import_path
from tests.unit.engines.conftest import worker_config
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux adopts orphans")

# Its child is in a session of its own and ignores SIGTERM; both have shared memory. The names of
# both, the child's number and the folder for sockets go to a file.
VLLM = """
import os, signal, subprocess, sys, time
from multiprocessing import get_context, shared_memory

def core(parent):
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    theirs = shared_memory.SharedMemory(create=True, size=1 << 16)
    parent.send(theirs.name)
    time.sleep(600)

if __name__ == "__main__":
    ours = shared_memory.SharedMemory(create=True, size=1 << 16)
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=core, args=(there,))
    child.start()
    words = [str(os.getpid()), str(child.pid), os.environ["VLLM_RPC_BASE_PATH"]]
    words += [ours.name, here.recv()]
    with open(os.environ["REPORT"] + ".new", "w") as report:
        report.write(" ".join(words))
    os.rename(os.environ["REPORT"] + ".new", os.environ["REPORT"])
    time.sleep(600)
"""


class Started:
    def __init__(self, folder: Path) -> None:
        package = folder / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        (package / "api_server.py").write_text(VLLM)
        engine = EngineConfig(kind="vllm")
        worker = msgspec.structs.replace(
            worker_config(folder), engine=engine, model_path=str(folder)
        )
        report = folder / "report"
        self.stale = folder / "6f1c2d"
        with socket.socket(socket.AF_UNIX) as earlier:
            earlier.bind(str(self.stale))
        path = ":".join(x for x in (str(folder), import_path()) if x)
        self.main = subprocess.Popen(
            [sys.executable, "-m", "engines.vllm_plugin"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "REPORT": str(report)},
        )
        self.main.stdin.write(msgspec.json.encode(worker) + b"\n")
        self.main.stdin.flush()
        until(report.exists)
        server, core, sockets, *self.shared = report.read_text().split()
        self.sockets = Path(sockets)
        self.server, self.core = psutil.Process(int(server)), psutil.Process(int(core))
        self.family = psutil.Process(self.main.pid).children(recursive=True)
        assert {self.server, self.core} <= set(self.family)
        assert len(self.family) == 3, "and the resource tracker"

    def end_input(self) -> None:
        self.main.stdin.close()

    def end(self) -> None:
        for process in (self.server, self.core):  # the tracker then tidies up
            if process.is_running():
                process.kill()
        self.main.kill()
        self.main.wait()
        self.end_input()


@pytest.fixture
def start() -> Iterator[Callable[[Path], Started]]:
    found: list[Started] = []

    def one(folder: Path) -> Started:
        found.append(Started(folder))
        return found[-1]

    yield one
    for each in found:
        each.end()


@pytest.fixture
def started(start: Callable[[Path], Started], tmp_path: Path) -> Started:
    return start(tmp_path)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_end_of_the_input_ends_all_of_it(started: Started) -> None:
    assert not started.stale.exists()  # a socket of an engine that was killed
    started.end_input()
    assert started.main.wait(60) == 128 + 15
    assert all(map(is_gone, started.family))


def test_a_server_that_is_killed_takes_all_others_along(started: Started) -> None:
    started.server.kill()
    assert started.main.wait(60) == 128 + 9
    assert all(map(is_gone, started.family))
    for name in started.shared:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


def test_a_starter_that_is_killed_takes_the_server_along(started: Started) -> None:
    """The server's own processes watch it; the connector sees to that."""
    started.main.kill()
    until(lambda: is_gone(started.server))


def test_a_start_removes_the_sockets_of_one_that_was_killed(start, tmp_path):
    """Also where the run folder's path is too long for sockets, which then have another."""
    long = [tmp_path / (letter * max(1, 75 - len(str(tmp_path)))) for letter in "ab"]
    killed = start(long[0])
    assert not killed.sockets.is_relative_to(tmp_path)
    killed.main.kill()
    killed.main.wait()
    after = start(long[1])
    assert not killed.sockets.exists() and after.sockets.exists()
    after.end_input()
    after.main.wait(60)
    assert not after.sockets.exists()
