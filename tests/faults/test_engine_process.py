"""The engine's process dies, hangs or talks nonsense: every client gets an answer, and more do."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from tests.waiting import eventually, is_gone

CHAT = "/v1/chat/completions"
STALL_S = 3.0  # more than a busy machine makes a healthy engine wait


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("stack")
    with FakeStack(folder, engine={"stall_timeout_s": STALL_S}) as running:
        yield running


@pytest.fixture
async def http(stack: FakeStack) -> AsyncIterator[aiohttp.ClientSession]:
    stack.wait_ready()
    async with aiohttp.ClientSession(stack.url) as session:
        yield session


def asked(script: str = "", *, stream: bool = True, text: str = "hello big world") -> Any:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "stream": stream, "metadata": {"fake": script}}


async def events(http: aiohttp.ClientSession, body: Any) -> list[Any]:
    """All events of a stream, parsed; [DONE] as it is."""
    async with http.post(CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.read()
    lines = [x for x in text.decode().split("\n\n") if x]
    assert all(x.startswith("data: ") for x in lines)
    return [x[6:] if x[6:] == "[DONE]" else json.loads(x[6:]) for x in lines]


def said(parsed: list[Any]) -> str:
    return "".join(
        x["choices"][0]["delta"].get("content", "")
        for x in parsed
        if isinstance(x, dict) and x.get("choices")
    )


async def status_and_code(http: aiohttp.ClientSession, body: Any) -> tuple[int, str | None]:
    async with http.post(CHAT, json=body) as answer:
        if answer.status == 200:
            return 200, None
        return answer.status, (await answer.json())["error"]["code"]


async def running_turns(http: aiohttp.ClientSession) -> float:
    async with http.get("/metrics") as answer:
        text = await answer.text()
    (line,) = [x for x in text.splitlines() if x.startswith("thermocline_engine_running ")]
    return float(line.split()[1])


async def until_running(http: aiohttp.ClientSession, some: bool) -> None:
    """Until the engine serves a request, or none."""
    async with asyncio.timeout(60):
        while bool(await running_turns(http)) != some:
            await asyncio.sleep(0.02)


async def test_kill_9_in_mid_stream(stack: FakeStack, http: aiohttp.ClientSession):
    """An error event and an end; the next request after the restart is right."""
    async with http.post(CHAT, json=asked("chunks=100000 delay_s=0.01")) as answer:
        await answer.content.readuntil(b"\n\n")
        stack.engine.kill()
        rest = await asyncio.wait_for(answer.read(), 60)
    *_, error, done, end = rest.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
    assert (done, end) == (b"data: [DONE]", b"")

    status, code = await status_and_code(http, asked())
    assert (status, code) in ((503, "engine_unavailable"), (200, None))
    stack.wait_ready()
    parsed = await events(http, asked())
    assert said(parsed) == "You said: hello big world" and parsed[-1] == "[DONE]"


@pytest.mark.parametrize("fault", ["cut", "no-done"])
async def test_an_answer_that_breaks_off(http: aiohttp.ClientSession, fault: str):
    parsed = await events(http, asked(f"fault={fault} after=3"))
    assert said(parsed) == "You said: hello"
    assert "error" in parsed[-2] and parsed[-1] == "[DONE]"


async def test_a_stream_that_falls_silent(http: aiohttp.ClientSession):
    began = time.monotonic()
    async with asyncio.timeout(STALL_S + 60):  # it is silent for ever
        parsed = await events(http, asked("fault=hang after=3"))
    assert time.monotonic() - began >= STALL_S
    assert parsed[-2]["error"]["code"] == "engine_stalled"
    await until_running(http, False)


async def test_garbage_is_relayed_as_it_is(http: aiohttp.ClientSession):
    async with http.post(CHAT, json=asked("fault=garbage after=1")) as answer:
        body = await answer.read()
    assert b"\x00\xff\xfe not an event\n\ndata: {half\n\n" in body
    assert body.endswith(b"data: [DONE]\n\n")


async def test_bytes_one_by_one(http: aiohttp.ClientSession):
    """Half a character of UTF-8 at every boundary, and yet the same text."""
    parsed = await events(http, asked("fault=bytes", text="größer café 思考"))
    assert said(parsed) == "You said: größer café 思考"


async def test_errors_before_the_head(http: aiohttp.ClientSession):
    assert await status_and_code(http, asked("fault=plain-500")) == (502, "engine")
    assert (await status_and_code(http, asked("fault=error-400")))[0] == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_place(http: aiohttp.ClientSession, stream: bool):
    body = asked("chunks=100000 delay_s=0.01", stream=stream)
    leaving = asyncio.create_task(events(http, body))
    await until_running(http, True)
    leaving.cancel()
    await until_running(http, False)  # its answer would have taken a quarter of an hour


async def test_a_slow_reader_is_held_in_bounds_and_slows_no_other(stack, http):
    async with http.post(CHAT, json=asked("chunks=200000")) as answer:
        await answer.content.readexactly(1000)
        before = stack.process.memory_info().rss
        for _ in range(20):
            assert said(await events(http, asked())) == "You said: hello big world"
            await asyncio.sleep(0.05)
        grown = stack.process.memory_info().rss - before
        answer.close()
    assert grown < 16 << 20


@pytest.mark.slow
async def test_a_stopped_engine_is_noticed_replaced_and_forgotten(stack, http):
    """SIGSTOP: its sockets stay open, but nothing comes. Another one is started, and answers."""
    frozen = stack.engine
    frozen.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(status_and_code(http, asked(stream=False)))
    assert await asyncio.wait_for(waiting, 60) == (200, None)
    await eventually(lambda: is_gone(frozen))
    stack.wait_ready()
    assert (await status_and_code(http, asked()))[0] == 200


BURST = 400  # the engine's socket has a line of 128


@pytest.mark.slow
async def test_a_burst_beyond_the_engines_line_is_answered(tmp_path: Path) -> None:
    """All at once, and the engine accepts none for a moment, so its socket's line is full."""
    settings = {"scheduler": {"max_running": 4096}, "gateway": {"max_connections": 4096}}
    with FakeStack(tmp_path, **settings) as stack:
        engine = stack.engine
        async with aiohttp.ClientSession(
            stack.url, connector=aiohttp.TCPConnector(limit=0)
        ) as http:

            async def status(number: int) -> int:
                body = asked(stream=False, text=f"hello {number}")
                async with http.post(CHAT, json=body) as answer:
                    await answer.read()
                    return answer.status

            engine.suspend()
            asking = [asyncio.create_task(status(i)) for i in range(BURST)]
            await asyncio.sleep(2.0)
            engine.resume()
            statuses = await asyncio.gather(*asking)
    assert Counter(statuses) == {200: BURST}


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[FakeStack]:
    """One whose engine has never died: each death in a row makes the next start wait longer."""
    with FakeStack(tmp_path) as running:
        yield running


