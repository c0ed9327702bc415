"""Replicas that a list names: who is taken on, who is asked no more, who is let go of."""

from __future__ import annotations

import json

import pytest

from engines.base import EngineUnavailable, EngineUnreached, SessionRef
from engines.fleet.fleet_engine import MAX_OWED_OF_TENANT
from engines.fleet.homes import LastHomes
from engines.fleet.listed_fleet import GONE_S, ListedFleet
from engines.fleet.replica_list import (
    MAX_REPLICAS,
    ListedReplica,
    engine_token,
    list_token,
    read_listing,
)
from tests.unit.engines.fleet.test_fleet_engine import Engine, ref

pytestmark = pytest.mark.timeout(60)


def listed(name: str, *, leaving: bool = False) -> ListedReplica:
    url, control = f"http://127.0.0.1/{name}", f"tcp://127.0.0.1:{name}"
    return ListedReplica(name=name, url=url, control=control, leaving=leaving)


class Rig:
    """A fleet, its list, and the engines that it made."""

    def __init__(self) -> None:
        self.listed: list[ListedReplica] | None = None  # None: the list cannot be read
        self.engines: dict[str, Engine] = {}
        self.now = 1000.0
        self.fleet = ListedFleet(self.read, self.make, LastHomes(1000), 4, lambda: self.now)

    async def read(self) -> list[ListedReplica]:
        if self.listed is None:
            raise EngineUnavailable("the list cannot be read")
        return self.listed

    def make(self, replica: ListedReplica) -> Engine:
        engine = self.engines[replica.name] = Engine()
        return engine

    async def see(self, *replicas: ListedReplica) -> None:
        self.listed = list(replicas)
        await self.fleet.look()

    def owed(self) -> dict[str, set[str]]:
        return {x.name: {id for _, id in x.owed} for x in self.fleet._replicas}

    def home(self, number: int) -> str:
        return self.fleet.choose(ref(number)).name


async def test_replicas_are_taken_on_and_those_that_leave_get_nothing_new():
    rig = Rig()
    await rig.see()
    assert not rig.fleet.ready and rig.fleet.trouble == "the list of replicas is empty"
    with pytest.raises(EngineUnreached):
        rig.home(1)
    await rig.see(listed("1"), listed("2"))
    homes = {rig.home(i) for i in range(50)}
    assert homes == {"1", "2"} and rig.fleet.ready
    await rig.see(listed("1", leaving=True), listed("2"))
    assert {rig.home(i) for i in range(50)} == {"2"}
    await rig.see(listed("2"))  # its connection holds: it may still be answering
    assert [x.name for x in rig.fleet.replicas] == ["1", "2"]
    rig.engines["1"].die()
    await rig.see(listed("2"))
    assert [x.name for x in rig.fleet.replicas] == ["2"]


async def test_a_session_of_a_replica_that_leaves_has_its_verbs_done_by_another():
    rig = Rig()
    await rig.see(listed("1"), listed("2"))
    home = rig.home(7)
    rig.fleet._served(ref(7), rig.fleet.choose(ref(7)))
    other = "2" if home == "1" else "1"
    await rig.see(listed(home, leaving=True), listed(other))
    await rig.fleet.demote(ref(7))
    assert rig.engines[other].demoted == ["s7"] and rig.engines[home].demoted == []


async def test_without_the_list_the_replicas_that_are_known_go_on():
    rig = Rig()
    await rig.see(listed("1"))
    rig.listed = None
    await rig.fleet.look()
    assert rig.fleet.ready and rig.home(1) == "1"


async def test_an_empty_list_and_a_list_that_was_never_read_are_said():
    rig = Rig()
    await rig.fleet.look()
    assert rig.fleet.trouble == "the list cannot be read"
    with pytest.raises(EngineUnavailable, match="cannot be read"):
        rig.fleet.session_headers(ref(1))


async def test_deletions_of_a_gone_replica_pass_to_the_next():
    rig = Rig()
    await rig.see(listed("1"), listed("2"))
    rig.engines["1"].die()
    await rig.fleet.forget(ref(7))
    await rig.see(listed("2"))
    await rig.see(listed("2"), listed("3"))
    assert rig.owed() == {"2": set(), "3": {"s7"}}


async def test_a_deletion_after_a_replica_has_gone_reaches_the_one_that_has_its_disk():
    rig = Rig()
    await rig.see(listed("1"), listed("2"))
    await rig.fleet.forget(ref(1))  # while all are there: nothing is owed
    rig.engines["1"].die()
    await rig.see(listed("2"))
    for number in (2, 3, 4):
        await rig.fleet.forget(ref(number))
    rig.fleet._served(ref(3), rig.fleet.choose(ref(3)))  # it has begun again
    await rig.see(listed("2"), listed("3"))
    assert rig.owed() == {"2": set(), "3": {"s2", "s4"}}
    rig.now += GONE_S - 1
    await rig.fleet.forget(ref(5))
    rig.now += 1
    await rig.fleet.forget(ref(6))  # no disk can come back that has it
    await rig.see(listed("2"), listed("3"), listed("4"))
    assert rig.owed()["4"] == {"s5"}


async def test_of_one_tenant_the_oldest_deletions_are_dropped():
    rig = Rig()
    await rig.see(listed("1"), listed("2"))
    rig.engines["1"].die()
    await rig.see(listed("2"))
    await rig.fleet.forget(SessionRef("another", "s", b""))
    for number in range(MAX_OWED_OF_TENANT + 2):
        await rig.fleet.forget(ref(number))
    await rig.see(listed("2"), listed("3"))
    kept = {f"s{i}" for i in range(2, MAX_OWED_OF_TENANT + 2)}
    assert rig.owed()["3"] == {"s", *kept}
    await rig.fleet.forget(ref(0))  # the new one is there: no number of deletions is too many


async def test_counters_of_a_replica_that_is_gone_are_kept():
    rig = Rig()
    await rig.see(listed("1"), listed("2"))
    for engine in rig.engines.values():
        engine.num_turns = 5
    assert (await rig.fleet.stats()).counters["turns"] == 10
    rig.engines["1"].die()
    await rig.see(listed("2"))
    assert (await rig.fleet.stats()).counters["turns"] == 10


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"replicas":[{"name":"a","url":"ftp://h","control":"tcp://h:1"}]}',
        b'{"replicas":[{"name":"","url":"http://h","control":"tcp://h:1"}]}',
        json.dumps(
            {"replicas": [{"name": "a", "url": "http://h", "control": "tcp://h:1"}] * 2}
        ).encode(),
        json.dumps(
            {
                "replicas": [
                    {"name": str(i), "url": "http://h", "control": "tcp://h:1"}
                    for i in range(MAX_REPLICAS + 1)
                ]
            }
        ).encode(),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(body: bytes):
    with pytest.raises(ValueError):
        read_listing(body)


def test_the_tokens_follow_from_the_secret_and_differ():
    one, other = b"a" * 32, b"b" * 32
    assert engine_token(one) == engine_token(one) != engine_token(other)
    assert engine_token(one) != list_token(one)
