"""Which replica gets a request, which are sent again, and the joint report of all replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from engines.base import (
    EngineStalled,
    EngineUnavailable,
    EngineUnreached,
    SessionRef,
)
from engines.http import TENANT_HEADER
from engines.pool.replica import MAX_OWED_OF_TENANT
from engines.pool.replica_choice import Homes, Ring
from engines.pool.replica_pool import ReplicaPool
from engines.wire import Notice, TierStats, absent
from tests.unit.engines.pool.replicas import Dying, Engine, Rig, ref, report
from tests.unit.gateway.in_process import WELCOME, Answered
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(60)


async def test_sessions_spread_and_stay_and_only_those_of_a_dead_one_move():
    async with Rig(4) as rig:
        before = {i: rig.name(ref(i)) for i in range(400)}
        shares = Counter(before.values())
        assert len(shares) == 4 and min(shares.values()) > 50
        assert before == {i: rig.name(ref(i)) for i in range(400)}
        rig.engines["2"].die()
        after = {i: rig.name(ref(i)) for i in range(400)}
        assert all(after[i] == name for i, name in before.items() if name != "2")
        orphans = [i for i, name in before.items() if name == "2"]
        assert {after[i] for i in orphans} == {"0", "1", "3"}
        await rig.turn(ref(orphans[0]))
        rig.engines["2"].begin()
        await rig.settle()
        assert rig.name(ref(orphans[0])) == after[orphans[0]], "the last home comes first"
        assert rig.name(ref(orphans[1])) == "2"


async def test_questions_without_a_session_are_asked_of_all():
    asks = {TENANT_HEADER: "tenant"}
    async with Rig(3) as rig:
        for _ in range(60):
            async with rig.pool.open("/tokenize", b"{}", asks) as upstream:
                await upstream.read()
        assert all(x.num_turns for x in rig.engines.values())


async def test_a_session_moves_when_its_home_is_far_ahead_and_leaves_no_hot_copy():
    async with Rig() as rig:
        await rig.turn(ref(1))
        home = rig.name(ref(1))
        replica = next(x for x in rig.pool._replicas if x.name == home)
        replica.num_running = 3
        assert rig.name(ref(1)) == home
        replica.num_running = 4
        await rig.turn(ref(1))
        await rig.settle()
        assert rig.name(ref(1)) != home
        assert rig.engines[home].demoted == ["s1"]
        report = await rig.pool.stats()
        assert report.counters["moved.load"] == 1


async def test_a_request_is_asked_once_more_elsewhere_but_not_twice():
    async with Rig() as rig:
        first = rig.engines[rig.name(ref(1))]
        first.dies_with_next = True
        assert await rig.turn(ref(1)) == b"{}"
        second = rig.engines[rig.name(ref(1))]
        assert second is not first and second.num_turns == 1
        for engine in rig.engines.values():
            engine.dies_with_next = True
        with pytest.raises(EngineUnavailable, match="broke"):
            await rig.turn(ref(1))
        assert sum(x.ready for x in rig.engines.values()) == 0


async def test_the_only_replica_is_asked_in_its_next_life():
    async with Rig(1) as rig:
        (engine,) = rig.engines.values()
        engine.dies_with_next = True
        turn = asyncio.create_task(rig.turn(ref(1)))
        await rig.settle()
        assert not rig.pool.ready
        engine.dies_with_next = False
        engine.begin()
        assert await turn == b"{}"


async def test_a_replica_that_takes_no_connection_comes_last_for_some_time():
    async with Rig() as rig:
        name = rig.name(ref(1))
        rig.engines[name].takes_no_connection = True
        assert await rig.turn(ref(1)) == b"{}"
        others = [i for i in range(100) if rig.name(ref(i)) == name]
        assert not others
        rig.now += 6
        assert any(rig.name(ref(i)) == name for i in range(100))


async def test_replicas_without_room_for_a_connection_are_tried_until_one_has():
    async with Rig() as rig:
        for engine in rig.engines.values():
            engine.is_busy_for = 3
        assert await rig.turn(ref(1)) == b"{}"
        assert sum(x.num_turns for x in rig.engines.values()) == 1


@pytest.mark.parametrize("pieces", [(), (b": still at it\n\n",)])
async def test_an_answer_of_which_nothing_was_said_goes_on_elsewhere(pieces: tuple[bytes, ...]):
    async with Rig() as rig:
        for engine in rig.engines.values():
            engine.answer = Answered(200, {"content-type": "text/event-stream"}, b"data: x\n\n")
        first = rig.engines[rig.name(ref(1))]
        first.answer = Dying(first, *pieces)
        assert (await rig.turn(ref(1))).endswith(b"data: x\n\n")


async def test_a_broken_connection_is_enough_to_ask_elsewhere_and_to_avoid_the_replica():
    """Processes of a killed server may keep its sockets and its control connection for seconds."""
    async with Rig() as rig:
        name = rig.name(ref(1))
        rig.engines[name].fails_with = EngineUnavailable("the connection broke")
        assert await asyncio.wait_for(rig.turn(ref(1)), 1) == b"{}"
        assert rig.engines[name].ready and rig.engines[name].num_turns == 1
        assert not [i for i in range(100) if rig.name(ref(i)) == name]


async def test_a_client_whose_stream_broke_is_sent_elsewhere_when_it_asks_again():
    async with Rig() as rig:
        first = rig.engines[rig.name(ref(1))]
        first.answer = Dying(first, b"data: half\n\n", leaves_control=True)
        with pytest.raises(EngineUnavailable):
            await rig.turn(ref(1))
        assert first.ready
        assert await rig.turn(ref(1)) == b"{}"
        assert first.num_turns == 1


async def test_replicas_that_end_together_are_waited_for():
    """One breaks its connection and the other takes none, before the loss of either is noticed."""
    async with Rig(2) as rig:
        one = rig.engines[rig.name(ref(1))]
        (other,) = (x for x in rig.engines.values() if x is not one)
        one.fails_with, other.takes_no_connection = EngineUnavailable("it broke"), True
        turn = asyncio.create_task(rig.turn(ref(1)))
        await rig.settle()
        one.die()
        other.die()
        await rig.settle()
        assert not turn.done() and one.num_turns == 1
        one.fails_with, other.takes_no_connection = None, False
        one.begin()
        other.begin()
        assert await turn == b"{}"


async def test_a_second_replica_that_breaks_its_connection_is_avoided_too():
    async with Rig() as rig:
        first = rig.name(ref(1))
        rig.engines[first].fails_with = EngineUnavailable("it broke")
        second = rig.pool._choice.choose(ref(1), rig.engines[first].welcome).name
        rig.engines[second].fails_with = EngineUnavailable("it broke")
        with pytest.raises(EngineUnavailable):
            await rig.turn(ref(1), 0.1)
        (third,) = rig.engines.keys() - {first, second}
        assert {rig.name(ref(i)) for i in range(20)} == {third}


async def test_a_replica_that_is_only_silent_is_waited_for():
    async with Rig() as rig:
        name = rig.name(ref(1))
        rig.engines[name].fails_with = EngineStalled("silent")
        with pytest.raises(EngineStalled):
            await rig.turn(ref(1), 0.1)
        assert sum(x.num_turns for x in rig.engines.values()) == 1


async def test_a_deletion_reaches_all_and_those_that_are_away_when_they_are_back():
    async with Rig() as rig:
        rig.engines["1"].die()
        rig.engines["0"].held = {"s1": report(1, hot=False)}
        forgotten = await rig.pool.forget(ref(1))
        assert forgotten is not None and rig.engines["2"].forgotten == ["s1"]
        rig.engines["1"].held = {"s1": report(1, hot=False)}
        rig.engines["1"].begin()
        await rig.settle()
        assert rig.engines["1"].forgotten == ["s1"]
        assert await rig.pool.sessions() == []


async def test_one_tenants_deletions_leave_room_for_those_of_others():
    async with Rig(2) as rig:
        rig.engines["1"].die()
        for number in range(MAX_OWED_OF_TENANT):
            await rig.pool.forget(ref(number))
        with pytest.raises(EngineUnavailable, match="replica 1 is away"):
            await rig.pool.forget(ref(MAX_OWED_OF_TENANT))
        await rig.pool.forget(SessionRef("another", "s", b""))
        rig.engines["1"].begin()
        await eventually(lambda: len(rig.engines["1"].forgotten) > MAX_OWED_OF_TENANT)


async def test_a_session_is_listed_once_as_its_home_has_it():
    async with Rig() as rig:
        await rig.turn(ref(1))
        home = rig.name(ref(1))
        for name, engine in rig.engines.items():
            engine.held = {"s1": report(1, hot=name != home), "s2": report(2, hot=name == "2")}
        one, two = sorted(await rig.pool.sessions(), key=lambda x: x.id)
        assert (one.hot, two.hot) == (False, True)
        assert rig.name(ref(2)) == "2"  # the hot copy was the home's


async def test_notices_of_copies_that_were_left_behind_are_not_heard():
    async with Rig() as rig:
        await rig.turn(ref(1))
        home = rig.name(ref(1))
        other = next(x for name, x in rig.engines.items() if name != home)
        other.heard.put_nowait(Notice("lost", absent(ref(1))))
        rig.engines[home].heard.put_nowait(Notice("saved", report(1, hot=True)))
        await rig.settle()
        heard = []
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                async for notice in rig.pool.notices():
                    heard.append(notice)
        assert [x.cause for x in heard if x is not None] == ["saved"]


async def test_figures_are_added_up_and_counters_outlive_a_replica():
    async with Rig() as rig:
        for i in range(30):
            await rig.turn(ref(i))
        first = await rig.pool.stats()
        assert (first.hot_capacity_bytes, first.num_running) == (300, 3)
        assert first.tiers == [TierStats("ram", 21, 210, 3, 0, 0, True)]
        assert first.counters["turns"] == 30
        rig.engines["0"].die()
        assert (await rig.pool.stats()).counters["turns"] == 30
        rig.engines["0"].num_turns = 0
        rig.engines["0"].begin()
        await rig.turn(ref(31))
        assert (await rig.pool.stats()).counters["turns"] == 31
        rig.engines["1"].is_stopped = True
        async with asyncio.timeout(30):  # it is not waited for
            assert (await rig.pool.stats()).hot_bytes == 20


async def test_a_pool_is_ready_with_one_replica_and_its_account_holds_for_all():
    async with Rig() as rig:
        known = rig.pool.welcome
        assert known.max_context == 100
        rig.engines["0"].die()
        rig.engines["1"].die()
        assert rig.pool.ready and rig.pool.welcome is known  # nothing is to be listed anew
        rig.engines["0"].begin(max_context=50)
        await rig.settle()
        assert rig.pool.welcome.max_context == 50
        assert [x.ready for x in rig.pool.replicas] == [True, False, True]
        rig.engines["0"].die()
        rig.engines["2"].die()
        assert not rig.pool.ready and rig.pool.trouble
        with pytest.raises(EngineUnreached):
            rig.pool._choice.choose(ref(1))


async def test_an_engine_of_another_model_is_no_replica():
    async with Rig(2) as rig:
        rig.engines["1"].die()
        rig.engines["1"].begin(model="other")
        await rig.settle()
        assert {rig.name(ref(i)) for i in range(50)} == {"0"}
        assert "serves other" in rig.pool.replicas[1].trouble


async def test_the_replica_that_holds_most_is_ended_when_memory_is():
    async with Rig() as rig:
        rig.pool._replicas[1].hot_bytes = 100
        rig.pool.restart("memory")
        assert [x.restarts for x in rig.engines.values()] == [[], ["memory"], []]


async def test_a_choice_among_a_thousand_looks_at_a_few():
    class Counted(Engine):
        num_looks = 0

        @property
        def ready(self) -> bool:
            Counted.num_looks += 1
            return self.welcome is not None

    rig = Rig()
    engines = {f"http://10.0.0.{i}:9000": Counted() for i in range(1000)}
    for i, engine in enumerate(engines.values()):
        engine.welcome = WELCOME if i % 5 else None
    pool = ReplicaPool(engines, Homes(1000), clock=lambda: rig.now)
    for i in range(200):
        pool._choice.choose(ref(i))
    assert Counted.num_looks / 200 < 6  # three that take it, of which a fifth is away


def test_each_key_meets_all_replicas_of_a_ring_once_and_a_new_one_takes_only_its_own():
    names = [f"http://10.0.0.{i}:9000" for i in range(50)]
    ring, more = Ring(names), Ring([*names, "http://10.0.1.1:9000"])
    for i in range(200):
        assert sorted(ring.walk(str(i))) == list(range(50))
        first = next(more.walk(str(i)))
        assert first in (50, next(ring.walk(str(i))))


def test_homes_are_bounded_and_the_latest_stay():
    homes = Homes(2)
    for i, name in enumerate("abcd"):
        homes.put(ref((1, 2, 1, 3)[i]), name)
    assert [homes.get(ref(i)) for i in (1, 2, 3)] == ["c", None, "d"]
    homes.drop(ref(3))
    assert homes.get(ref(3)) is None
