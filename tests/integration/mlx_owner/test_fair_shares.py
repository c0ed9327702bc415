"""One tenant's long answers keep no other out, and end with the same tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

from engines.mlx_worker.generation import SequenceSampling, Token
from engines.wire import RequestProgress
from tests.integration.mlx_owner.harness import begun, engine, read, session, text

pytestmark = pytest.mark.mlx

LONG = 400
TOKEN_BYTES = 3072  # of the tiny llama, as in test_budget


async def test_a_tenant_with_every_place_makes_way_and_ends_with_the_same_tokens():
    prompts = [text(i, 30) for i in range(4)]
    async with engine("llama", max_batch=4) as it:
        alone = [await it.turn(x, max_tokens=LONG) for x in prompts]
        streams = [
            it.submit(x, session(f"s{i}", "greedy"), max_tokens=LONG) for i, x in enumerate(prompts)
        ]
        reading = [await begun(x) for x in streams]
        for number in range(3):
            # More than a quantum: it visits first, and takes a place then.
            name = session(f"o{number}", "modest")
            other = await it.turn(text(9 + number, 20), name, max_tokens=70)
            assert other.finished == {0: "length"}
        assert not any(x.done() for x in reading)  # it did not wait for one of them to end
        answers = await asyncio.gather(*reading)
        assert 1 <= it.reports.engine().counters["parked"] <= 5  # one for each chat or so
    assert [x.tokens for x in answers] == [x.tokens for x in alone]


async def test_a_short_answer_to_another_tenant_takes_no_place_from_another():
    prompts = [text(i, 30) for i in range(4)]
    async with engine("llama", max_batch=4) as it:
        alone = [await it.turn(x, max_tokens=LONG) for x in prompts]
        short = await it.turn(text(9, 20), max_tokens=20)
        streams = [
            it.submit(x, session(f"s{i}", "greedy"), max_tokens=LONG) for i, x in enumerate(prompts)
        ]
        reading = [await begun(x) for x in streams]
        visit = await it.turn(text(9, 20), session("visit", "modest"), max_tokens=20)
        assert not any(x.done() for x in reading)
        answers = await asyncio.gather(*reading)
        counters = it.reports.engine().counters
    assert counters["visits"] == 1 and "parked" not in counters
    assert visit.tokens == short.tokens
    assert [x.tokens for x in answers] == [x.tokens for x in alone]


async def test_a_second_visitor_waits_for_a_place_like_everybody():
    """Four places have one guest beside them: the next tenant takes the place of a row."""
    async with engine("llama", max_batch=4) as it:
        greedy = [
            await begun(it.submit(text(i, 30), session(f"s{i}", "greedy"), max_tokens=LONG))
            for i in range(4)
        ]
        guests = [
            await begun(it.submit(text(7, 30), session("g", name), max_tokens=LONG))
            for name in ("first", "second")
        ]
        num_running = it.reports.engine().num_running
        await asyncio.gather(*greedy, *guests)
        counters = it.reports.engine().counters
    assert num_running <= 5
    assert counters["visits"] >= 1 and counters["parked"] >= 2  # the guest's visit ended as well


async def test_rows_that_wait_take_turns_with_those_of_their_own_tenant():
    """While another keeps a place, no row of the greedy tenant waits until a row ends."""
    async with engine("llama", max_batch=2) as it:
        greedy = [
            await begun(it.submit(text(i, 30), session(f"s{i}", "greedy"), max_tokens=LONG))
            for i in range(2)
        ]
        modest = await begun(it.submit(text(7, 30), session("m", "modest"), max_tokens=LONG))
        await asyncio.gather(*greedy, modest)
        parked = it.reports.engine().counters["parked"]
    assert parked >= 2 * LONG // 64 // 2  # the one place goes to and fro


async def test_they_do_so_while_another_tenant_is_always_first_in_the_line():
    """Both get as many tokens with each step: who was ahead by a few stays so, and is no head."""
    counts: dict[str, Counter[str]] = {"a": Counter(), "b": Counter()}
    at_the_first_end: dict[str, int] = {}
    lengths = {"a": 30, "b": 100}  # so that one is ahead by less than a quantum

    async def follow(tenant: str, number: int, begins: asyncio.Event) -> None:
        name = f"{tenant}{number}"
        stream = it.submit(text(number, lengths[tenant]), session(name, tenant), max_tokens=LONG)
        async for event in stream.events():
            counts[tenant][name] += isinstance(event, Token)
            if counts[tenant][name]:
                begins.set()
        at_the_first_end.setdefault(tenant, min(counts[tenant].values()))

    async with engine("llama", max_batch=6) as it:
        begins = {f"{tenant}{i}": asyncio.Event() for tenant in counts for i in range(3)}
        rows = [asyncio.create_task(follow(x[0], int(x[1]), begins[x])) for x in begins]
        await asyncio.gather(*(x.wait() for x in begins.values()))
        third = [
            it.submit(text(9 + i, 30), session(f"c{i}", "c"), max_tokens=2 * LONG) for i in range(2)
        ]
        reading = [asyncio.create_task(read(x)) for x in third]
        await asyncio.gather(*rows)
        for stream in third:
            stream.cancel()
        await asyncio.gather(*reading)
    # Of the three rows of each two run at a time, and none was far from the others.
    assert min(at_the_first_end.values()) >= LONG - 4 * 64


async def test_a_short_prompt_does_not_wait_for_ten_long_ones_of_its_tenant():
    order: list[str] = []

    async def follow(name: str, num_tokens: int) -> None:
        stream = it.submit(text(len(name), num_tokens), session(name, "t"), max_tokens=4)
        async for event in stream.events():
            if isinstance(event, Token) and name not in order:
                order.append(name)

    async with engine("llama", max_batch=1) as it:
        asking = [asyncio.create_task(follow(f"long {i}", 700)) for i in range(10)]
        await asyncio.sleep(0)
        asking.append(asyncio.create_task(follow("short", 20)))
        await asyncio.gather(*asking)
    assert order.index("short") <= 2  # after the one that ran, and the oldest


async def test_a_parked_row_samples_every_position_once():
    async with engine("llama", max_batch=2) as it:
        samplers = [Counting() for _ in range(2)]
        reading = [
            await begun(
                it.submit(
                    text(i, 30),
                    session(f"s{i}", "greedy"),
                    max_tokens=200,
                    sampling=(SequenceSampling(x),),
                )
            )
            for i, x in enumerate(samplers)
        ]
        for number in range(3):
            await it.turn(text(9 + number, 20), session("o", "modest"))
        answers = await asyncio.gather(*reading)
        assert it.reports.engine().counters["parked"] >= 1
    assert [x.tokens for x in answers] == [list(range(200))] * 2


class Counting:
    """Token number i is i."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._next += 1
        return mx.array([(self._next - 1) % 400])


