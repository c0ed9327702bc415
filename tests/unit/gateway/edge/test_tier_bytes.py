"""A tenant's bytes of a tier over several engines with real tiers, with a Redis and without."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineUnavailable, TenantLimits, TierName
from engines.wire import TenantUses, Welcome
from gateway.edge.byte_shares import Entry, LocalShares, Share, ask_share, divide, read_share
from gateway.edge.shared_limits import SharedLimits
from gateway.edge.stock import Reply
from gateway.edge.tier_bytes import IDLE_S, TICK_S, TierBytes, Used
from gateway.keys import Limits, Tenants
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.redis_server import RedisServer
from tests.unit.gateway.edge.conftest import asks
from tests.unit.gateway.in_process import WELCOME

BLOBS, BLOB = 4, 3 << 10
SESSION = BLOBS * (BLOB + (1 << 10))  # with names and overhead, at most
MOST = 10 * SESSION
TENANT = "alice"
DIGEST = "0" * 64


class TierOfEngine:
    """An engine's side of the limits: a real tier, to which the test writes."""

    def __init__(self, tier: Tier | None = None, shared_address: str = "") -> None:
        self.shared_address = shared_address
        self.welcome: Welcome | None = None
        self.is_away = False
        self.num_told = 0
        self.told: Mapping[TierName, TenantLimits] = {}
        self._numbers = count()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.on_answer: Callable[[], object] = lambda: None
        self.begin(tier or RamTier(1 << 30))

    def begin(self, tier: Tier) -> None:
        """Begin another life."""
        self.tier = tier
        self.name: TierName = tier.name  # type: ignore[assignment]
        self.welcome = msgspec.structs.replace(WELCOME, limits_tenants=True)

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        await asyncio.sleep(0)
        await self.may_answer.wait()
        if self.is_away:
            raise EngineUnavailable("the connection was lost")
        self.num_told += 1
        self.told = tiers
        uses = self.tier.limit_tenants(tiers.get(self.name, TenantLimits()))
        self.on_answer()
        return TenantUses({} if uses is None else {self.name: uses})

    def save(self, tenant: str = TENANT, times: int = 1) -> bool:
        """Write sessions more; returns whether all of each was kept."""
        kept = []
        for _ in range(times):
            number = f"{id(self)}-{next(self._numbers)}"
            blobs = [(f"{number}-{i}".encode(), bytes(BLOB)) for i in range(BLOBS)]
            kept.append(self.tier.put_many(blobs, tenant) == BLOBS)
        return all(kept)

    def reconnect(self) -> None:
        self.welcome = msgspec.structs.replace(self.welcome)

    @property
    def held(self) -> int:
        return self.tier.stats().nbytes


class OneGateway:
    """The limits of one gateway and its engines, round by round."""

    def __init__(
        self, engines: int | Sequence[TierOfEngine], most: int = MOST, tier: TierName = "ram"
    ) -> None:
        made = [TierOfEngine() for _ in range(engines)] if isinstance(engines, int) else engines
        self.engines = list(made)
        self.most = most
        limits = Limits(**{f"{tier}_bytes": most})
        self.shared: SharedLimits | None = None
        self.tenants = Tenants(b"s" * 16, [f"{TENANT}:{DIGEST}", f"bob:{DIGEST[1:]}1"])
        self._usual = limits
        self.full: dict[str, int] = {}
        self.busy: list[str] = []
        self.now_s = 0.0
        self._begin()

    def share(self, url: str, space: str) -> None:
        self.shared = SharedLimits(asks(url), lambda name: f"{space}-{name}")
        self.shared.is_shared = True
        self._begin()

    def _begin(self) -> None:
        self.bytes = TierBytes(
            lambda: {x.shared_address or str(i): x for i, x in enumerate(self.engines)},
            self.tenants,
            lambda: self._usual,
            self.shared,
            self.full.__setitem__,
            lambda: self.busy,
            lambda: self.now_s,
        )
        self.bytes.seen(TENANT)

    async def rounds(self, number: int = 6) -> None:
        for _ in range(number):
            async with asyncio.TaskGroup() as group:
                await self.bytes.round(group)

    async def turns(self, number: int, *engines: TierOfEngine, tenant: str = TENANT) -> None:
        """Save sessions one by one, with rounds between; the bytes stay within the limit."""
        for _ in range(number):
            for engine in engines:
                engine.save(tenant)
            await self.rounds(2)
            assert self.held <= self.most

    @property
    def held(self) -> int:
        return sum(x.held for x in self.engines)


