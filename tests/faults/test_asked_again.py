"""The engine ends before it has said anything of an answer: it is asked once more."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.stacks.fake_stack import FakeStack
from tests.faults.test_engine_process import (
    CHAT,
    asked,
    events,
    running_turns,
    said,
    status_and_code,
    until_running,
)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[FakeStack]:
    """One whose engine has never died: each death in a row makes the next start wait longer."""
    with FakeStack(tmp_path) as running:
        yield running


@pytest.fixture
async def http(fresh: FakeStack) -> AsyncIterator[aiohttp.ClientSession]:
    fresh.wait_ready()
    async with aiohttp.ClientSession(fresh.url) as session:
        yield session


async def test_kill_9_before_the_engine_has_said_anything(fresh, http):
    """It is asked once more when it is back: the client sees a longer wait, and all of the text."""
    bodies = [asked("delay_s=1.5", stream=x, text=f"hello {x}") for x in (False, True)]
    waiting = [asyncio.create_task(whole_text(http, x)) for x in bodies]
    while await running_turns(http) < 2:
        await asyncio.sleep(0.02)
    pid = fresh.engine.pid
    fresh.engine.kill()
    texts = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert texts == ["You said: hello False", "You said: hello True"]
    fresh.wait_ready()
    assert fresh.engine.pid != pid


async def whole_text(http: aiohttp.ClientSession, body: Any) -> str:
    if body["stream"]:
        return said(await events(http, body))
    async with http.post(CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_dies_of_kills_it_twice_at_most(fresh, http, stream):
    if stream:
        *_, error, done = await events(http, asked("fault=die after=0"))
        assert (error["error"]["code"], done) == ("engine_unavailable", "[DONE]")
    else:
        status, code = await status_and_code(http, asked("fault=die after=0", stream=False))
        assert status in (503, 504) and code in ("engine_unavailable", "engine_stalled")
    assert fresh.log.read_text().count("asked once more") == 1
    fresh.wait_ready()


async def test_a_large_body_is_not_held_for_another_try(fresh, http):
    body = json.dumps(asked("delay_s=1000", stream=False, text="x" * (2 << 20))).encode()
    waiting = asyncio.create_task(status_of_bytes(http, body))
    await until_running(http, True)
    fresh.engine.kill()
    assert await asyncio.wait_for(waiting, 60) in (503, 504)
    fresh.wait_ready()
    assert (await status_and_code(http, asked(stream=False)))[0] == 200


async def status_of_bytes(http: aiohttp.ClientSession, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    async with http.post(CHAT, data=io.BytesIO(body), headers=headers) as answer:
        return answer.status
