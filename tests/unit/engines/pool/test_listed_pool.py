"""Replicas that a list names: who is taken on and let go of; reading the list."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from engines.base import EngineError, EngineUnavailable, EngineUnreached, SessionRef
from engines.pool.listed_pool import (
    GONE_S,
    MAX_LISTING_BYTES,
    MAX_REPLICAS,
    ListedPool,
    ListedReplica,
    ReplicaList,
    read_listing,
)
from engines.pool.replica import MAX_OWED, MAX_OWED_OF_TENANT, ReplicaDeletions
from engines.pool.replica_choice import Homes
from engines.wire import SessionReport
from tests.unit.engines.pool.replicas import Engine, ref
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(60)


class Gated(Engine):
    """A replica that deletes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.num_waiting = 0

    async def forget(self, session: SessionRef) -> SessionReport | None:
        self.num_waiting += 1
        await self.gate.wait()
        return await super().forget(session)


class Starting(Engine):
    """A replica that is not ready when it is taken on."""

    async def start(self) -> None:
        pass


def listed(name: str, *, leaving: bool = False) -> ListedReplica:
    url, control = f"http://127.0.0.1/{name}", f"tcp://127.0.0.1:{name}"
    return ListedReplica(name=name, url=url, control=control, leaving=leaving)


class Rig:
    """A pool, its list, and the engines that it made."""

    def __init__(self) -> None:
        self.listed: list[ListedReplica] | None = None  # None: the list cannot be read
        self.engines: dict[str, Engine] = {}
        self.now = 1000.0
        self.pool = ListedPool(self.read, self.make, Homes(1000), 4, lambda: self.now)

    async def read(self) -> list[ListedReplica]:
        if self.listed is None:
            raise EngineUnavailable("the list cannot be read")
        return self.listed

    def make(self, replica: ListedReplica) -> Engine:
        engine = self.engines[replica.name] = Engine()
        return engine

    async def see(self, *replicas: ListedReplica) -> None:
        self.listed = list(replicas)
        await self.pool.look()

    def owed(self) -> dict[str, set[str]]:
        return {x.name: {y.id for y in x.owed} for x in self.pool._replicas}

    def home(self, number: int) -> str:
        return self.pool._choice.choose(ref(number)).name


async def two() -> Rig:
    rig = Rig()
    await rig.see(listed("1"), listed("2"))
    return rig


async def one_of_two_gone() -> Rig:
    rig = await two()
    rig.engines["1"].die()
    await rig.see(listed("2"))
    return rig


async def test_replicas_are_taken_on_and_those_that_leave_get_nothing_new():
    rig = Rig()
    await rig.see()
    assert not rig.pool.ready and rig.pool.trouble == "the list of replicas is empty"
    with pytest.raises(EngineUnreached):
        rig.home(1)
    await rig.see(listed("1"), listed("2"))
    homes = {rig.home(i) for i in range(50)}
    assert homes == {"1", "2"} and rig.pool.ready
    await rig.see(listed("1", leaving=True), listed("2"))
    assert {rig.home(i) for i in range(50)} == {"2"}
    await rig.see(listed("2"))  # its connection holds: it may still be answering
    assert [x.name for x in rig.pool.replicas] == ["1", "2"]
    rig.engines["1"].die()
    await rig.see(listed("2"))
    assert [x.name for x in rig.pool.replicas] == ["2"]


async def test_a_session_of_a_replica_that_leaves_has_its_verbs_done_by_another():
    rig = await two()
    home = rig.home(7)
    rig.pool._served(ref(7), rig.pool._choice.choose(ref(7)))
    other = "2" if home == "1" else "1"
    await rig.see(listed(home, leaving=True), listed(other))
    await rig.pool.demote(ref(7))
    assert rig.engines[other].demoted == ["s7"] and rig.engines[home].demoted == []


async def test_without_the_list_the_replicas_that_are_known_go_on():
    rig = Rig()
    await rig.pool.look()
    assert rig.pool.trouble == "the list cannot be read"
    with pytest.raises(EngineUnavailable, match="cannot be read"):
        rig.pool.session_headers(ref(1))
    await rig.see(listed("1"))
    rig.listed = None
    await rig.pool.look()
    assert rig.pool.ready and rig.home(1) == "1"