async def test_one_engine_gives_a_tenant_all_that_it_may_have_and_no_more():
    gateway = OneGateway(1)
    await gateway.rounds(3)
    assert gateway.engines[0].save(times=30)
    assert MOST - 2 * SESSION < gateway.held <= MOST
    await gateway.rounds(2)
    used = (await gateway.bytes.used(TENANT))["ram"]
    assert used == (gateway.held, MOST, False)
    assert gateway.full == {"ram": 1}


async def test_another_tenants_bytes_are_not_touched():
    gateway = OneGateway(1)
    gateway.bytes.seen("bob")
    await gateway.rounds(3)
    engine = gateway.engines[0]
    assert engine.save("bob")
    bobs = engine.held
    assert engine.save(times=30)
    assert engine.held <= MOST + bobs
    await gateway.rounds(3)
    assert (await gateway.bytes.used("bob"))["ram"].held == bobs


async def test_without_limits_engines_are_asked_once():
    gateway = OneGateway(1, most=0)
    await gateway.rounds()
    assert gateway.engines[0].num_told == 1
    assert gateway.engines[0].save(times=30)
    assert await gateway.bytes.used(TENANT) == {}


@pytest.mark.parametrize("set_by", ["this gateway", "an earlier one"])
async def test_a_limit_that_is_taken_away_holds_no_more(set_by: str):
    gateway = OneGateway(1)
    await gateway.rounds(3)
    gateway._usual = Limits()
    if set_by == "an earlier one":
        gateway._begin()
    await gateway.rounds(1)
    assert gateway.engines[0].save(times=30)
    assert gateway.held > 2 * MOST


async def test_when_the_last_limit_has_gone_no_tenant_is_full():
    gateway = OneGateway(1)
    await gateway.rounds(3)
    gateway.engines[0].save(times=30)
    await gateway.rounds(2)
    assert gateway.full == {"ram": 1}
    gateway._usual = Limits()
    await gateway.rounds(1)
    assert gateway.full == {"ram": 0}


async def test_a_tenant_whose_key_allows_any_number_is_not_held_to_the_usual_limit():
    gateway = OneGateway(2)
    lines = [f"{TENANT}:{DIGEST}", f"bob:{DIGEST[1:]}1 requests_per_minute=600"]
    gateway.tenants.replace(lines)
    gateway.bytes.seen("bob")
    await gateway.rounds()
    assert gateway.engines[0].save("bob", 30)
    await gateway.rounds()
    assert gateway.held > 2 * MOST
    assert await gateway.bytes.used("bob") == {}


async def test_a_tenant_whose_key_was_revoked_has_the_usual_limit():
    gateway = OneGateway(2)
    gateway.bytes.seen("bob")
    await gateway.rounds()
    assert gateway.engines[0].save("bob", 4)
    before = gateway.held
    gateway.tenants.replace([f"{TENANT}:{DIGEST}"])
    gateway._begin()
    await gateway.rounds()
    assert gateway.held == before
    await gateway.turns(12, *gateway.engines, tenant="bob")


async def test_a_limit_that_is_set_later_takes_only_what_is_beyond_it():
    gateway = OneGateway(1)
    lines = [f"{TENANT}:{DIGEST} sessions=9", f"bob:{DIGEST[1:]}1"]
    gateway.tenants.replace(lines)
    await gateway.rounds(3)
    assert gateway.engines[0].save(times=8)
    before = gateway.held
    gateway.tenants.replace([f"{lines[0]} ram_bytes={MOST}", lines[1]])
    await gateway.rounds(3)
    assert gateway.held == before
    gateway.engines[0].save(times=30)
    assert before < gateway.held <= MOST


