"""vLLM's own OpenAI server as the gateway starts it, and an event loop for the requests to it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from engines.client.child_engine import VllmServer
from engines.config import EngineConfig, VllmConfig, WorkerConfig
from engines.wire import EngineReport, SessionRef, SessionReport
from kvstore.config import StoreConfig
from kvstore.session import TierName
from tests.vllm.rig.device import skip_without_device
from tests.waiting import eventually

HISTORY = "The quick brown fox jumps over the lazy dog and runs far away. " * 40


def session(name: str, tenant: str = "t") -> SessionRef:
    return SessionRef(tenant, name, blake2b(tenant.encode(), digest_size=32).digest())


def body_of(name: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Every session's text is its own from the beginning, or they would share blocks."""
    return {
        "model": "smol",
        "messages": [{"role": "user", "content": f"This is {name}. {HISTORY}"}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }


class Served:
    """The server and an event loop that lives as long as it does."""

    def __init__(self, folder: Path, codec: str, model: str, *args: str) -> None:
        """``args``: of vLLM."""
        skip_without_device()
        folder.chmod(0o700)
        self.store = StoreConfig(codec=codec, disk_path=str(folder / "cold"), ram_bytes=512 << 20)
        worker = WorkerConfig(
            engine=EngineConfig(
                kind="vllm",
                hot_bytes=256 << 20,
                max_context=4096,
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
        self.server = VllmServer(worker)
        self.run(self.server.start())
        self.run(self._until_ready())

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def _until_ready(self) -> None:
        async with asyncio.timeout(900):
            while not self.server.ready:
                assert "keeps failing" not in self.server.trouble, self.server.trouble
                await asyncio.sleep(0.2)

    async def post(self, body: dict, who: SessionRef) -> tuple[int, dict, bytes]:
        body = self.server.prepare_body(body, who)
        headers = {**self.server.session_headers(who), "content-type": "application/json"}
        data = json.dumps(body).encode()
        async with self.server.open("/v1/chat/completions", data, headers) as upstream:
            return upstream.status, dict(upstream.headers), await upstream.read()

    def chat(self, name: str, tenant: str = "t", **fields):
        status, headers, answer = self.run(self.post(body_of(name, fields), session(name, tenant)))
        assert status == 200, answer
        return headers, answer

    def leave(self, names: Sequence[str], when: Callable[[], object], **fields) -> None:
        """Ask for all of these at once, and close the connections ``when`` it is time."""

        async def left() -> None:
            asking = [asyncio.create_task(self.post(body_of(x, fields), session(x))) for x in names]
            await self._until_served(len(names))
            await eventually(when)
            assert not any(x.done() for x in asking), "an answer came too early"
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

        self.run(left())

    def wait_saved(self, name: str):
        async def saved():
            async with asyncio.timeout(60):
                while True:
                    for report in await self.server.sessions():
                        if report.id == name and report.tier and not report.busy:
                            return report
                    await asyncio.sleep(0.1)

        return self.run(saved())

    def put_to_sleep(self, name: str, tier: TierName | None = None) -> SessionReport | None:
        """Demote a session; ask again while its last turn is being saved, as a gateway does."""

        async def asleep():
            async with asyncio.timeout(60):
                while (demoted := await self.server.demote(session(name), tier)).kept:
                    await asyncio.sleep(0.1)
                return demoted.report

        return self.run(asleep())

    async def _until_served(self, count: int) -> None:
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
