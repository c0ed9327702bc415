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
    assert (line.num_running, line.num_waiting) == (0, 0)
    assert 3 <= most <= 6  # a tenant that holds none may be let in beyond the slots


async def test_a_tenant_whose_turns_never_end_keeps_no_other_out():
    line = AdmissionQueue(8, 100, 60.0)
    inside: list[str] = []

    async def stay(tenant: str, weight: int) -> None:
        async with line.slot(tenant, weight):
            inside.append(tenant)
            await asyncio.Event().wait()

    def arrive(tenant: str, number: int, weight: int = 1) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(stay(tenant, weight)) for _ in range(number)]

    tasks = arrive("endless", 20)
    await settle()
    assert inside.count("endless") == 8
    tasks += arrive("modest", 9)
    await settle()
    assert inside.count("modest") == 4  # half of the slots
    tasks += arrive("heavy", 9, weight=2)
    await settle()
    assert inside.count("heavy") == 4 and line.num_running == 16  # never more than twice as many
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (line.num_running, line.num_waiting) == (0, 0)


class Turns:
    """Turns that stay in their slots until the test ends them."""

    def __init__(self, line: AdmissionQueue) -> None:
        self._line = line
        self.inside: list[str] = []
        self._tasks: list[tuple[str, asyncio.Task[None]]] = []

    async def _stay(self, tenant: str) -> None:
        async with self._line.slot(tenant):
            self.inside.append(tenant)
            try:
                await asyncio.Event().wait()
            finally:
                self.inside.remove(tenant)

    async def arrive(self, tenant: str, number: int) -> None:
        for _ in range(number):
            self._tasks.append((tenant, asyncio.create_task(self._stay(tenant))))
        await settle()

    async def end(self, tenant: str, number: int) -> None:
        """End the ``number`` turns of a tenant that came first."""
        ended = [x for x in self._tasks if x[0] == tenant][:number]
        self._tasks = [x for x in self._tasks if x not in ended]
        for _, task in ended:
            task.cancel()
        await asyncio.gather(*(task for _, task in ended), return_exceptions=True)
        await settle()

    async def end_all(self) -> None:
        for tenant in {tenant for tenant, _ in self._tasks}:
            await self.end(tenant, len(self._tasks))


async def test_who_waits_is_called_within_its_share_though_no_slot_is_free():
    turns = Turns(line := AdmissionQueue(4, 100, 60.0))
    await turns.arrive("endless", 4)
    await turns.arrive("modest", 3)
    assert turns.inside.count("modest") == 2  # its share; the third waits
    await turns.end("modest", 1)
    assert turns.inside.count("modest") == 2, "its share is free again, if no slot is"
    await turns.end_all()
    assert (line.num_running, line.num_waiting) == (0, 0)


async def test_who_waits_is_called_when_the_shares_grow():
    turns = Turns(AdmissionQueue(6, 100, 60.0))
    await turns.arrive("endless", 6)
    await turns.arrive("brief", 1)
    await turns.arrive("modest", 3)
    assert turns.inside.count("modest") == 2  # a third of the slots
    await turns.end("brief", 1)
    assert turns.inside.count("modest") == 3  # now half of them
    await turns.end_all()


async def test_a_free_slot_goes_to_the_tenant_that_holds_fewest_by_weight():
    line, order = AdmissionQueue(4, 100, 60.0), []
    ends = [asyncio.Event() for _ in range(4)]

    async def turn(tenant: str, weight: int, end: asyncio.Event | None) -> None:
        async with line.slot(tenant, weight):
            if end is None:
                order.append(tenant)
                await asyncio.Event().wait()
            else:
                await end.wait()

    tasks = [asyncio.create_task(turn("a", 1, x)) for x in ends]
    await settle()
    tasks += [asyncio.create_task(turn("b", 1, None)) for _ in range(4)]
    await settle()
    assert order == ["b", "b"]  # its share, at once
    tasks += [asyncio.create_task(turn("a", 1, None)) for _ in range(4)]
    for end in ends:
        end.set()
        await settle()
    assert order == ["b", "b", "a", "a"]  # now each holds two
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_tenant_cannot_fill_the_line():
    line = AdmissionQueue(1, 8, 60.0)

    async def stay(tenant: str) -> None:
        async with line.slot(tenant):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(stay("many")) for _ in range(12)]
    tasks += [asyncio.create_task(stay(x)) for x in ("b", "b", "c")]
    await settle()
    refused = [x.exception() for x in tasks if x.done()]
    assert len(refused) == 5 and all(isinstance(x, Overloaded) for x in refused)
    assert line.num_waiting == 8  # six of one tenant, two of others; the third other was let in
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