async def test_engines_are_told_of_tenants_that_hold_or_want_something_only():
    gateway = OneGateway(1)
    gateway.tenants.replace([f"{TENANT}:{DIGEST}", *(f"t{i}:{i:064x}" for i in range(1, 100))])
    await gateway.rounds()
    assert gateway.engines[0].told["ram"].named.keys() == {TENANT}
    assert not gateway.engines[0].save("t7")


async def test_a_tenant_with_a_running_turn_keeps_bytes_ready():
    gateway = OneGateway(1)
    gateway.busy = [TENANT]
    for _ in range(20):
        gateway.now_s += IDLE_S / 10
        await gateway.rounds(1)
    assert gateway.engines[0].save()
    gateway.engines[0].begin(RamTier(1 << 30))
    gateway.busy = []
    for _ in range(20):
        gateway.now_s += IDLE_S / 10
        await gateway.rounds(1)
    assert not gateway.engines[0].save()


async def test_a_lower_limit_evicts_the_oldest_copies():
    gateway = OneGateway(1)
    await gateway.rounds(3)
    gateway.engines[0].save(times=9)
    gateway._usual = Limits(ram_bytes=3 * SESSION)
    await gateway.rounds(2)
    assert SESSION < gateway.held <= 3 * SESSION
    assert gateway.engines[0].tier.why_evicted([f"{id(gateway.engines[0])}-0-3".encode()]) == [
        "limit"
    ]


async def test_contents_of_an_earlier_life_are_not_lost_when_a_gateway_begins():
    gateway = OneGateway(3)
    gateway.engines[1].save(times=9)  # before any limit is known
    before = gateway.held
    gateway.bytes._seen.clear()
    await gateway.rounds()
    assert gateway.held == before


@pytest.mark.parametrize("begins", ["gateway", "connection"])
async def test_saves_are_taken_when_one_begins_again(begins: str):
    gateway = OneGateway(2)
    engine = gateway.engines[0]
    await gateway.rounds()
    assert engine.save(times=3)
    if begins == "gateway":
        gateway._begin()
    else:
        engine.reconnect()
    before = gateway.held
    took: list[bool] = []
    engine.on_answer = lambda: took.append(engine.save())
    await gateway.rounds(1)
    assert len(took) == 2
    assert all(took)
    assert gateway.held > before


async def test_contents_of_a_tier_that_was_away_are_not_lost_when_it_is_back():
    gateway = OneGateway(2)
    first, _ = gateway.engines
    await gateway.rounds()
    assert first.save(times=3)
    before = gateway.held
    first.name = "redis"  # its RAM is not reported now
    await gateway.rounds()
    first.name = "ram"
    await gateway.rounds()
    assert gateway.held == before


async def test_an_engine_that_has_all_gives_way_to_one_that_wants_some():
    gateway = OneGateway(2)
    first, second = gateway.engines
    await gateway.rounds()
    await gateway.turns(12, first)
    assert first.held > 0.7 * MOST
    await gateway.turns(12, second)
    assert min(first.held, second.held) > 0.35 * MOST


async def test_an_engine_that_does_not_answer_keeps_its_share():
    gateway = OneGateway(2)
    first, second = gateway.engines
    await gateway.rounds()
    await gateway.turns(4, first)
    first.is_away = True
    for _ in range(12):
        second.save()
        await gateway.rounds(2)
        first.save()  # it still holds to its last share
        assert gateway.held <= MOST
    assert second.held > 0


