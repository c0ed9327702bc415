"""The waiting line: bounded, fair, leak-free."""

from __future__ import annotations

import asyncio
import random

import pytest

from scheduler.admission import AdmissionQueue, Draining, Overloaded
from tests.clock import Clock


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


@pytest.mark.parametrize("is_task", [False, True])
async def test_waiting_ends_after_max_wait(is_task: bool):
    line = AdmissionQueue(1, 5, 0.01)
    async with line.slot("t"):
        with pytest.raises(Overloaded, match="no place was free"):
            async with line.slot("t", is_task=is_task):
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
    assert 3 <= most <= 4  # and the spare place


class Turns:
    """Turns that stay in their slots until the test ends them."""

    def __init__(self, line: AdmissionQueue) -> None:
        self._line = line
        self.inside: list[str] = []
        self._tasks: list[tuple[str, asyncio.Task[None]]] = []

    async def _stay(self, tenant: str, weight: int, num_answers: int) -> None:
        async with self._line.slot(tenant, weight, num_answers):
            self.inside.append(tenant)
            try:
                await asyncio.Event().wait()
            finally:
                self.inside.remove(tenant)

    async def arrive(self, tenant: str, number: int, weight: int = 1, num_answers: int = 1) -> None:
        for _ in range(number):
            stay = self._stay(tenant, weight, num_answers)
            self._tasks.append((tenant, asyncio.create_task(stay)))
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


async def test_a_tenant_whose_turns_never_end_keeps_no_other_out():
    turns = Turns(line := AdmissionQueue(8, 100, 60.0))
    await turns.arrive("endless", 20)
    assert turns.inside.count("endless") == 8
    await turns.arrive("modest", 3)
    assert turns.inside.count("modest") == 1  # the spare place
    await turns.arrive("third", 1)
    assert line.num_running == 9  # never more
    await turns.end("modest", 1)
    assert "third" in turns.inside, "the spare place is free: who has nothing running takes it"
    await turns.end("endless", 1)
    assert line.num_running == 9
    await turns.end_all()
    assert (line.num_running, line.num_waiting) == (0, 0)


async def test_the_spare_place_comes_back_when_a_turn_has_ended():
    turns = Turns(line := AdmissionQueue(2, 100, 60.0))
    await turns.arrive("endless", 2)
    await turns.arrive("modest", 1)
    await turns.end("endless", 1)
    await turns.arrive("modest", 1)
    assert line.num_running == 2 and line.num_waiting == 1  # modest has what is its own
    await turns.arrive("third", 1)
    assert "third" in turns.inside
    await turns.end_all()


@pytest.mark.parametrize(("weight", "share"), [(1, 0.5), (3, 0.75)])
async def test_tenants_hold_places_for_equal_times_by_weight(weight: int, share: float):
    """One has turns of nine seconds, the other of one: fairness is by time, not by number."""
    clock = Clock()
    turns = Turns(AdmissionQueue(8, 1000, 1e6, clock))
    lengths, held = {"long": 9, "short": 1}, {"long": 0, "short": 0}
    await turns.arrive("long", 200, weight)
    await turns.arrive("short", 500)
    for second in range(90):
        clock.now += 1.0
        running = list(turns.inside)
        for tenant in running:
            held[tenant] += 1
        for tenant, length in lengths.items():
            number = running.count(tenant) if length == 1 else int(second % 9 == 8) * 99
            await turns.end(tenant, min(number, running.count(tenant)))
    assert abs(held["long"] / sum(held.values()) - share) < 0.1
    await turns.end_all()


async def test_a_pause_is_no_credit():
    clock = Clock()
    turns = Turns(AdmissionQueue(1, 100, 60.0, clock))
    await turns.arrive("back", 1)
    await turns.end("back", 1)
    await turns.arrive("steady", 20)
    clock.now += 100.0
    await turns.arrive("other", 20)
    await turns.arrive("back", 20)
    order = []
    for _ in range(12):
        clock.now += 1.0
        order.append(turns.inside[0])
        await turns.end(turns.inside[0], 1)
    assert order.count("back") <= 5
    await turns.end_all()


