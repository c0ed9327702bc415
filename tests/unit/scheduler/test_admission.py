"""The waiting line: bounded, fair, leak-free."""

from __future__ import annotations

import asyncio
import random

import pytest

from scheduler.admission import AdmissionQueue, Draining, Overloaded


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_are_handed_on_in_order():
    line, order = AdmissionQueue(1, 10, 5.0), []

    async def turn(name: str) -> None:
        async with line.slot("t"):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(turn(x) for x in "abcd"))
    assert order == list("abcd")
    assert (line.num_running, line.num_waiting) == (0, 0)


async def test_a_busy_tenant_delays_another_by_one_slot_only():
    line, order = AdmissionQueue(1, 100, 5.0), []

    async def turn(tenant: str) -> None:
        async with line.slot(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    greedy = [asyncio.create_task(turn("greedy")) for _ in range(20)]
    await settle()
    await asyncio.gather(turn("modest"), *greedy)
    assert order.index("modest") <= order.count("greedy") - 15


async def test_a_full_line_refuses_at_once_and_says_when_to_return():
    line = AdmissionQueue(1, 0, 5.0)
    async with line.slot("t"):
        with pytest.raises(Overloaded) as refused:
            async with line.slot("t"):
                pass
    assert 0 < refused.value.retry_after_s <= 30


async def test_waiting_ends_after_max_wait():
    line = AdmissionQueue(1, 5, 0.01)
    async with line.slot("t"):
        with pytest.raises(Overloaded, match="no place was free"):
            async with line.slot("t"):
                pass
        assert line.num_waiting == 0
    async with line.slot("t"):
        assert line.num_running == 1


async def test_closing_sends_those_who_wait_home_and_lets_the_rest_finish():
    line = AdmissionQueue(1, 5, 5.0)

    async def wait() -> None:
        async with line.slot("t"):
            raise AssertionError("was let in")

    async with line.slot("t"):
        waiting = asyncio.create_task(wait())
        await settle()
        line.close()
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            async with line.slot("t"):
                pass
    assert (line.num_running, line.num_waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(8))
async def test_no_slot_leaks_under_random_cancellation(seed):
    rng, line, most = random.Random(seed), AdmissionQueue(3, 1000, 0.02), 0

    async def turn(tenant: str) -> None:
        nonlocal most
        async with line.slot(tenant):
            most = max(most, line.num_running)
            await asyncio.sleep(rng.random() * 0.004)

    tasks = [asyncio.create_task(turn(f"t{rng.randrange(4)}")) for _ in range(60)]
    for task in tasks:
        if rng.random() < 0.4:
            task.cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.002)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (line.num_running, line.num_waiting, most) == (0, 0, 3)