async def test_a_long_prompt_that_is_being_fed_makes_way_too():
    async with engine("llama", max_batch=1, prefill_step=32) as it:
        expected = await it.turn(text(1, 700))
        long = it.submit(text(1, 700), session("long", "greedy"))
        reading = asyncio.create_task(read(long))
        shorts = [it.submit(text(5 + i, 20), session(f"o{i}", "modest")) for i in range(2)]
        for short in await asyncio.gather(*(read(x) for x in shorts)):
            assert short.finished == {0: "length"}
        answer = await reading
    assert answer.tokens == expected.tokens


async def test_a_parked_prompt_is_shown_as_far_as_it_was_fed():
    shown: list[RequestProgress] = []  # while it was parked
    async with engine("llama", max_batch=1, prefill_step=32) as it:
        reading = asyncio.create_task(
            read(it.submit(text(1, 700), session("long", "greedy"), max_tokens=1))
        )
        others = [it.submit(text(5 + i, 20), session(f"o{i}", "modest")) for i in range(4)]
        rest = asyncio.gather(*(read(x) for x in others))

        def look() -> None:
            if it.owner.parts.budget.parked_bytes:
                shown.extend(x for x in it.reports.engine().requests if x.session == "long")

        while not rest.done():
            await it.owner.call(look)
        await asyncio.gather(reading, rest)
    assert shown and all(0 < x.prefilled_tokens < 699 for x in shown)
    assert {x.prompt_tokens for x in shown} == {700}


async def test_who_is_cancelled_while_parked_leaves_nothing():
    async with engine("llama", max_batch=1) as it:
        greedy = it.submit(text(1, 30), session("g", "greedy"), max_tokens=LONG)
        reading = await begun(greedy)
        modest = await begun(it.submit(text(2, 30), session("m", "modest"), max_tokens=LONG))
        for _ in range(2000):
            if it.owner.parts.budget.parked_bytes:
                break
            await asyncio.sleep(0.005)
        greedy.cancel()
        assert (await reading).finished == {0: "cancelled"}
        assert (await modest).finished == {0: "length"}
        assert it.owner.num_waiting == 0 and it.owner.parts.budget.parked_bytes == 0
        assert it.reports.engine().num_running == 0


