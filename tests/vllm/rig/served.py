"""vLLM's own OpenAI server as the gateway starts it, and an event loop for the requests to it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

from engines.client.child_engine import VllmServer
from engines.config import EngineConfig, VllmConfig, WorkerConfig
from engines.wire import EngineReport, SessionRef
from kvstore.config import StoreConfig
from tests.vllm.rig.device import skip_without_device


def session(name: str, tenant: str = "t") -> SessionRef:
    return SessionRef(tenant, name, blake2b(tenant.encode(), digest_size=32).digest())


class Served:
    """The server and an event loop that lives as long as it does."""

    def __init__(
        self,
        folder: Path,
        codec: str,
        model: str,
        *args: str,
        max_context: int = 4096,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``args``, ``env``: of vLLM."""
        skip_without_device()
        folder.chmod(0o700)
        self.store = StoreConfig(codec=codec, disk_path=str(folder / "cold"), ram_bytes=512 << 20)
        worker = WorkerConfig(
            engine=EngineConfig(
                kind="vllm",
                hot_bytes=256 << 20,
                max_context=max_context,
                dtype="float32",
                max_batch=4,
                vllm=VllmConfig(python=sys.executable, args=args),
            ),
            store=self.store,
            model_path=model,
            served_model_name="smol",
            runtime_dir=str(folder),
            token="secret",
            log_level="warning",
        )
        self.loop = asyncio.new_event_loop()
        self.server = VllmServer(worker, env)
        self.run(self.server.start())
        self.wait_ready()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def wait_ready(self) -> None:
        async def ready() -> None:
            async with asyncio.timeout(900):
                while not self.server.ready:
                    assert "keeps failing" not in self.server.trouble, self.server.trouble
                    await asyncio.sleep(0.2)

        self.run(ready())

    async def post(
        self, body: dict, who: SessionRef, path: str = "/v1/chat/completions"
    ) -> tuple[int, dict, bytes]:
        body = self.server.prepare_body(body, who)
        headers = {**self.server.session_headers(who), "content-type": "application/json"}
        data = json.dumps(body).encode()
        async with self.server.open(path, data, headers) as upstream:
            return upstream.status, dict(upstream.headers), await upstream.read()

    def wait_saved(self, name: str):
        async def saved():
            async with asyncio.timeout(60):
                while True:
                    for report in await self.server.sessions():
                        if report.id == name and report.tier and not report.busy:
                            return report
                    await asyncio.sleep(0.1)

        return self.run(saved())

    async def until_served(self, count: int) -> None:
        async with asyncio.timeout(60):
            while (report := await self.server.stats()).num_running + report.num_waiting < count:
                await asyncio.sleep(0.01)

    def wait_whole(self) -> None:
        """Wait until no request is served and no block is held."""

        def is_whole(report: EngineReport) -> bool:
            held = report.hot_bytes - report.idle_hot_bytes
            return not (held or report.num_running or report.num_waiting)

        self.run(self._reports(is_whole))

    def wait_all_saved(self) -> None:
        """Wait until nothing is left to save."""
        self.run(self._reports(lambda report: not report.save_queue_bytes))

    async def _reports(self, wanted: Callable[[EngineReport], bool]) -> None:
        async with asyncio.timeout(60):
            while not wanted(await self.server.stats()):
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self.run(self.server.stop(1.0))
        self.loop.close()