async def test_a_deletion_after_a_replica_has_gone_reaches_the_one_that_has_its_disk():
    rig = await two()
    await rig.pool.forget(ref(1))  # while all are there: nothing is owed
    rig.engines["1"].die()
    await rig.see(listed("2"))
    for number in (2, 3, 4):
        await rig.pool.forget(ref(number))
    rig.pool._served(ref(3), rig.pool._choice.choose(ref(3)))  # it has begun again
    await rig.see(listed("2"), listed("3"))
    assert rig.owed() == {"2": set(), "3": {"s2", "s4"}}
    rig.now += GONE_S - 1
    await rig.pool.forget(ref(5))
    rig.now += 1
    await rig.pool.forget(ref(6))  # no disk can come back that has it
    await rig.see(listed("2"), listed("3"), listed("4"))
    assert rig.owed()["4"] == {"s5"}


async def test_of_one_tenant_the_oldest_deletions_are_dropped():
    rig = await one_of_two_gone()
    await rig.pool.forget(SessionRef("another", "s", b""))
    for number in range(MAX_OWED_OF_TENANT + 2):
        await rig.pool.forget(ref(number))
    await rig.see(listed("2"), listed("3"))
    kept = {f"s{i}" for i in range(2, MAX_OWED_OF_TENANT + 2)}
    assert rig.owed()["3"] == {"s", *kept}
    await rig.pool.forget(ref(0))  # the new one is there: no number of deletions is too many


async def test_a_session_that_begins_again_is_not_deleted_for_a_replica_that_is_away():
    """To delete it at the next replica would delete the copy that all share."""
    rig = await two()
    rig.engines["1"].die()
    await rig.pool.forget(ref(7))
    await rig.pool.forget(ref(8))
    rig.pool._served(ref(7), rig.pool._choice.choose(ref(7)))
    await rig.see(listed("2"))
    await rig.see(listed("2"), listed("3"))
    assert rig.owed() == {"2": set(), "3": {"s8"}}


async def test_a_session_that_begins_again_while_others_are_deleted_stays():
    rig = await one_of_two_gone()
    for number in range(5):
        await rig.pool.forget(ref(number))
    new = rig.engines["3"] = Gated()
    rig.make = rig.pool._make = lambda _: new
    await rig.see(listed("2"), listed("3"))
    await eventually(lambda: new.num_waiting)
    rig.pool._served(ref(4), rig.pool._choice.choose(ref(4)))
    new.gate.set()
    await eventually(lambda: not rig.owed()["3"])
    assert new.forgotten == ["s0", "s1", "s2", "s3"]


async def test_a_session_that_begins_again_while_it_is_deleted_is_not_kept_as_deleted():
    rig = Rig()
    two = rig.engines["2"] = Gated()
    rig.pool._make = lambda x: two if x.name == "2" else rig.make(x)
    await rig.see(listed("1"), listed("2"))
    rig.engines["1"].die()
    await rig.see(listed("2"))
    deleting = asyncio.create_task(rig.pool.forget(ref(7)))
    await eventually(lambda: two.num_waiting)
    rig.pool._served(ref(7), rig.pool._choice.choose(ref(7)))
    two.gate.set()
    await deleting
    await rig.see(listed("2"), listed("3"))
    assert rig.owed()["3"] == set()


async def test_a_new_replica_that_is_not_ready_refuses_no_deletions():
    rig = await one_of_two_gone()
    for number in range(MAX_OWED_OF_TENANT):
        await rig.pool.forget(ref(number))
    new = rig.engines["3"] = Starting()
    rig.pool._make = lambda _: new
    await rig.see(listed("2"), listed("3"))
    await rig.pool.forget(ref(MAX_OWED_OF_TENANT))
    assert rig.owed()["3"] == {f"s{i}" for i in range(1, MAX_OWED_OF_TENANT + 1)}
    new.begin()
    await eventually(lambda: not rig.owed()["3"])
    new.die()
    for number in range(MAX_OWED_OF_TENANT):
        await rig.pool.forget(ref(number))
    with pytest.raises(EngineUnavailable, match="replica 3 is away"):
        await rig.pool.forget(ref(MAX_OWED_OF_TENANT))
    assert f"s{MAX_OWED_OF_TENANT}" not in rig.owed()["2"]  # it is not half deleted


