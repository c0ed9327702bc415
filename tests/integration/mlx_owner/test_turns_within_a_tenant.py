"""A tenant's own long answers keep its short prompts waiting for a while, not until they end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.mlx_owner.harness import GREEDY, begun, engine, read, session, text

pytestmark = pytest.mark.mlx

ENDLESS = 900
TOKEN_BYTES = 3072  # of the tiny llama, as in test_budget


async def test_a_short_prompt_takes_a_place_from_its_own_tenants_long_answers() -> None:
    """Endless streams hold all places when their tenant asks again; there is no other tenant."""
    prompts = [text(i, 30) for i in range(4)]
    async with engine("llama", max_batch=4) as it:
        alone = [await it.turn(x, max_tokens=ENDLESS) for x in prompts]
        reading = [
            await begun(it.submit(x, session(f"s{i}", "t"), max_tokens=ENDLESS))
            for i, x in enumerate(prompts)
        ]
        for number in range(3):
            before = it.reports.engine().counters["generated_tokens"]
            short = await it.turn(text(9 + number, 20), session(f"o{number}", "t"), max_tokens=4)
            assert short.finished == {0: "length"}
            assert it.reports.engine().counters["generated_tokens"] - before < 4 * (256 + 64)
        assert not any(x.done() for x in reading)
        answers = await asyncio.gather(*reading)
    assert [x.tokens for x in answers] == [x.tokens for x in alone]


async def test_so_it_does_while_more_of_them_take_turns_than_there_are_places() -> None:
    async with engine("llama", max_batch=2) as it:
        reading = [
            asyncio.create_task(read(it.submit(text(i, 30), session(f"s{i}", "t"), max_tokens=999)))
            for i in range(2)
        ]
        await asyncio.sleep(0)
        third = await begun(it.submit(text(5, 30), session("third", "t"), max_tokens=999))
        short = await it.turn(text(9, 20), session("o", "t"), max_tokens=4)
        assert short.finished == {0: "length"}
        assert not any(x.done() for x in (*reading, third))
        await asyncio.gather(*reading, third)


async def test_short_prompts_without_end_leave_a_long_answer_its_part() -> None:
    async with engine("llama", max_batch=1) as it:
        stream = it.submit(text(1, 30), session("long", "t"), max_tokens=ENDLESS)
        long = await begun(stream)
        shorts = [it.submit(text(5 + i, 20), session(f"o{i}", "t"), max_tokens=4) for i in range(8)]
        await asyncio.gather(*(read(x) for x in shorts))
        assert not long.done()
        # It is long after 256 tokens; then it gives its place away after every 64.
        generated = it.reports.engine().counters["generated_tokens"]
        assert 256 + 7 * 64 <= generated - 8 * 4 < 256 + 9 * 64
        await long


async def test_answers_that_are_not_long_are_left_alone() -> None:
    async with engine("llama", max_batch=2) as it:
        streams = [it.submit(text(i, 30), session(f"s{i}", "t"), max_tokens=200) for i in range(8)]
        await asyncio.gather(*(read(x) for x in streams))
        assert it.reports.engine().counters.get("parked", 0) == 0


async def test_short_of_memory_a_short_prompt_is_served_all_the_same(tmp_path: Path) -> None:
    """There are places, but the long answers of its tenant hold the memory."""
    budget = 2104 * TOKEN_BYTES  # a context of 640 tokens
    prompts = [text(i, 60) for i in range(4)]
    async with engine("llama", tmp_path / "roomy") as roomy:
        expected = [await roomy.turn(x, max_tokens=560) for x in prompts]
    async with engine("llama", tmp_path / "small", hot_bytes=budget, max_batch=8) as it:
        reading = [
            await begun(it.submit(x, session(f"s{i}", "t"), max_tokens=560))
            for i, x in enumerate(prompts)
        ]
        short = await it.turn(text(9, 620), session("o", "t"), max_tokens=4)
        assert short.finished == {0: "length"}
        assert not any(x.done() for x in reading)
        answers = await asyncio.gather(*reading)
    assert [x.tokens for x in answers] == [x.tokens for x in expected]


async def test_no_answer_makes_way_for_a_prompt_that_lacks_places_all_the_same() -> None:
    """It wants all four; of the three that run one is long, and the others end before they are."""
    async with engine("llama", max_batch=4) as it:
        long = await begun(it.submit(text(1, 30), session("long", "t"), max_tokens=ENDLESS))
        while it.reports.engine().counters["generated_tokens"] < 230:
            await asyncio.sleep(0.001)
        short = [it.submit(text(2 + i, 30), session(f"s{i}", "t"), max_tokens=250) for i in (0, 1)]
        wide = it.submit(text(9, 20), session("wide", "t"), max_tokens=4, sampling=4 * GREEDY)
        answer, *_ = await asyncio.gather(read(wide), *map(read, short))
        assert answer.finished == dict.fromkeys(range(4), "length")
        assert not long.done()
        assert it.reports.engine().counters["parked"] == 1  # when that was enough
        await long