async def test_short_of_memory_parked_rows_sleep_and_end_with_the_same_tokens(tmp_path: Path):
    """Places for four, memory for two: who makes way cannot keep its KV hot."""
    prompts = [text(i, 200) for i in range(3)]
    budget = 3 * (300 + 256) * TOKEN_BYTES
    async with engine("llama", tmp_path / "roomy") as roomy:
        expected = [await roomy.turn(x, max_tokens=240) for x in prompts]
        other = [await roomy.turn(text(9 + i, 300)) for i in range(3)]
    async with engine("llama", tmp_path / "small", hot_bytes=budget, max_batch=4) as it:
        streams = [
            it.submit(x, session(f"s{i}", "greedy"), max_tokens=240) for i, x in enumerate(prompts)
        ]
        reading = [asyncio.create_task(read(x)) for x in streams]
        await asyncio.sleep(0)
        others = [await it.turn(text(9 + i, 300), session(f"o{i}", "modest")) for i in range(3)]
        answers = await asyncio.gather(*reading)
        await it.settled()
        report = it.reports.engine()
    assert report.hot_bytes <= budget and report.counters["sent_back"] >= 1
    assert [x.tokens for x in others] == [x.tokens for x in other]
    assert [x.tokens for x in answers] == [x.tokens for x in expected]


async def test_tenants_that_all_wait_get_equal_tokens_for_any_demand():
    """Forty, twelve and eight requests at once: Jain's index while the last of the eight waits."""
    asked = {"large": 40, "middle": 12, "small": 8}
    served: Counter[str] = Counter()
    left = dict(asked)

    async def follow(tenant: str, number: int) -> None:
        stream = it.submit(text(number, 20), session(f"s{number}", tenant), max_tokens=24)
        async for event in stream.events():
            if isinstance(event, Token) and all(left.values()):
                served[tenant] += 1
        left[tenant] -= 1

    async with engine("llama", max_batch=4) as it:
        await asyncio.gather(*(follow(x, i) for x, most in asked.items() for i in range(most)))
    tokens = list(served.values())
    assert sum(tokens) ** 2 / (3 * sum(x * x for x in tokens)) > 0.95


async def test_a_newcomer_waits_for_steps_not_for_answers():
    """Between its arrival and its first token, each row of the busy tenant gets a few tokens."""
    async with engine("llama", max_batch=4) as it:
        streams = [
            it.submit(text(i, 30), session(f"s{i}", "greedy"), max_tokens=LONG) for i in range(4)
        ]
        reading = [await begun(x) for x in streams]
        for number in range(3):
            before = it.reports.engine().counters["generated_tokens"]
            modest = await begun(it.submit(text(9 + number, 20), session("m", "modest")))
            assert it.reports.engine().counters["generated_tokens"] - before < 4 * 16
            await modest
        await asyncio.gather(*reading)


async def test_each_request_visits_once():
    """Five endless rows of five tenants take turns on four places, one of them a guest at first."""
    async with engine("llama", max_batch=4) as it:
        rows = [
            await begun(it.submit(text(i, 30), session("s", tenant), max_tokens=LONG))
            for i, tenant in enumerate("abcde")
        ]
        await asyncio.gather(*rows)
        counters = it.reports.engine().counters
    assert counters["visits"] == 1 and counters["parked"] >= 4


async def test_who_is_ahead_does_not_visit():
    """Long prompts with short answers: each counts as 150 tokens, and others get as many."""
    async with engine("llama", max_batch=4, prefill_step=512) as it:
        streams = [
            it.submit(text(i, 30), session("s", tenant), max_tokens=LONG)
            for i, tenant in enumerate("abcd")
        ]
        rows = [await begun(x) for x in streams]
        turns = 0
        while not any(x.done() for x in rows):
            await it.turn(text(50 + turns, 600), session(f"e{turns}", "e"), max_tokens=2)
            turns += 1
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*rows)
    assert 1 <= turns <= 2 + LONG // 100


async def test_guests_never_become_more_rows_than_there_are_places():
    """A guest that is ahead and a newcomer visit together; no row makes way in vain."""
    async with engine("llama", max_batch=8, prefill_step=32) as it:
        budget = it.owner.parts.budget
        streams = [it.submit(text(i, 30), session("s", f"t{i}"), max_tokens=LONG) for i in range(8)]
        rows = [await begun(x) for x in streams]
        others = [
            it.submit(text(50 + i, 30 + 300 * (i % 2)), session("g", f"g{i}"), max_tokens=LONG)
            for i in range(5)
        ]
        rows += [asyncio.create_task(read(x)) for x in others]
        most = 0
        while not any(x.done() for x in rows[:8]):
            held = await it.owner.call(lambda: budget.places_of_residents.total())
            most = max(most, held)
            await asyncio.sleep(0.005)
        for stream in (*streams, *others):
            stream.cancel()
        await asyncio.gather(*rows)
        counters = it.reports.engine().counters
    assert most == 8
    assert counters["visits"] >= 2
