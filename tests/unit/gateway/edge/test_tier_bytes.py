"""A tenant's bytes of a tier on engines with real tiers: one number for each engine.

How a tier keeps within a limit, and whose blobs go, is in ``tests/contract/test_tenant_limits``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count

import msgspec
import pytest

from engines.base import EngineUnavailable, TenantLimits, TierName
from engines.wire import TenantUses, Welcome
from gateway.edge.tier_bytes import TierBytes
from gateway.keys import Limits, Tenants
from kvstore.tiers.ram_tier import RamTier
from tests.unit.gateway.in_process import WELCOME

BLOBS, BLOB = 4, 3 << 10
SESSION = BLOBS * (BLOB + (1 << 10))  # with names and overhead, at most
MOST = 10 * SESSION
TENANT = "alice"
DIGEST = "0" * 64


class TierOfEngine:
    """An engine's side of the limits: a real tier, to which the test writes."""

    def __init__(self) -> None:
        self.is_away = False
        self.num_told = 0
        self._numbers = count()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.begin()

    def begin(self) -> None:
        """Begin another life."""
        self.tier = RamTier(1 << 30)
        self.welcome: Welcome | None = msgspec.structs.replace(WELCOME)

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        await self.may_answer.wait()
        if self.is_away:
            raise EngineUnavailable("the connection was lost")
        self.num_told += 1
        uses = self.tier.limit_tenants(tiers.get("ram", TenantLimits()))
        return TenantUses({} if uses is None else {"ram": uses})

    def save(self, tenant: str = TENANT, times: int = 1) -> bool:
        """Write sessions more; returns whether all of each was kept."""
        kept = []
        for _ in range(times):
            number = f"{id(self)}-{next(self._numbers)}"
            blobs = [(f"{number}-{i}".encode(), bytes(BLOB)) for i in range(BLOBS)]
            kept.append(self.tier.put_many(blobs, tenant) == BLOBS)
        return all(kept)

    @property
    def held(self) -> int:
        return self.tier.stats().nbytes


class OneGateway:
    """The limits of one gateway and its engines, round by round."""

    def __init__(self, *engines: TierOfEngine, most: int = MOST) -> None:
        self.engines = list(engines) or [TierOfEngine()]
        self.tenants = Tenants(b"s" * 16, [f"{TENANT}:{DIGEST}", f"bob:{DIGEST[1:]}1"])
        self.usual = Limits(ram_bytes=most)
        self.full: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        self.bytes = TierBytes(
            lambda: {str(i): x for i, x in enumerate(self.engines)},
            self.tenants,
            lambda: self.usual,
            self.full.__setitem__,
        )

    async def rounds(self, number: int = 2) -> None:
        for _ in range(number):
            async with asyncio.TaskGroup() as group:
                self.bytes.round(group)


async def test_an_engine_gives_a_tenant_all_that_it_may_have_and_no_more():
    gateway = OneGateway()
    (engine,) = gateway.engines
    await gateway.rounds()
    assert engine.save(times=30)
    assert MOST - 2 * SESSION < engine.held <= MOST
    await gateway.rounds()
    assert gateway.bytes.used(TENANT) == {"ram": {"held": engine.held, "limit": MOST}}
    assert gateway.full == {"ram": 1}
    gateway.usual = Limits()
    await gateway.rounds(1)
    assert gateway.full == {"ram": 0}


async def test_the_number_is_each_engines_own():
    gateway = OneGateway(TierOfEngine(), TierOfEngine())
    one, other = gateway.engines
    await gateway.rounds()
    assert one.save(times=30) and other.save(times=3)
    assert MOST - 2 * SESSION < one.held <= MOST
    assert other.held > 2 * SESSION
    await gateway.rounds()
    assert gateway.bytes.used(TENANT)["ram"]["held"] == one.held  # the one with most


async def test_a_user_of_a_key_has_that_keys_bytes():
    gateway = OneGateway(most=0)
    gateway.tenants.replace([f"{TENANT}:{DIGEST} ram_bytes={MOST}"])
    (engine,) = gateway.engines
    await gateway.rounds()
    assert engine.save(f"{TENANT}/u1", times=30) and engine.save(f"{TENANT}/u2")
    assert MOST - 2 * SESSION < engine.held <= MOST + SESSION
    await gateway.rounds()
    assert gateway.bytes.used(f"{TENANT}/u1")["ram"]["limit"] == MOST
    assert gateway.full == {"ram": 1}
    assert engine.save("bob", times=30), "whose key has no limit"
    assert engine.held > 2 * MOST


async def test_without_limits_engines_are_asked_once():
    gateway = OneGateway(most=0)
    await gateway.rounds(6)
    assert gateway.engines[0].num_told == 1
    assert gateway.engines[0].save(times=30)
    assert gateway.bytes.used(TENANT) == {}


@pytest.mark.parametrize("set_by", ["this gateway", "an earlier one"])
async def test_a_limit_that_is_taken_away_holds_no_more(set_by: str):
    gateway = OneGateway()
    await gateway.rounds()
    gateway.usual = Limits()
    if set_by == "an earlier one":
        gateway.begin()
    await gateway.rounds(1)
    assert gateway.engines[0].save(times=30)
    assert gateway.engines[0].held > 2 * MOST


async def test_a_tenant_whose_key_allows_any_number_is_not_held_to_the_usual_limit():
    gateway = OneGateway()
    lines = [f"{TENANT}:{DIGEST}", f"bob:{DIGEST[1:]}1 requests_per_minute=600"]
    gateway.tenants.replace(lines)
    await gateway.rounds()
    assert gateway.engines[0].save("bob", 30)
    assert gateway.engines[0].held > 2 * MOST
    assert gateway.bytes.used("bob") == {}


async def test_a_tenant_whose_key_was_revoked_has_the_usual_limit():
    gateway = OneGateway()
    (engine,) = gateway.engines
    gateway.tenants.replace([f"{TENANT}:{DIGEST}"])
    await gateway.rounds()
    assert engine.save("bob", 30)
    assert engine.held <= MOST


async def test_an_engine_that_begins_anew_has_the_limits_again():
    gateway = OneGateway()
    (engine,) = gateway.engines
    await gateway.rounds()
    engine.begin()
    await gateway.rounds(1)
    engine.save(times=30)
    assert engine.held <= MOST


async def test_an_engine_that_does_not_answer_or_is_slow_delays_no_other():
    slow, away, other = TierOfEngine(), TierOfEngine(), TierOfEngine()
    gateway = OneGateway(slow, away, other)
    slow.may_answer.clear()
    away.is_away = True
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        while other.num_told < 3:
            gateway.bytes.round(group)
            await asyncio.sleep(0)
        assert slow.num_told == 0
        slow.may_answer.set()
    away.is_away = False
    await gateway.rounds(1)
    for engine in gateway.engines:
        engine.save(times=30)
        assert engine.held <= MOST