async def test_counters_of_a_replica_that_is_gone_are_kept():
    rig = await two()
    for engine in rig.engines.values():
        engine.num_turns = 5
    assert (await rig.pool.stats()).counters["turns"] == 10
    rig.engines["1"].die()
    await rig.see(listed("2"))
    assert (await rig.pool.stats()).counters["turns"] == 10


HOST = {"name": "a", "url": "http://h", "control": "tcp://h:1"}
LISTS = [[HOST | {"url": "ftp://h"}], [HOST | {"name": ""}], [HOST] * 2]
LISTS += [[HOST | {"name": str(i)} for i in range(MAX_REPLICAS + 1)]]


@pytest.mark.parametrize(
    "body", [b"", b"[]", *(json.dumps({"replicas": x}).encode() for x in LISTS)]
)
def test_a_list_that_makes_no_sense_is_refused(body: bytes):
    with pytest.raises(ValueError):
        read_listing(body)


# ---- reading the list over HTTP

REPLICA = {"name": "a", "url": "http://10.0.0.7:9000", "control": "tcp://10.0.0.7:9001"}


@asynccontextmanager
async def served(status: int, body: bytes, path: str = "/replicas") -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        right = request.headers.get("authorization") == "Bearer token"
        return web.Response(status=status if right else 401, body=body)

    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", ["/", "/replicas", "/a/b"])
async def test_a_list_is_read_with_its_token(path: str):
    async with served(200, json.dumps({"replicas": [REPLICA]}).encode(), path) as url:
        (replica,) = await ReplicaList(url, "token").read()
        assert (replica.name, replica.url, replica.leaving) == ("a", REPLICA["url"], False)
        with pytest.raises(EngineUnavailable, match="status 401"):
            await ReplicaList(url, "wrong").read()


NO_LISTS = [
    (503, b"{}", "status 503"),
    (200, b"<html>", "no list of replicas at"),
    (200, b" " * (MAX_LISTING_BYTES + 1), "too long"),
]


@pytest.mark.parametrize(("status", "body", "words"), NO_LISTS)
async def test_an_answer_that_is_no_list_fails_with_the_reason(status: int, body: bytes, words):
    async with served(status, body) as url:
        with pytest.raises(EngineUnavailable, match=words):
            await ReplicaList(url, "token").read()


async def test_nothing_listens_there_or_it_is_no_address():
    async with served(200, b"") as url:
        pass
    with pytest.raises(EngineUnavailable):
        await ReplicaList(url, "token").read()
    with pytest.raises(EngineError):
        ReplicaList("10.0.0.7:8000", "token")


def of(tenant: str, number: int) -> SessionRef:
    return SessionRef(tenant, f"s{number}", b"")


def test_the_oldest_make_room_first_of_the_tenant_and_then_of_all():
    deletions = ReplicaDeletions()
    deletions.add(of("first", 0))
    for number in range(MAX_OWED_OF_TENANT):
        deletions.add(of("a", number))
    assert not deletions.has_room("a") and deletions.has_room("b")
    deletions.add(of("a", 0))  # deleted again: the latest now
    deletions.make_room("a")
    assert ("a", "s0") in deletions and ("a", "s1") not in deletions
    assert deletions.has_room("a") and len(deletions) == MAX_OWED_OF_TENANT
    for number in range(MAX_OWED - len(deletions)):
        deletions.add(of(f"t{number % 4}", number))
    assert not deletions.has_room("b")
    deletions.make_room("b")
    assert ("first", "s0") not in deletions and next(iter(deletions)) == of("a", 2)


def test_those_whose_time_is_over_are_dropped():
    deletions = ReplicaDeletions()
    deletions.add(of("a", 1), 10.0)
    deletions.add(of("b", 2), 11.0)
    deletions.add(of("a", 1), 12.0)
    deletions.discard(of("a", 3))
    deletions.expire(11.0)
    assert list(deletions) == [of("a", 1)]
    deletions.expire(12.0)
    assert list(deletions) == [] and deletions.has_room("a")


def test_a_deletion_takes_no_longer_among_many():
    deletions = ReplicaDeletions()
    for number in range(MAX_OWED):
        deletions.add(of(f"t{number % 5}", number), 10.0)
    began = time.process_time()
    for number in range(1000):
        deletions.expire(5.0)
        deletions.make_room("u")
        deletions.add(of("u", number), 11.0)
    assert time.process_time() - began < 0.5  # measured: 0.002; to count all each time: 6
    assert len(deletions) == MAX_OWED
