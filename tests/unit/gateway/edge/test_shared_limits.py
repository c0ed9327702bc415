"""Keys' limits over several gateways of one Redis, by the scripts that run there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis

from gateway.edge.accounts import ACCOUNTS
from gateway.edge.key_limits import KeyLimits, KeyShare, give_back, key_share_of
from gateway.edge.shared_limits import SharedLimits
from gateway.edge.stock import LEASE_S, Command, Reply, read_number, read_places, read_taken
from gateway.errors import RequestRefused
from gateway.keys import Limits, Tenant, Tenants
from tests.redis_server import RedisServer
from tests.unit.gateway.edge.conftest import asks
from tests.waiting import eventually

pytestmark = pytest.mark.redis

ALICE = Tenant("alice", b"salt", "a1")
TURN = ACCOUNTS["chat_completions"]
PATIENCE_S = 60.0


class OneGateway:
    """The limits of one gateway, without its HTTP."""

    def __init__(self, url: str, limits: Limits, away_s: float = 0.0) -> None:
        """``away_s``: the time that a message takes to the Redis and back."""
        self.sessions: list[str] = []
        self.changes: list[bool] = []
        ask = asks(url)

        def ask_far_away(commands: Sequence[Command]) -> Sequence[Reply]:
            time.sleep(away_s)
            return ask(commands)

        self.shared = SharedLimits(ask_far_away, lambda name: f"n-{name}", self.changes.append)
        self.shared.sessions_of = lambda tenant: self.sessions
        self.keys = KeyLimits(limits, shared=self.shared)
        self._tenants = Tenants(b"s" * 16)
        self._task = asyncio.create_task(self.shared.run())

    async def try_one(self, tenant: Tenant = ALICE) -> KeyShare | None:
        scope: dict[str, Any] = {"state": {}}
        scope["state"]["reserved"] = await self.shared.ready(tenant, self.keys.of(tenant))
        try:
            self.keys.enter(tenant, scope, TURN)
        except RequestRefused as error:
            assert error.failure.status == 429
            assert error.failure.retry_after_s and error.failure.retry_after_s >= 1
            return None
        finally:
            give_back(scope)
        return key_share_of(scope)

    async def kill(self) -> None:
        """End as a process does that is killed: nothing is given back."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def run(
    url: str,
    limits: Limits,
    work: Callable[[OneGateway, OneGateway], Awaitable[None]],
    away_s: float = 0.0,
) -> None:
    async def main() -> None:
        one, two = OneGateway(url, limits, away_s), OneGateway(url, limits, away_s)
        for each in (one, two):
            await eventually(lambda each=each: each.changes == [True])
        try:
            await work(one, two)
        finally:
            await one.kill()
            await two.kill()

    asyncio.run(main())


async def burst(number: int, *gateways: OneGateway) -> list[KeyShare]:
    tried = (gateways[i % len(gateways)].try_one() for i in range(number))
    return [x for x in await asyncio.gather(*tried) if x is not None]


@pytest.mark.parametrize("most", [3, 60])
def test_a_burst_at_two_gateways_is_let_in_once(
    server: RedisServer, client: redis.Redis, most: int
):
    async def work(one: OneGateway, two: OneGateway) -> None:
        began = time.monotonic()
        shares = await burst(2 * most, one, two)
        for _ in range(20):  # places that one had too many of are given back in a moment
            if len(shares) >= most:
                break
            await asyncio.sleep(0.2)
            shares += await burst(2, one, two)
        refilled = (time.monotonic() - began) * most / 60
        assert 0.9 * most <= len(shares) <= most + refilled + 0.01

    run(server.url, Limits(requests_per_minute=most), work)


def test_one_gateway_alone_gets_all_of_a_burst(server: RedisServer, client: redis.Redis):
    async def work(one: OneGateway, two: OneGateway) -> None:
        assert len(await burst(60, one)) == 60
        assert await burst(10, two) == []

    run(server.url, Limits(requests_per_minute=60), work)


def test_tokens_that_one_used_are_owed_at_the_other(server: RedisServer, client: redis.Redis):
    async def work(one: OneGateway, two: OneGateway) -> None:
        (share,) = await burst(1, one)
        share.used_tokens(1500)
        await eventually(lambda: one.shared._stocks["a1"].slices["tokens"].level >= 0)
        assert await two.try_one() is None
        assert dict(share.headers())["x-ratelimit-remaining-tokens"] == "0"

    run(server.url, Limits(tokens_per_minute=1000), work)


def test_places_are_shared_and_free_again(server: RedisServer, client: redis.Redis):
    async def work(one: OneGateway, two: OneGateway) -> None:
        shares = await burst(8, one, two)
        assert len(shares) == 4
        for share in shares[:2]:
            share.leave()
        again: list[KeyShare] = []
        end = time.monotonic() + PATIENCE_S
        while len(again) < 2 and time.monotonic() < end:
            again += await burst(4, one, two)
            await asyncio.sleep(0.1)
        assert len(again) == 2

    run(server.url, Limits(concurrent_requests=4), work)


def test_places_of_a_killed_gateway_are_free_after_their_lease(
    server: RedisServer, client: redis.Redis
):
    async def work(one: OneGateway, two: OneGateway) -> None:
        assert len(await burst(2, one)) == 2
        assert await two.try_one() is None
        await one.kill()
        (name,) = (x for x in client.keys("*:places"))
        ((gateway, entry),) = client.hgetall(name).items()
        held, _, ends = entry.partition(b":")
        seconds, micros = client.time()
        now = seconds * 1000 + micros // 1000
        assert held == b"2" and 0 < int(ends) - now <= LEASE_S * 1000
        client.hset(name, gateway, b"2:%d" % (now - 1))  # the lease is over
        await eventually(lambda: two.shared._stocks["a1"].may_wait)
        assert await two.try_one() is not None
        assert client.hexists(name, gateway) is False

    run(server.url, Limits(concurrent_requests=2), work)


