"""Chat completions in one piece, spoken to by OpenAI's own client."""

from __future__ import annotations

from functools import partial

import pytest

from engines.http import CACHE_HEADER, CacheOutcome
from tests.integration.worker_http.stage import HELLO, Open
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
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    deltas = [c.choices[0].delta for c in chunks]
    thoughts = [getattr(x, "reasoning_content", None) or "" for x in deltas]
    assert "".join(thoughts) == "two and two"
    assert "".join(x.content or "" for x in deltas) == "four"