async def test_an_engine_that_is_slow_to_answer_delays_no_other():
    gateway = OneGateway(2)
    first, second = gateway.engines
    await gateway.rounds()
    second.may_answer.clear()
    second_told = second.num_told
    running = asyncio.create_task(gateway.bytes.run())
    await asyncio.sleep(0.1)
    gateway.bytes.seen("bob")
    await asyncio.sleep(0.2)
    assert first.save("bob")
    told = first.num_told
    await asyncio.sleep(3 * TICK_S)
    assert first.num_told >= told + 2
    assert second.num_told == second_told
    running.cancel()


@pytest.mark.redis
async def test_a_share_is_renewed_while_its_engine_does_not_answer(server: RedisServer):
    gateway, asked = OneGateway(1), []
    gateway.share(server.url, secrets.token_hex(4))
    ask = gateway.shared.ask
    gateway.shared.ask = lambda commands: asked.extend(commands) or ask(commands)
    await gateway.rounds()
    engine = gateway.engines[0]
    assert engine.save()
    assert engine.welcome is not None
    engine.reconnect()  # after a lost connection
    engine.is_away = True
    asked.clear()
    await gateway.rounds(1)
    used, wanted = asked[0][-4:-2]
    assert used == MOST
    assert wanted == MOST


async def test_the_disk_holds_to_it_too(tmp_path: Path):
    tiers = [DiskTier(tmp_path / str(i), 64 << 20) for i in range(2)]
    most = 1 << 20
    gateway = OneGateway([TierOfEngine(x) for x in tiers], most, "disk")
    await gateway.rounds()
    for _ in range(60):
        for engine in gateway.engines:
            engine.save()
        await gateway.rounds(1)
        assert gateway.held <= most
    assert gateway.held > most // 2
    for tier in tiers:
        tier.close()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "flood", "flood", "round", "round", "die", "away", "back"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


async def _act(gateways: Sequence[OneGateway], actions: Sequence[tuple[str, int]]) -> None:
    """Do the actions, and check after each that a tenant's bytes are within its limit."""
    engines = [y for x in gateways for y in x.engines]
    for gateway in gateways:
        await gateway.rounds(2)
    for what, number in actions:
        engine, gateway = engines[number % len(engines)], gateways[number % len(gateways)]
        if what in ("save", "flood"):
            engine.save(times=1 if what == "save" else 12)
        elif what == "round":
            await gateway.rounds(1)
        elif what == "die":
            engine.is_away = False
            engine.begin(RamTier(1 << 30))
            for each in gateways:
                await each.rounds(1)
        else:
            engine.is_away = what == "away"
        assert sum(x.held for x in engines) <= MOST + SESSION


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_the_sum_is_never_more_than_the_limit_and_a_session(actions: list[tuple[str, int]]):
    asyncio.run(_act([OneGateway(4)], actions))


@pytest.mark.redis
@settings(max_examples=20, deadline=None)
@given(actions=ACTIONS)
def test_so_it_is_over_two_gateways_of_a_redis(server: RedisServer, actions: list[tuple[str, int]]):
    space = secrets.token_hex(8)
    gateways = [OneGateway(2) for _ in range(2)]
    for gateway in gateways:
        gateway.share(server.url, space)
    asyncio.run(_act(gateways, actions))


@pytest.mark.redis
async def test_while_redis_is_away_each_gateway_holds_to_it_and_afterwards_all():
    with RedisServer() as redis:
        space = secrets.token_hex(8)
        gateways = [OneGateway(1) for _ in range(2)]
        for gateway in gateways:
            gateway.share(redis.url, space)
        for _ in range(6):
            for gateway in gateways:
                await gateway.turns(1, *gateway.engines)
        assert sum(x.held for x in gateways) <= MOST
        redis.kill()
        for gateway in gateways:
            gateway.shared.is_shared = False
        for gateway in gateways:
            await gateway.turns(12, *gateway.engines)
        assert sum(x.held for x in gateways) > 1.5 * MOST
        redis.restart()
        for gateway in gateways:
            gateway.shared.is_shared = True
        async with asyncio.timeout(30):
            while sum(x.held for x in gateways) > MOST:
                for gateway in gateways:
                    await gateway.rounds(1)
                await asyncio.sleep(0.1)
        assert min(x.held for x in gateways) > 0.3 * MOST


