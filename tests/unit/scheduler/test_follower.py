"""The engine's reports go into the table, and it is asked until it has listed everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from engines.base import CacheOutcome, EngineRefused, Notice
from scheduler.config import SchedulerConfig
from scheduler.follower import Follower
from scheduler.sessions import SessionManager
from scheduler.table import LATE_REPORT_S

from .conftest import Held, RowsEngine, salt_of


@asynccontextmanager
async def running(job):
    """Run ``job`` during the block, for 30 s at most: more than a busy machine needs."""
    task = asyncio.create_task(job)
    try:
        async with asyncio.timeout(30):
            yield
    finally:
        task.cancel()
        await asyncio.wait([task])


class Mute(RowsEngine):
    """Lists nothing as long as it is mute."""

    mute = True
    num_asked = 0

    async def sessions(self):
        self.num_asked += 1
        if self.mute:
            raise EngineRefused("not now")
        return await super().sessions()


@pytest.fixture
def engine(request) -> RowsEngine:
    return Mute() if "mute" in request.node.name else RowsEngine()


async def test_a_restarted_gateway_adopts_the_sessions_of_its_engine(manager, engine, ref):
    engine.held["alice", "hot"] = Held()
    engine.held["alice", "cold"] = Held(hot=False, tier="disk")
    await manager.follower.ask()
    assert {x.id: x.state for x in manager.list("alice")} == {"hot": "idle", "cold": "cold"}


async def test_a_restarted_engine_takes_hot_sessions_with_it(manager, engine, ref, talk):
    for name in ("saved", "unsaved"):
        await talk(manager, ref(name))
    engine.held = {("alice", "saved"): Held(hot=False, tier="disk")}
    await manager.follower.ask()
    assert {x.id: x.state for x in manager.list("alice")} == {"saved": "cold"}


async def test_settled_once_the_engine_that_is_there_was_asked(manager, engine, ref):
    assert not manager.settled
    engine.held["alice", "old"] = Held()
    engine.queue.put_nowait(None)
    async with running(manager.run()):
        while not manager.settled:
            await asyncio.sleep(0.001)
        assert manager.get(ref("old")) is not None
        engine.welcome = msgspec.structs.replace(engine.welcome)  # another process
        assert not manager.settled
        engine.queue.put_nowait(None)
        while not manager.settled:
            await asyncio.sleep(0.001)


async def test_a_mute_engine_is_asked_again_until_it_lists_its_sessions(manager, engine, clock):
    engine.held["alice", "old"] = Held()
    follower = Follower(
        engine,
        manager.table,
        salt_of=salt_of,
        clock=clock,
        hurry=lambda: None,
        ask_again_first_s=0.001,
    )
    engine.queue.put_nowait(None)
    async with running(follower.run()):
        while engine.num_asked < 3:
            await asyncio.sleep(0.001)
        assert not follower.settled
        engine.mute = False
        while not follower.settled:
            await asyncio.sleep(0.001)
    assert manager.table.row("alice", "old") is not None


async def test_notices_are_heard_while_a_mute_engine_is_asked_again(manager, engine, ref):
    engine.queue.put_nowait(None)
    engine.queue.put_nowait(Notice(cause="saved", session=Held().report("alice", "new")))
    async with running(manager.follower.run()):
        while manager.get(ref("new")) is None:
            await asyncio.sleep(0.001)
    assert not manager.settled


async def test_a_session_younger_than_the_question_is_not_taken_for_lost(
    manager, engine, clock, ref, talk
):
    class Slow(RowsEngine):
        async def sessions(self):
            listed = await super().sessions()
            clock.now += 1
            await talk(manager, ref("young"))
            return listed

    await talk(manager, ref("old"))
    follower = Follower(Slow(), manager.table, salt_of=salt_of, clock=clock, hurry=lambda: None)
    await follower.ask()
    assert [x.id for x in manager.list("alice")] == ["young"]


@pytest.mark.parametrize(("cause", "state"), [("restored", "idle"), ("saved", "cold")])
async def test_the_engine_may_wake_a_session_but_an_older_save_does_not(
    manager, ref, talk, cause, state
):
    """A turn whose client left restores the KV; a save may have been of the session still hot."""
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    report = Held(tokens=1234).report("alice", "a")
    manager.follower.receive(Notice(cause=cause, session=report))
    view = manager.get(ref("a"))
    assert (view.state, view.tokens) == (state, 1234)


async def test_a_list_of_thousands_leaves_turns_their_share_of_the_loop(manager, engine, ref):
    engine.held = {("alice", f"s{i}"): Held(hot=False) for i in range(3000)}
    asking = asyncio.create_task(manager.follower.ask())
    num_turns = 0
    while not asking.done():
        async with manager.turn(ref(f"t{num_turns}")):
            await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= 3
    assert len(manager.table) == 3000


async def test_a_late_report_does_not_bring_a_forgotten_session_back(
    manager, engine, clock, ref, talk
):
    await talk(manager, ref("a"))
    late = Notice("saved", engine.held[("alice", "a")].report("alice", "a"))
    gone = Notice("lost", Held(hot=False, tier=None).report("alice", "a"))
    engine.forget_gate = asyncio.Event()
    forgetting = asyncio.create_task(manager.forget(ref("a")))
    await asyncio.sleep(0)
    manager.follower.receive(gone)  # the engine's own news may come before its answer
    manager.follower.receive(late)
    clock.now += LATE_REPORT_S  # it takes the engine long
    engine.forget_gate.set()
    assert await forgetting
    assert manager.get(ref("a")) is None
    manager.follower.receive(late)
    assert manager.get(ref("a")) is None
    clock.now += 60
    manager.follower.receive(late)  # by now another client has brought it
    assert manager.get(ref("a")) is not None


class Overtaken(RowsEngine):
    """Something happens between the writing of its list and the reading."""

    meanwhile: Callable[[], Awaitable[None]]

    async def sessions(self):
        written = await super().sessions()
        await self.meanwhile()
        return written


async def test_a_list_written_before_a_turn_changes_nothing_of_it(clock, ref):
    engine = Overtaken()
    engine.held["alice", "a"] = Held(hot=False)
    manager = SessionManager(engine, SchedulerConfig(), salt_of=salt_of, clock=clock)
    manager.follower.receive(Notice("saved", engine.held["alice", "a"].report("alice", "a")))
    assert manager.get(ref("a")).state == "cold"

    async def one_turn() -> None:
        clock.now += 1
        async with manager.turn(ref("a")) as turn:
            turn.engine_answered(CacheOutcome("cold-ram", 990))

    engine.meanwhile = one_turn
    await manager.follower.ask()
    assert manager.get(ref("a")).state == "idle"


async def test_a_list_written_before_a_notice_changes_nothing_of_it(clock, ref):
    engine = Overtaken()
    engine.held["alice", "a"] = Held(tier=None)
    manager = SessionManager(engine, SchedulerConfig(), salt_of=salt_of, clock=clock)
    manager.follower.receive(Notice("turn", engine.held["alice", "a"].report("alice", "a")))

    async def saved() -> None:
        clock.now += 1
        manager.follower.receive(Notice("saved", Held().report("alice", "a")))

    engine.meanwhile = saved
    await manager.follower.ask()
    assert manager.get(ref("a")).tier == "ram"
