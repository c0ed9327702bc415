"""Answers as they come: chunks, keep-alives, clients that leave."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.worker_http.stage import HELLO, Open, asking, post

pytestmark = pytest.mark.mlx


async def test_chat_streamed(toy: Open) -> None:
    async with toy() as stage:
        stage.script("Fine, naïve ☃.")
        chunks = await stage.chunks(n=2, stream_options={"include_usage": True})
        plain = await stage.chunks()
    assert len({chunk.id for chunk in chunks}) == 1
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(x.delta.content or "" for x in mine) == "Fine, naïve ☃."
        assert [x.finish_reason for x in mine] == [None] * (len(mine) - 1) + ["stop"]
    *others, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in others)
    assert all("usage" in chunk.model_fields_set for chunk in others)
    assert not any("usage" in chunk.model_fields_set for chunk in plain)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(toy: Open, stream: bool) -> None:
    async with toy(step_s=0.01, max_context=100_000) as stage:
        leaving = asking(stage, stream=stream)
        while not stage.owner.streams:
            await asyncio.sleep(0.01)
        leaving.cancel()
        async with asyncio.timeout(30):
            await stage.owner.streams[0].cancelled.wait()


async def test_keepalives_while_the_prompt_is_read(toy: Open) -> None:
    async with toy(keepalive_s=0.05, prefill_s=0.3) as stage:
        stage.script("ok")
        body = {"model": "toy", "messages": HELLO, "stream": True}
        async with post(stage, body) as response:
            raw = (await response.read()).decode()
    comments = [line for line in raw.splitlines() if line.startswith(":")]
    assert ": keepalive" in comments
    assert any(line.startswith(": prefill") for line in comments)
    assert raw.endswith("data: [DONE]\n\n")
