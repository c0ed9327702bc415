"""What keys use in a minute: the arithmetic of a window, and one count at several gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.edge.rates import MINUTE_S, MinuteUse, Rates
from gateway.shared.redis_client import AsyncRedis
from tests.redis_server import RedisServer
from tests.waiting import eventually

TURN = 1.0, True  # a request, which computes
MOST = {"requests": 20, "tokens": 1000}
T = TypeVar("T")


def later(window: MinuteUse, seconds: float) -> MinuteUse:
    """The window as the library shows it then, if nothing is used meanwhile."""
    previous_s, current_s = window.previous_s - seconds, window.current_s - seconds
    if window.current and current_s < MINUTE_S:  # it is the minute before now
        return window._replace(
            previous=window.current, previous_s=max(0.0, current_s), current=0, current_s=0.0
        )
    if previous_s <= 0:
        return window._replace(previous=0, previous_s=0.0, current_s=current_s)
    return window._replace(previous_s=previous_s, current_s=current_s)


counts = st.integers(0, 2000)


@given(counts, counts, st.floats(0.1, 60), st.integers(1, 1000))
def test_after_the_wait_there_is_room_and_a_moment_before_there_was_none(
    previous: int, current: int, left_s: float, number: int
) -> None:
    """``left_s``: of the present minute, as the library counts minutes."""
    window = MinuteUse(1000, 1, previous, left_s, min(current, 1000), MINUTE_S + left_s)
    wait_s = window.wait_s(number)
    assert 0 <= wait_s <= 2 * MINUTE_S
    if not wait_s:
        assert window.remaining >= number
        return
    assert later(window, wait_s + 0.001).remaining >= number
    assert later(window, 0.9 * wait_s).remaining < number
    assert window.reset_s >= wait_s - 1e-6


def test_what_is_used_is_shown_at_once() -> None:
    window = MinuteUse(200, 100).plus(0.5)
    assert (window.remaining, window.plus(1).remaining, window.plus(5).remaining) == (1, 0, 0)
    assert window.wait_s(1) == 0 and window.wait_s(2) > 0


class FarRedis:
    """Is there, and answers about no count in time."""

    async def run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [None for _ in commands]

    async def within(self, call: Callable[[Any], Awaitable[T]]) -> T:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


async def test_no_request_waits_in_line_for_a_redis_that_is_far_away() -> None:
    changes: list[bool] = []
    rates = Rates(FarRedis(), on_change=changes.append, wait_s=0.01)
    looking = asyncio.create_task(rates.run())
    await eventually(lambda: changes == [True])
    async with asyncio.timeout(10.0):
        taken = await asyncio.gather(*(rates.take("k", MOST, *TURN) for _ in range(20)))
    assert not any(x.refused for x in taken) and changes == [True, False]
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


# ---- at several gateways

pytestmark = pytest.mark.redis


class Gateway:
    """The counts of one gateway."""

    def __init__(self, url: str) -> None:
        self.changes: list[bool] = []
        redis = AsyncRedis(url, 5.0)
        # It may wait on a busy machine.
        self.rates = Rates(redis, "n-{}".format, self.changes.append, wait_s=30.0)

    async def burst(self, number: int) -> int:
        """Ask at once; returns how many were let in."""
        taken = await asyncio.gather(*(self.rates.take("k", MOST, *TURN) for _ in range(number)))
        assert all(x.wait_s > 0 for x in taken if x.refused)
        return sum(not x.refused for x in taken)


@asynccontextmanager
async def gateways(url: str, number: int = 2) -> AsyncIterator[list[Gateway]]:
    found = [Gateway(url) for _ in range(number)]
    tasks = [asyncio.create_task(x.rates.run()) for x in found]
    try:
        for each in found:
            await eventually(lambda each=each: each.changes == [True])
        yield found
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_a_burst_at_two_gateways_is_let_in_once(server: RedisServer, client: redis.Redis):
    async with gateways(server.url) as (one, two):
        assert sum(await asyncio.gather(one.burst(20), two.burst(20))) == 20
        assert await one.burst(1) + await two.burst(1) == 0
        names = b"".join(client.scan_iter())
        assert b"n-k" in names and b"thermocline:rates" in names


async def test_tokens_that_one_used_count_at_the_other(server: RedisServer, client: redis.Redis):
    async with gateways(server.url) as (one, two):
        one.rates.use_tokens("k", MOST["tokens"], 900)
        await eventually(lambda: not one.rates._counting)
        taken = await two.rates.take("k", MOST, *TURN)
        assert not taken.refused and taken.windows["tokens"].remaining == 100
        two.rates.use_tokens("k", MOST["tokens"], 5000)  # beyond what there is: a full minute
        await eventually(lambda: not two.rates._counting)
        taken = await one.rates.take("k", MOST, *TURN)
        assert (taken.refused, taken.windows["tokens"].remaining) == ("tokens", 0)


async def test_without_redis_each_counts_for_itself_until_it_is_back(server, client):
    async with gateways(server.url, 1) as (one,):
        assert await one.burst(20) == 20
        server.kill()
        assert await one.burst(30) == 20  # none fails, none waits for long
        assert one.changes == [True, False] and one.rates.trouble
        server.start()
        await eventually(lambda: one.changes == [True, False, True])
        assert not one.rates.trouble


async def test_an_answer_that_is_no_count_refuses_nobody(server: RedisServer, client: redis.Redis):
    async with gateways(server.url, 1) as (one,):
        assert await one.burst(1) == 1
        for key in client.scan_iter():
            client.set(key, b"much", px=100_000)
        assert await one.burst(1) == 1
