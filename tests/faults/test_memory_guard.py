"""The machine's memory runs out: the engine's process is ended in time, and comes back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from engines.client.child_engine import FakeServer
from engines.wire import SessionRef
from scheduler.config import SchedulerConfig
from scheduler.sessions import MemoryScarce, SessionManager
from tests.reports import worker_config
from tests.waiting import eventually

PLENTY, USED_UP = 5000, 299
MARKS = SchedulerConfig(memory_low_bytes=1000)


@pytest.fixture
def folder() -> Iterator[Path]:
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


async def test_the_engine_is_ended_and_started_again(folder: Path) -> None:
    engine = FakeServer(worker_config(str(folder)))
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
