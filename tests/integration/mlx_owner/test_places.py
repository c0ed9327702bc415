"""Requests get places first come, first served; prompts are fed in turn, beside answers."""

from __future__ import annotations

import asyncio

import pytest

from engines.mlx_worker.generation import Token
from tests.integration.mlx_owner.harness import GREEDY, begun, engine, read, session, text

pytestmark = pytest.mark.mlx

LONG = 150


async def test_a_newcomer_runs_beside_full_places_and_all_end_with_the_same_tokens():
    """The gateway lets a tenant with nothing running in beyond the places: there is a spare one."""
    prompts = [text(i, 30) for i in range(4)]
    async with engine("llama", max_batch=4) as it:
        alone = [await it.turn(x, max_tokens=LONG) for x in prompts]
        short = await it.turn(text(9, 20), max_tokens=30)
        reading = [
            await begun(it.submit(x, session(f"s{i}", "greedy"), max_tokens=LONG))
            for i, x in enumerate(prompts)
        ]
        for number in range(2):
            before = it.reports.engine().counters["generated_tokens"]
            other = await begun(
                it.submit(text(9, 20), session(f"o{number}", "modest"), max_tokens=30)
            )
            assert it.reports.engine().counters["generated_tokens"] - before < 4 * 16
            assert (await other).tokens == short.tokens
        assert not any(x.done() for x in reading)  # it did not wait for one of them to end
        answers = await asyncio.gather(*reading)
    assert [x.tokens for x in answers] == [x.tokens for x in alone]


async def test_who_comes_first_is_served_first():
    order: list[int] = []

    async def follow(number: int) -> None:
        stream = it.submit(text(number, 20 + 80 * (number % 3)), session(f"s{number}"))
        async for event in stream.events():
            if isinstance(event, Token) and number not in order:
                order.append(number)

    async with engine("llama", max_batch=1, prefill_step=512) as it:
        running = await begun(it.submit(text(99, 20), session("first"), max_tokens=LONG))
        spare = await begun(it.submit(text(98, 20), session("second"), max_tokens=LONG))
        await asyncio.gather(running, spare, *(follow(i) for i in range(8)))
    assert order == list(range(8))


async def test_a_short_prompt_waits_for_one_chunk_of_each_long_one():
    async with engine("llama", max_batch=4, prefill_step=32) as it:
        long = [
            asyncio.create_task(read(it.submit(text(i, 500), session(f"l{i}")))) for i in range(3)
        ]
        short = await it.turn(text(9, 20), session("short"), max_tokens=1)
        assert short.finished == {0: "length"}
        assert not any(x.done() for x in long)
        await asyncio.gather(*long)


async def test_several_answers_to_one_prompt_need_one_free_place():
    """They would wait for ever while others come and go one by one."""
    async with engine("llama", max_batch=4) as it:
        long = [it.submit(text(i, 30), session(f"s{i}"), max_tokens=900) for i in range(4)]
        reading = [await begun(x) for x in long]
        answer = await it.turn(text(9, 20), session("wide"), max_tokens=4, sampling=4 * GREEDY)
        assert answer.finished == dict.fromkeys(range(4), "length")
        assert not any(x.done() for x in reading)
        for stream in long:
            stream.cancel()
        await asyncio.gather(*reading)
