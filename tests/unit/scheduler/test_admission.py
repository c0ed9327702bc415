"""The waiting line: bounded, fair, leak-free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler.admission import AdmissionQueue, Draining, Overloaded
from tests.clock import Clock


class Turns:
    """Turns that stay in their slots until the test ends them."""

    def __init__(self, line: AdmissionQueue) -> None:
        self._line = line
        self.inside: list[str] = []
        self.refused: list[str] = []
        self._tasks: list[tuple[str, asyncio.Task[None]]] = []

    async def _stay(self, tenant: str, weight: int, num_answers: int, is_task: bool) -> None:
        try:
            async with self._line.slot(tenant, weight, num_answers, is_task=is_task):
                self.inside.append(tenant)
                try:
                    await asyncio.Event().wait()
                finally:
                    self.inside.remove(tenant)
        except Overloaded:
            self.refused.append(tenant)

    async def arrive(
        self,
        tenant: str,
        number: int = 1,
        *,
        weight: int = 1,
        num_answers: int = 1,
        is_task: bool = False,
    ) -> None:
        for _ in range(number):
            stay = self._stay(tenant, weight, num_answers, is_task)
            self._tasks.append((tenant, asyncio.create_task(stay)))
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self, tenant: str, number: int = 1) -> None:
        """End the ``number`` turns of a tenant that came first."""
        ended = [x for x in self._tasks if x[0] == tenant][:number]
        self._tasks = [x for x in self._tasks if x not in ended]
        for _, task in ended:
            task.cancel()
        await asyncio.gather(*(task for _, task in ended), return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def turns_of(line: AdmissionQueue) -> AsyncIterator[Turns]:
    """End all turns at the end, and see that no place is lost."""
    turns = Turns(line)
    yield turns
    for tenant in {tenant for tenant, _ in turns._tasks}:
        await turns.end(tenant, len(turns._tasks))
    assert (line.num_running, line.num_waiting) == (0, 0)


async def test_slots_are_handed_on_in_order():
    line, order = AdmissionQueue(1, 10, 5.0), []

    async def turn(name: str) -> None:
        async with line.slot("t"):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*(turn(x) for x in "abcd"))
    assert order == list("abcd")


async def test_a_busy_tenant_delays_another_by_one_slot_only():
    async with turns_of(AdmissionQueue(1, 100, 5.0)) as turns:
        await turns.arrive("greedy", 20)
        await turns.arrive("modest", 2)  # one gets the spare place
        await turns.end("greedy")
        await turns.end("modest")
        assert "modest" in turns.inside


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
        await asyncio.sleep(0)
        line.close()
        for refused in (waiting, wait()):
            with pytest.raises(Draining):
                await refused
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


async def test_a_tenant_whose_turns_never_end_keeps_no_other_out():
    line = AdmissionQueue(8, 100, 60.0)
    async with turns_of(line) as turns:
        await turns.arrive("endless", 20)
        assert turns.inside.count("endless") == 8
        await turns.arrive("modest", 3)
        assert turns.inside.count("modest") == 1  # the spare place
        await turns.arrive("third")
        assert line.num_running == 9  # never more
        await turns.end("modest")
        assert "third" in turns.inside, "the spare place is free: who has nothing running takes it"
        await turns.end("endless")
        assert line.num_running == 9


async def test_the_spare_place_comes_back_when_a_turn_has_ended():
    line = AdmissionQueue(2, 100, 60.0)
    async with turns_of(line) as turns:
        await turns.arrive("endless", 2)
        await turns.arrive("modest")
        await turns.end("endless")
        await turns.arrive("modest")
        assert line.num_running == 2 and line.num_waiting == 1  # modest has what is its own
        await turns.arrive("third")
        assert "third" in turns.inside


@pytest.mark.parametrize(("weight", "share"), [(1, 0.5), (3, 0.75)])
async def test_tenants_hold_places_for_equal_times_by_weight(weight: int, share: float):
    """One has turns of nine seconds, the other of one: fairness is by time, not by number."""
    clock = Clock()
    lengths, held = {"long": 9, "short": 1}, {"long": 0, "short": 0}
    async with turns_of(AdmissionQueue(8, 1000, 1e6, clock)) as turns:
        await turns.arrive("long", 200, weight=weight)
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


async def test_a_pause_is_no_credit():
    clock, order = Clock(), []
    async with turns_of(AdmissionQueue(1, 100, 60.0, clock)) as turns:
        await turns.arrive("back")
        await turns.end("back")
        await turns.arrive("steady", 20)
        clock.now += 100.0
        await turns.arrive("other", 20)
        await turns.arrive("back", 20)
        for _ in range(12):
            clock.now += 1.0
            order.append(turns.inside[0])
            await turns.end(turns.inside[0])
    assert order.count("back") <= 5


async def test_several_answers_hold_as_many_places():
    """They begin where one place is free: the engine serves them in order."""
    line = AdmissionQueue(4, 100, 60.0)
    async with turns_of(line) as turns:
        await turns.arrive("a", num_answers=3)
        await turns.arrive("a", num_answers=2)
        assert line.num_running == 2 and line.num_waiting == 0
        await turns.arrive("b", 2, num_answers=9)
        assert turns.inside == ["a", "a", "b"]  # in the spare place: nothing of it was running
        await turns.arrive("c")
        assert "c" not in turns.inside
        await turns.end("a")  # two places are held, and four by b
        assert "c" in turns.inside and line.num_running == 4  # and the second of b with its four


async def test_a_turn_of_many_answers_leaves_no_place_idle():
    async with turns_of(AdmissionQueue(4, 100, 60.0)) as turns:
        await turns.arrive("many")
        await turns.arrive("many", num_answers=4)
        await turns.arrive("d", 2)
        assert turns.inside.count("many") == 2 and "d" in turns.inside


async def share_of(others: int, in_flight: int, weight: int = 1) -> float:
    """One tenant's share of the seconds of all places: who has ended asks again.

    Turns take about a second, and there are four places.
    """
    clock, rng, own, total = Clock(), random.Random(7), 0, 0
    async with turns_of(AdmissionQueue(4, 1000, 1e6, clock)) as turns:
        await turns.arrive("steady", in_flight, weight=weight)
        for number in range(others):
            await turns.arrive(f"t{number}")
        for _ in range(400):
            clock.now += 0.5
            for tenant in list(turns.inside):
                own, total = own + (tenant == "steady"), total + 1
                if rng.random() < 0.5:
                    await turns.end(tenant)
                    await turns.arrive(tenant, weight=weight if tenant == "steady" else 1)
    return own / total


@pytest.mark.parametrize(
    ("others", "in_flight", "weight", "least", "most"),
    [
        *((12, x, 1, 0.05, 0.12) for x in (1, 20)),  # a thirteenth is .077
        *((n, 20, 8, least, 1.0) for n, least in ((3, 0.55), (12, 0.3))),
    ],
)
async def test_a_share_follows_the_weight_and_not_the_number_of_requests_that_wait(
    others: int, in_flight: int, weight: int, least: float, most: float
):
    assert least < await share_of(others, in_flight, weight) < most


async def test_one_tenant_cannot_fill_the_line():
    line = AdmissionQueue(1, 8, 60.0)
    async with turns_of(line) as turns:
        await turns.arrive("many", 12)
        for tenant in "bbc":
            await turns.arrive(tenant)
        assert turns.refused == ["many"] * 5
        assert line.num_waiting == 8  # six of one tenant, two of others; the third was let in


async def test_tasks_wait_behind_all_turns_and_never_take_the_spare_place():
    async with turns_of(AdmissionQueue(1, 10, 5.0)) as turns:
        await turns.arrive("a")
        await turns.arrive("b", is_task=True)
        assert turns.inside == ["a"]
        await turns.arrive("a", 2)
        await turns.arrive("c")
        assert turns.inside == ["a", "c"]  # in the spare place
        await turns.end("c")
        for left in (2, 1, 0):
            assert turns.inside == ["a"], left
            await turns.end("a")
        assert turns.inside == ["b"]


@pytest.mark.parametrize("tenants", ["a", "abc"])
async def test_tasks_keep_no_turn_out_of_a_full_line(tenants: str):
    line = AdmissionQueue(1, 8, 60.0)
    async with turns_of(line) as turns:
        await turns.arrive("a")
        for i in range(12):
            await turns.arrive(tenants[i % len(tenants)], is_task=True)
        room = line.num_waiting
        refused = len(turns.refused)
        await turns.arrive("a", 4)
        assert line.num_waiting == room
        assert len(turns.refused) == refused + 4, "for each turn a task goes"
        assert not turns._tasks[2][1].done(), "the newest of those that have most"
        await turns.arrive(tenants[-1], is_task=True)
        assert len(turns.refused) == refused + 5, "a task makes no room for another"
