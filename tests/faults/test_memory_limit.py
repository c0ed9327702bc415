"""The memory of a container is nearly used up: sessions leave it in time, and no process ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from engines.client.child_engine import FakeServer
from engines.wire import SessionRef
from launch.machine.resources import CGROUP, available_memory
from scheduler.config import SchedulerConfig
from scheduler.sessions import MemoryScarce, SessionManager
from tests.asking import asked
from tests.faults.cgroups import Group, limited_group
from tests.integration.launch.test_serve import Server
from tests.reports import worker_config
from tests.waiting import eventually, until

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


@pytest.mark.slow
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


PLENTY, USED_UP = 5000, 299
MARKS = SchedulerConfig(memory_low_bytes=1000)


@pytest.fixture
def short() -> Iterator[Path]:
    """Short enough for the path of a unix socket."""
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        yield Path(name)


@asynccontextmanager
async def running(engine: FakeServer, manager: SessionManager) -> AsyncIterator[None]:
    await engine.start()
    keeping = asyncio.create_task(manager.run())
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await engine.stop(0)


async def test_the_engine_is_ended_and_started_again(short: Path) -> None:
    engine = FakeServer(worker_config(str(short)))
    machine = [PLENTY]
    manager = SessionManager(engine, MARKS, salt_of=str.encode, memory=lambda: machine[0])
    ref = SessionRef(tenant="alice", id="s", salt=b"alice")
    async with running(engine, manager):
        await eventually(lambda: engine.ready)
        first = engine.pid
        machine[0] = USED_UP
        await eventually(lambda: engine.pid != first)
        with pytest.raises(MemoryScarce):
            async with manager.turn(ref):
                raise AssertionError("it was admitted")
        machine[0] = PLENTY
        await eventually(lambda: engine.ready and engine.pid not in (None, first))
        await eventually(lambda: not manager.headroom.scarce)
        async with manager.turn(ref):
            pass
