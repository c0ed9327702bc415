"""The memory of a container is nearly used up: sessions leave it in time, and no process ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launch.machine.resources import CGROUP, available_memory
from tests.asking import asked
from tests.faults.cgroups import Group, limited_group
from tests.integration.launch.test_serve import Server
from tests.waiting import until

pytestmark = pytest.mark.slow

MIB = 1 << 20
LIMIT, LOW, STOP = 700 * MIB, 240 * MIB, 180 * MIB
HOLD = """
import sys, time
held = bytearray(int(sys.argv[1]))
held[::4096] = b"1" * len(held[::4096])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def group() -> Iterator[Group]:
    with limited_group(LIMIT) as made:
        if made is None:
            pytest.skip("no group of processes can be limited here")
        yield made


def left_in(group: Group, tmp_path: Path) -> int:
    """What the product reads in that group."""
    inside = tmp_path / "inside"
    version = "0::" if group.folder.parent == CGROUP else "4:memory:"
    inside.write_text(f"{version}/{group.folder.name}\n")
    return available_memory(own=inside)


@contextmanager
def held(group: Group, nbytes: int) -> Iterator[None]:
    """Have another process of the group hold so much memory."""
    command = [*group.within, sys.executable, "-c", HOLD, str(nbytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            other.kill()


def refusal(server: Server) -> str:
    """The code of the error that a turn gets; empty if it is taken."""
    answer = server.chat("late")
    if answer.status == 200:
        return ""
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    return str(answer.content["error"]["code"])


def states(server: Server) -> set[tuple[str, str | None]]:
    rows = asked(f"{server.url}/v1/sessions").content["data"]
    return {(x["state"], x["tier"]) for x in rows}


def test_below_a_containers_limit_sessions_leave_memory_and_turns_wait(group, tmp_path):
    server = Server(tmp_path, "--set", f"scheduler.memory_low_bytes={LOW}", within=group.within)
    try:
        of_server = psutil.Process(server.process.pid)
        before = {of_server.pid, *(x.pid for x in of_server.children(recursive=True))}
        for name in ("one", "two"):
            assert server.chat(name).status == 200
        assert states(server) == {("idle", "ram")}
        with held(group, left_in(group, tmp_path) - (LOW + STOP) // 2):
            until(lambda: states(server) == {("cold", "disk")}, what="they sleep on the disk")
            assert refusal(server) == ""
            with held(group, left_in(group, tmp_path) - (STOP + LOW // 2) // 2):
                until(lambda: refusal(server) != "", what="turns are refused")
        until(lambda: refusal(server) == "", what="turns are taken again")
        after = {of_server.pid, *(x.pid for x in of_server.children(recursive=True))}
        assert after == before
    finally:
        server.stop()