def test_a_lease_of_a_clock_that_jumped_holds_nothing(server: RedisServer, client: redis.Redis):
    client.hset("thermocline:limits:n-a1:places", "dead", "2:99999999999999")
    client.hset("thermocline:limits:n-a1:requests", mapping={"level": "0", "at": "99999999999999"})

    async def work(one: OneGateway, two: OneGateway) -> None:
        assert await one.try_one() is None  # the bucket is empty, and fills from now on
        end = time.monotonic() + PATIENCE_S
        while await one.try_one() is None:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)

    run(server.url, Limits(600, concurrent_requests=2), work)


def test_while_redis_is_away_each_counts_for_itself_and_no_request_waits(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
):
    async def work(one: OneGateway, two: OneGateway) -> None:
        own.stop()
        try:
            began = time.monotonic()
            first = await burst(6, one, two)
            assert time.monotonic() - began < 20  # WAIT_S, on a busy machine
            await eventually(lambda: one.changes[-1] is False)
            await eventually(lambda: two.changes[-1] is False)
            shares = first + await burst(20, one, two)
            assert len(shares) == 8  # four places of its own each
        finally:
            own.cont()
        await eventually(lambda: one.changes[-1] is True)
        await eventually(lambda: two.changes[-1] is True)
        await asyncio.sleep(1.2)  # two rounds: both have reported their running requests
        for share in shares[:4]:
            share.leave()
        assert await burst(4, one, two) == []  # the other four still run

    with RedisServer() as own:
        run(own.url, Limits(concurrent_requests=4), work)
    said = [x.getMessage() for x in caplog.records if "this gateway alone" in x.getMessage()]
    assert len(said) == 2  # once by each


@pytest.mark.parametrize("away_s", [0.06, 0.09, 0.12])
@pytest.mark.parametrize(
    "limits", [Limits(concurrent_requests=8), Limits(600, 60_000, 8)], ids=["places", "all"]
)
def test_a_redis_far_away_refuses_nothing_within_the_limits(
    server: RedisServer, client: redis.Redis, away_s: float, limits: Limits
):
    async def work(one: OneGateway, two: OneGateway) -> None:
        for i in range(12):
            share = await one.try_one()
            assert share is not None, f"request {i}"
            await asyncio.sleep(0.02)
            share.used_tokens(10)
            share.leave()

    run(server.url, limits, work, away_s)


def test_what_a_redis_far_away_was_not_asked_in_time_is_owed_to_it(
    server: RedisServer, client: redis.Redis
):
    async def work(one: OneGateway, two: OneGateway) -> None:
        shares = await burst(4, one)
        assert len(shares) == 4
        places = "thermocline:limits:n-a1:places"
        await eventually(lambda: any(x[:2] == b"4:" for x in client.hvals(places)))
        first = await burst(1, two)  # not answered in time, perhaps
        await eventually(lambda: two.shared._stocks["a1"].is_known_short)
        assert await burst(6, two) == [], "now it is known that the other has all places"
        for share in shares + first:
            share.leave()
        end = time.monotonic() + PATIENCE_S
        while await two.try_one() is None:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)

    run(server.url, Limits(concurrent_requests=4), work, away_s=0.12)


def test_sessions_of_all_gateways_count(server: RedisServer, client: redis.Redis):
    async def work(one: OneGateway, two: OneGateway) -> None:
        one.sessions = ["a", "b"]
        assert await one.shared.claim_session(ALICE, 3, "c")
        one.sessions = ["a", "b", "c"]
        assert not await two.shared.claim_session(ALICE, 3, "d")
        assert await two.shared.claim_session(ALICE, 3, "a")  # it is there already
        await asyncio.sleep(1.0)
        one.sessions = ["a", "b"]  # one was deleted
        end = time.monotonic() + PATIENCE_S
        while not await two.shared.claim_session(ALICE, 3, "d"):
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        (name,) = client.keys("*:sessions")
        assert client.pttl(name) > 0

    run(server.url, Limits(sessions=3), work)


@pytest.mark.parametrize(
    "script", ["--rename-command EVAL nope", ""], ids=["no scripts", "nonsense"]
)
def test_answers_that_cannot_be_right_make_a_gateway_count_for_itself(script: str):
    async def main(url: str) -> None:
        one = OneGateway(url, Limits(4, concurrent_requests=2))
        await eventually(lambda: bool(one.changes))
        assert len(await burst(2, one)) == 2
        await eventually(lambda: one.changes[-1] is False)
        assert one.keys.of(ALICE).requests_per_minute == 4
        assert await one.try_one() is None  # by its own count
        await one.kill()

    with RedisServer(*script.split()) as own, redis.Redis.from_url(own.url) as client:
        if not script:
            client.set("thermocline:limits:n-a1:places", "of another type")
        asyncio.run(main(own.url))


@pytest.mark.parametrize("reply", [None, b"", [b"1"], [b"x", b"y"], [b"99", b"1"], [b"1", b"nan"]])
def test_no_answer_of_a_bucket_is_believed_that_is_none(reply: Reply):
    with pytest.raises(ValueError):
        read_taken(reply, 10)


@pytest.mark.parametrize("reply", [None, b"1", -1, redis.ResponseError("no")])
def test_no_number_is_believed_that_is_none(reply: Reply):
    with pytest.raises(ValueError):
        read_number(reply)
    with pytest.raises(ValueError):
        read_places([1, reply], 4)
    with pytest.raises(ValueError):
        read_places(reply, 4)