async def test_several_answers_hold_as_many_places():
    """They begin where one place is free: the engine serves them in order."""
    line = AdmissionQueue(4, 100, 60.0)
    turns = Turns(line)
    await turns.arrive("a", 1, num_answers=3)
    await turns.arrive("a", 1, num_answers=2)
    assert line.num_running == 2 and line.num_waiting == 0
    await turns.arrive("b", 2, num_answers=9)
    assert turns.inside == ["a", "a", "b"]  # in the spare place, since nothing of it was running
    await turns.arrive("c", 1)
    assert "c" not in turns.inside
    await turns.end("a", 1)  # two places are held, and four by b
    assert "c" in turns.inside and line.num_running == 4  # and the second of b with its four
    await turns.end_all()
    assert (line.num_running, line.num_waiting) == (0, 0)


async def test_a_turn_of_many_answers_leaves_no_place_idle():
    line = AdmissionQueue(4, 100, 60.0)
    turns = Turns(line)
    await turns.arrive("many", 1)
    await turns.arrive("many", 1, num_answers=4)
    await turns.arrive("d", 2)
    assert turns.inside.count("many") == 2 and "d" in turns.inside
    await turns.end_all()


async def served(
    others: int, in_flight: int, weight: int = 1, seconds: int = 400
) -> tuple[int, int]:
    """Seconds of places of one tenant and of all: others ask again when their turn has ended.

    Turns take about a second, and there are four places.
    """
    clock, rng = Clock(), random.Random(7)
    turns = Turns(AdmissionQueue(4, 1000, 1e6, clock))
    await turns.arrive("steady", in_flight, weight)
    for number in range(others):
        await turns.arrive(f"t{number}", 1)
    own = total = 0
    for _ in range(seconds):
        clock.now += 0.5
        for tenant in list(turns.inside):
            own, total = own + (tenant == "steady"), total + 1
            if rng.random() < 0.5:
                await turns.end(tenant, 1)
                await turns.arrive(tenant, 1, weight if tenant == "steady" else 1)
    await turns.end_all()
    return own, total


@pytest.mark.parametrize(
    ("others", "in_flight", "weight", "least", "most"),
    [
        *((12, x, 1, 0.05, 0.12) for x in (1, 2, 20)),  # a thirteenth is .077
        *((n, 20, 8, least, 1.0) for n, least in ((3, 0.55), (6, 0.4), (12, 0.3))),
    ],
)
async def test_a_share_follows_the_weight_and_not_the_number_of_requests_that_wait(
    others: int, in_flight: int, weight: int, least: float, most: float
):
    own, total = await served(others, in_flight, weight)
    assert least < own / total < most


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


async def test_tasks_wait_behind_all_turns_and_never_take_the_spare_place():
    line, order = AdmissionQueue(1, 10, 5.0), []

    async def turn(tenant: str, *, is_task: bool = False) -> None:
        async with line.slot(tenant, is_task=is_task):
            order.append(f"{tenant} task" if is_task else tenant)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group, line.slot("a"):
        group.create_task(turn("b", is_task=True))
        await settle()
        assert not order
        for _ in range(2):
            group.create_task(turn("a"))
        await settle()
        group.create_task(turn("c"))  # the spare place is its
        await settle()
        assert order == ["c"]
    assert order == ["c", "a", "a", "b task"]
    assert (line.num_running, line.num_waiting) == (0, 0)


@pytest.mark.parametrize("tenants", [("a",), ("a", "b", "c")])
async def test_tasks_keep_no_turn_out_of_a_full_line(tenants: tuple[str, ...]):
    line = AdmissionQueue(1, 8, 60.0)

    async def stay(number: int, *, is_task: bool) -> None:
        async with line.slot(tenants[number % len(tenants)], is_task=is_task):
            await asyncio.Event().wait()

    running = asyncio.create_task(stay(0, is_task=False))
    await settle()
    tasks = [asyncio.create_task(stay(i, is_task=True)) for i in range(12)]
    await settle()
    room = line.num_waiting
    turns = [asyncio.create_task(stay(0, is_task=False)) for _ in range(4)]
    await settle()
    assert line.num_waiting == room and not any(x.done() for x in turns)
    refused = [x.done() and isinstance(x.exception(), Overloaded) for x in tasks]
    assert sum(refused) == 16 - room and not refused[1], "the newest of those that have most go"
    last = asyncio.create_task(stay(1, is_task=True))
    await settle()
    assert isinstance(last.exception(), Overloaded), "a task makes no room for another"
    for task in (running, *tasks, *turns):
        task.cancel()
    await asyncio.gather(running, *tasks, *turns, return_exceptions=True)
    assert (line.num_running, line.num_waiting) == (0, 0)
