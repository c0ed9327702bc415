"""An engine client and the fake engine's two servers, all on one event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.stacks.constants import configured
from engines.client.engine_client import EngineClient
from engines.config import EngineConfig, WorkerConfig
from engines.fake_worker.fake_sessions import CODEC, FakeSessions
from engines.fake_worker.server import DataServer
from engines.host.control_server import ControlServer
from engines.wire import Welcome
from kvstore.config import StoreConfig
from tests.waiting import eventually

WELCOME = Welcome(
    engine="fake", engine_version="1", model="m", max_context=1000, codec=CODEC, hibernation=True
)


async def welcomed() -> Welcome:
    return WELCOME


class FakeProcess:
    """The fake engine as its process runs it, without the process."""

    def __init__(self, folder: Path, token: str = "right") -> None:
        self._folder = folder
        self.sessions = FakeSessions(1 << 30)
        self._control = ControlServer(token, welcomed, self.sessions)
        self.sessions.listen(self._control.publish)
        self._data = DataServer(token, "m", WELCOME.max_context, self.sessions)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._runner = await self._data.serve(f"{self._folder}/http.sock")
        self._server = await self._control.serve(f"unix:{self._folder}/control.sock")

    async def stop(self) -> None:
        assert self._server is not None and self._runner is not None
        self._server.close()
        self._control.close()
        await self._runner.cleanup()
        (self._folder / "control.sock").unlink(missing_ok=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the path of a unix socket."""
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        yield Path(name)


@pytest.fixture
async def fake(folder: Path) -> AsyncIterator[FakeProcess]:
    process = FakeProcess(folder)
    await process.start()
    yield process
    await process.stop()


@pytest.fixture
async def client(folder: Path, fake: FakeProcess) -> AsyncIterator[EngineClient]:
    engine = EngineClient(worker_config(folder))
    await engine.start()
    await eventually(lambda: engine.ready)
    yield engine
    await engine.stop(0)


def worker_config(folder: Path, token: str = "right") -> WorkerConfig:
    engine = configured(EngineConfig, kind="fake", stall_timeout_s=0.4)
    named = {"model_path": "", "served_model_name": "m", "runtime_dir": str(folder)}
    return WorkerConfig(engine=engine, store=StoreConfig(), token=token, **named)
