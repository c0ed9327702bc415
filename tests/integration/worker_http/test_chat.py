"""Chat completions, whole and streamed, spoken to by OpenAI's own client."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from engines.http import CACHE_HEADER, SALT_HEADER, SESSION_HEADER, TENANT_HEADER, CacheOutcome
from tests.integration.worker_http.stage import HELLO, Open, post
from tests.tiny_tokenizer import THINKING

pytestmark = pytest.mark.mlx


async def test_chat_in_one_piece(toy: Open) -> None:
    outcome = CacheOutcome("cold-ram", 7, "diverged")
    async with toy(outcome=outcome) as stage:
        stage.script("Fine, naïve ☃.")
        raw = await stage.client.chat.completions.with_raw_response.create(
            model="toy", messages=HELLO
        )
        reply = raw.parse()
    assert raw.headers[CACHE_HEADER] == "cold-ram; tokens=7; reason=diverged"
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == "Fine, naïve ☃."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(stage.owner.submitted[0].prompt)
    assert reply.usage.prompt_tokens_details.cached_tokens == 7
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_what_is_reused_in_the_end_is_counted(toy: Open) -> None:
    expected, late = CacheOutcome("hot", 9), CacheOutcome("hot", 7)
    async with toy(outcome=expected, late_outcome=late) as stage:
        raw = await stage.client.chat.completions.with_raw_response.create(
            model="toy", messages=HELLO, max_tokens=2
        )
        last = (await stage.chunks(max_tokens=2, stream_options={"include_usage": True}))[-1]
    assert raw.headers[CACHE_HEADER] == "hot; tokens=7"
    for usage in (raw.parse().usage, last.usage):
        assert usage.prompt_tokens_details.cached_tokens == 7


async def test_length_and_stop(toy: Open) -> None:
    async with toy() as stage:
        stage.script("one two three four")
        short = await stage.chat(max_completion_tokens=3)
        stopped = await stage.chat(stop=[" thr", "nothing"], n=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 3
    assert [x.message.content for x in stopped.choices] == ["one two"] * 2
    assert [x.finish_reason for x in stopped.choices] == ["stop"] * 2
    assert stage.owner.streams[-1].stopped == [0, 1]


async def test_a_stop_string_that_is_whole_at_the_limit(toy: Open) -> None:
    async with toy() as stage:
        stage.script("one two three four")
        num_tokens = len(stage.tokenizer.encode("one two three", add_special_tokens=False))
        limits = {"max_tokens": num_tokens, "stop": ["three"]}
        answers = [await stage.chat(**limits)]
        chunks = [await stage.chunks(**limits)]
        ask = partial(stage.client.completions.create, model="toy", prompt="Go", **limits)
        answers.append(await ask())
        chunks.append([chunk async for chunk in await ask(stream=True)])
    for ended in [x.choices[0] for x in answers] + [x[-1].choices[0] for x in chunks]:
        assert (ended.finish_reason, ended.stop_reason) == ("stop", "three")


async def test_zero_tokens_reads_the_prompt_only(toy: Open) -> None:
    async with toy() as stage:
        stage.script("never shown")
        reply = await stage.chat(max_tokens=0)
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 0


async def test_reasoning(toy: Open) -> None:
    async with toy(THINKING) as stage:
        stage.script("two and two</think>\n\nfour")
        reply = await stage.chat()
        chunks = await stage.chunks()
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("two and two", "four")
    thought = stage.tokenizer.encode("two and two", add_special_tokens=False)
    reasoning_tokens = reply.usage.completion_tokens_details.reasoning_tokens
    assert len(thought) <= reasoning_tokens <= len(thought) + 1
    deltas = [c.choices[0].delta for c in chunks]
    thoughts = [getattr(x, "reasoning_content", None) or "" for x in deltas]
    assert "".join(thoughts) == "two and two"
    assert "".join(x.content or "" for x in deltas) == "four"


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


async def test_logprobs(toy: Open) -> None:
    async with toy() as stage:
        stage.script("Hé ☃")
        reply = await stage.chat(logprobs=True, top_logprobs=3)
        chunks = await stage.chunks(logprobs=True)
    content = reply.choices[0].logprobs.content
    assert bytes(b for x in content for b in x.bytes).decode() == "Hé ☃"
    assert all(len(x.top_logprobs) == 3 for x in content)
    assert all(x.top_logprobs[0].token == x.token for x in content)
    assert all(x.logprob <= 0 for x in content)
    streamed = [x for c in chunks if (lp := c.choices[0].logprobs) for x in lp.content]
    assert [x.token for x in streamed] == [x.token for x in content]


async def test_a_seed_repeats_beside_other_requests(toy: Open) -> None:
    """No script: the toy's noise is sampled, so two answers agree only by their seed."""
    async with toy() as stage:
        options = {"max_tokens": 12, "temperature": 2.0, "logprobs": True}

        async def ids(**fields: Any) -> list[list[str]]:
            reply = await stage.chat(**options, **fields)
            return [[x.token for x in choice.logprobs.content] for choice in reply.choices]

        alone = await ids(seed=7)
        beside = await asyncio.gather(ids(seed=7), ids(seed=8), ids(seed=7, n=2), ids())
    assert beside[0] == alone
    assert beside[1] != alone
    assert beside[2][0] == alone[0]
    assert beside[2][1] != alone[0]
    assert beside[3] != alone


async def test_logit_bias_and_penalties_reach_the_row(toy: Open) -> None:
    async with toy() as stage:
        stage.script("a")
        (banned,) = stage.tokenizer.encode("a")
        reply = await stage.chat(logit_bias={str(banned): -100}, max_tokens=1, temperature=0)
    assert reply.choices[0].message.content != "a"


async def test_session_headers(toy: Open) -> None:
    named = {TENANT_HEADER: "t", SESSION_HEADER: "caf%C3%A9%2F1", SALT_HEADER: "00ff"}
    body = {"model": "toy", "messages": HELLO, "max_tokens": 1}
    async with toy() as stage:
        async with post(stage, body, **named) as response:
            assert response.status == 200
        async with post(stage, body) as response:
            assert response.status == 200
        async with post(stage, body, **{**named, SALT_HEADER: "xx"}) as response:
            assert response.status == 400
    first, second = stage.owner.submitted
    assert (first.session.tenant, first.session.id) == ("t", "café/1")
    assert first.session.salt == b"\x00\xff"
    assert second.session is None