@pytest.fixture
async def fresh_http(fresh: FakeStack) -> AsyncIterator[aiohttp.ClientSession]:
    fresh.wait_ready()
    async with aiohttp.ClientSession(fresh.url) as session:
        yield session


async def test_kill_9_before_the_engine_has_said_anything(fresh, fresh_http):
    """It is asked once more when it is back: the client sees a longer wait, and all of the text."""
    bodies = [asked("delay_s=1.5", stream=x, text=f"hello {x}") for x in (False, True)]
    waiting = [asyncio.create_task(whole_text(fresh_http, x)) for x in bodies]
    while await running_turns(fresh_http) < 2:
        await asyncio.sleep(0.02)
    pid = fresh.engine.pid
    fresh.engine.kill()
    texts = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert texts == ["You said: hello False", "You said: hello True"]
    fresh.wait_ready()
    assert fresh.engine.pid != pid


async def whole_text(fresh_http: aiohttp.ClientSession, body: Any) -> str:
    if body["stream"]:
        return said(await events(fresh_http, body))
    async with fresh_http.post(CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_dies_of_kills_it_twice_at_most(fresh, fresh_http, stream):
    if stream:
        *_, error, done = await events(fresh_http, asked("fault=die after=0"))
        assert (error["error"]["code"], done) == ("engine_unavailable", "[DONE]")
    else:
        status, code = await status_and_code(fresh_http, asked("fault=die after=0", stream=False))
        assert status in (503, 504) and code in ("engine_unavailable", "engine_stalled")
    assert fresh.log.read_text().count("sent once more") == 1
    fresh.wait_ready()


async def test_a_large_body_is_not_held_for_another_try(fresh, fresh_http):
    body = json.dumps(asked("delay_s=1000", stream=False, text="x" * (2 << 20))).encode()
    waiting = asyncio.create_task(status_of_bytes(fresh_http, body))
    await until_running(fresh_http, True)
    fresh.engine.kill()
    assert await asyncio.wait_for(waiting, 60) in (503, 504)
    fresh.wait_ready()
    assert (await status_and_code(fresh_http, asked(stream=False)))[0] == 200


async def status_of_bytes(fresh_http: aiohttp.ClientSession, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    async with fresh_http.post(CHAT, data=io.BytesIO(body), headers=headers) as answer:
        return answer.status
