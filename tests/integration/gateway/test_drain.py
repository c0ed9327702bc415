"""SIGTERM: running answers finish, new ones are refused, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from tests.waiting import eventually, is_gone

CHAT = "/v1/chat/completions"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def asked(script: str) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": MODEL, "messages": messages, "stream": True, "metadata": {"fake": script}}


async def begin(
    http: aiohttp.ClientSession, stack: FakeStack, script: str
) -> aiohttp.ClientResponse:
    answer = await http.post(stack.url + CHAT, json=asked(script))
    await answer.content.readuntil(b"\n\n")
    return answer


async def test_drain(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    with FakeStack(tmp_path, gateway={"drain_s": 3.0}) as stack:
        engine = stack.engine
        short = [await begin(http, stack, "chunks=60 delay_s=0.02") for _ in range(5)]
        long = await begin(http, stack, "chunks=5000 delay_s=0.02")
        stack.terminate()
        await _until_draining(http, stack)

        async with http.post(stack.url + CHAT, json=asked("")) as refused:
            assert refused.status == 503
            assert "retry-after" in refused.headers
        async with http.get(stack.url + "/livez") as alive:
            assert alive.status == 200

        for answer in short:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        *_, error, done, end = (await long.read()).split(b"\n\n")
        assert "shutting down" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert (done, end) == (b"data: [DONE]", b"")
        assert await asyncio.to_thread(stack.wait, 20) == 0
        assert not engine.is_running()
        assert "ended in good order" in stack.log.read_text()


async def test_a_second_signal_does_not_wait(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    with FakeStack(tmp_path, gateway={"drain_s": 300.0}) as stack:
        engine = stack.engine
        answer = await begin(http, stack, "chunks=50000 delay_s=0.02")
        stack.terminate()
        await _until_draining(http, stack)
        assert engine.is_running()  # nothing has ended yet
        stack.terminate()
        *_, error, done, end = (await answer.read()).split(b"\n\n")
        assert "shutting down" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert (done, end) == (b"data: [DONE]", b"")
        assert await asyncio.to_thread(stack.wait, 60) == 0  # the drain would take 300 s
        await eventually(lambda: is_gone(engine))
        assert "Traceback" not in stack.log.read_text()


async def _until_draining(http: aiohttp.ClientSession, stack: FakeStack) -> None:
    async with asyncio.timeout(60):
        while True:
            async with http.get(stack.url + "/readyz") as ready:
                if ready.status == 503:
                    assert (await ready.json())["error"]["code"] == "draining"
                    return
            await asyncio.sleep(0.02)


async def test_figures_come_at_once_beside_an_engine_that_does_not_answer(tmp_path, http):
    with FakeStack(tmp_path) as stack:
        engine = stack.engine
        engine.suspend()
        try:
            for path in ("/metrics", "/readyz", "/livez"):
                began = time.monotonic()
                async with http.get(stack.url + path) as answer:
                    assert answer.status == 200
                assert time.monotonic() - began < 10.0, path
        finally:
            engine.resume()
