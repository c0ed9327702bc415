"""vLLM's own OpenAI server as the gateway starts it: headers, streams, verbs, crashes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import psutil
import pytest

from engines.config import EngineConfig, VllmConfig, WorkerConfig
from engines.vllm_server import VllmServer
from engines.wire import CACHE_HEADER, SessionRef
from kvstore.config import StoreConfig
from tests.vllm.conftest import model_path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
HISTORY = "The quick brown fox jumps over the lazy dog and runs far away. " * 40


def session(name: str, tenant: str = "t") -> SessionRef:
    return SessionRef(tenant, name, blake2b(tenant.encode(), digest_size=32).digest())


class Served:
    """The server and an event loop that lives as long as it does."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        worker = WorkerConfig(
            engine=EngineConfig(
                kind="vllm",
                hot_bytes=256 << 20,
                max_context=4096,
                dtype="float32",
                max_batch=4,
                start_timeout_s=900,
                vllm=VllmConfig(python=sys.executable),
            ),
            store=StoreConfig(codec="raw", disk_path=str(folder / "cold"), ram_bytes=512 << 20),
            model_path=model_path(),
            served_model_name="smol",
            runtime_dir=str(folder),
            token="secret",
            log_level="warning",
        )
        self.loop = asyncio.new_event_loop()
        self.server = VllmServer(worker)
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

    async def post(self, body: dict, who: SessionRef) -> tuple[int, dict, bytes]:
        body = self.server.prepare_body(body, who)
        headers = {**self.server.session_headers(who), "content-type": "application/json"}
        data = json.dumps(body).encode()
        async with self.server.open("/v1/chat/completions", data, headers) as upstream:
            return upstream.status, dict(upstream.headers), await upstream.read()

    def chat(self, name: str, tenant: str = "t", **fields):
        """Every session's text is its own from the beginning, or they would share blocks."""
        text = f"This is {name}. {HISTORY}"
        body = {
            "model": "smol",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
            **fields,
        }
        status, headers, answer = self.run(self.post(body, session(name, tenant)))
        assert status == 200, answer
        return headers, answer

    def wait_saved(self, name: str):
        async def saved():
            async with asyncio.timeout(60):
                while True:
                    for report in await self.server.sessions():
                        if report.id == name and report.tier and not report.busy:
                            return report
                    await asyncio.sleep(0.1)

        return self.run(saved())

    def processes(self, name: str) -> list[psutil.Process]:
        mine = psutil.Process(self.server.pid).children(recursive=True)
        return [x for x in mine if name in " ".join(x.cmdline())]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("server"))
    yield served
    served.run(served.server.stop(1.0))
    served.loop.close()


def cached_tokens(answer: bytes) -> int:
    """vLLM leaves the details out where nothing was cached."""
    details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


def test_where_the_prompts_kv_came_from(served):
    headers, first = served.chat("headers")
    assert headers[CACHE_HEADER].startswith("miss; tokens=0")
    served.wait_saved("headers")
    headers, _ = served.chat("headers")
    assert headers[CACHE_HEADER].startswith("hot; tokens=")
    demoted = served.run(served.server.demote(session("headers"), "disk"))
    assert (demoted.report.hot, demoted.report.tier, demoted.kept) == (False, "disk", "")
    headers, back = served.chat("headers")
    tokens = cached_tokens(back)
    assert headers[CACHE_HEADER] == f"cold-disk; tokens={tokens}"
    assert tokens > 400
    text = [json.loads(x)["choices"][0]["message"]["content"] for x in (first, back)]
    assert text[0] == text[1]


def test_a_stream_says_it_too(served):
    served.chat("stream")
    served.wait_saved("stream")
    served.run(served.server.demote(session("stream")))
    headers, body = served.chat("stream", stream=True, stream_options={"include_usage": True})
    assert headers[CACHE_HEADER].startswith("cold-ram; tokens=")
    assert body.rstrip().endswith(b"data: [DONE]")


def test_another_tenant_gets_nothing(served):
    served.chat("mine")
    served.wait_saved("mine")
    headers, answer = served.chat("mine", tenant="other")
    assert headers[CACHE_HEADER].startswith("miss; tokens=0")
    assert cached_tokens(answer) == 0


def test_bad_input_is_vllms_own_error(served):
    body = {"model": "smol", "messages": "nothing"}
    status, _, answer = served.run(served.post(body, session("bad")))
    assert status == 400
    assert "error" in json.loads(answer)


def test_forget_and_stats(served):
    served.chat("gone")
    served.wait_saved("gone")
    assert served.run(served.server.forget(session("gone"))) is not None
    assert "gone" not in [x.id for x in served.run(served.server.sessions())]
    report = served.run(served.server.stats())
    assert report.hot_capacity_bytes > 0
    assert {x.name for x in report.tiers} == {"ram", "disk"}


@pytest.mark.parametrize("name", ["VLLM::Worker", "VLLM::EngineCore"])
def test_after_a_kill_sessions_wake_from_disk(served, name):
    """The client hears of an error; the engine comes back; what was on disk is still good."""
    label = f"killed {name}"
    _, right = served.chat(label)
    served.wait_saved(label)
    served.run(served.server.demote(session(label), "disk"))
    victims = served.processes(name)
    assert victims
    pid = served.server.pid
    os.kill(victims[0].pid, signal.SIGKILL)

    async def restarted() -> None:
        async with asyncio.timeout(300):
            while served.server.pid == pid or served.server.pid is None:
                await asyncio.sleep(0.2)

    served.run(restarted())
    served.wait_ready()
    headers, back = served.chat(label)
    assert headers[CACHE_HEADER].startswith("cold-disk; tokens=")
    text = [json.loads(x)["choices"][0]["message"]["content"] for x in (right, back)]
    assert text[0] == text[1]