@pytest.mark.redis
async def test_each_gateway_shows_what_a_tenant_holds_at_all_of_them(server: RedisServer):
    gateways = [OneGateway(i) for i in (2, 1, 0)]
    space = secrets.token_hex(8)
    for gateway in gateways:
        gateway.share(server.url, space)
        await gateway.rounds(3)
    assert all(x.save() for y in gateways for x in y.engines)
    for gateway in gateways:
        await gateway.rounds(2)
    of_all = sum(x.held for x in gateways)
    shown = [(await x.bytes.used(TENANT))["ram"] for x in gateways]
    assert shown == [Used(of_all, MOST)] * 3 and of_all > gateways[0].held
    for gateway in gateways:  # as where Redis does not answer
        gateway.shared.is_shared = False
    shown = [(await x.bytes.used(TENANT))["ram"] for x in gateways]
    assert shown == [Used(x.held, MOST, True) for x in gateways]


@pytest.mark.redis
async def test_an_engine_that_two_gateways_use_is_counted_once(server: RedisServer):
    space, engine = secrets.token_hex(8), TierOfEngine(shared_address="http://10.0.0.1:9000")
    gateways = [OneGateway([engine]) for _ in range(2)]
    for gateway in gateways:
        gateway.share(server.url, space)
        await gateway.rounds(3)
    assert engine.save()
    for gateway in gateways:
        await gateway.rounds(2)
        assert (await gateway.bytes.used(TENANT))["ram"] == Used(engine.held, MOST)


@pytest.mark.redis
async def test_one_gateway_sets_the_limits_of_an_engine_that_two_use(server: RedisServer):
    space, engine = secrets.token_hex(8), TierOfEngine(shared_address="http://10.0.0.1:9000")
    first, second = OneGateway([engine]), OneGateway([engine])
    for gateway in (first, second):
        gateway.share(server.url, space)
    await first.rounds(3)
    told = engine.num_told
    await second.rounds(3)
    assert engine.num_told == told > 0
    assert engine.save()


SHARES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 1000), st.integers(0, 1000)), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1000), SHARES)
def test_shares_are_no_more_than_the_limit_unless_more_is_in_use(
    most: int, asked: list[tuple[int, int, int]]
):
    shares, held = LocalShares(), dict.fromkeys(map(str, range(5)), 0)
    for number, less, wanted in asked:
        name = str(number)
        used = max(0, held[name] - less)
        share = shares.ask(most, name, used, wanted)
        assert share.given >= used
        assert share.kept(most) <= share.given
        held[name] = share.given if used or wanted else 0
        assert sum(held.values()) <= most


@pytest.mark.redis
@settings(max_examples=40, deadline=None)
@given(most=st.integers(1, 1 << 45), asked=SHARES, unit=st.integers(1, 1 << 40))
def test_the_server_divides_as_a_gateway_does(
    server: RedisServer, most: int, asked: list[tuple[int, int, int]], unit: int
):
    ask, local, name = asks(server.url), LocalShares(), secrets.token_hex(8)
    for number, used, wanted in asked:
        command = ask_share(name, most, str(number), used * unit, wanted * unit, 60_000)
        there = read_share(ask([command])[0])
        assert there == local.ask(most, str(number), used * unit, wanted * unit)


@pytest.mark.parametrize("reply", [None, b"x", [1, 2, 3], [-1, 0, 0, 0], [1, 1 << 60, 0, 0]])
def test_answers_that_cannot_be_are_refused(reply: Reply):
    with pytest.raises(ValueError, match="share|answer"):
        read_share(reply)


def test_an_equal_part_is_kept_whatever_others_want():
    others = {"a": Entry(0, 1000), "b": Entry(0, 1000)}
    share = divide(90, others, 90, 90)
    assert share == Share(90, 0, 2, 60)
    assert share.kept(90) == 30
