"""SessionManager against an engine that holds rows instead of KV."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineUnavailable, Notice, SessionRef
from scheduler.config import SchedulerConfig
from scheduler.session import State
from scheduler.sessions import SessionManager

from .conftest import Clock, Held, Log, RowsEngine, salt_of


async def test_a_turn_is_active_then_idle(manager, ref, talk):
    async with manager.turn(ref("a")) as turn:
        turn.engine_answered("miss; tokens=0; reason=never-stored")
        assert manager.get(ref("a")).state == "active"
    assert manager.get(ref("a")).state == "idle"


async def test_a_quiet_session_hibernates_and_the_next_turn_wakes_it(
    manager, engine, clock, ref, talk, log
):
    await talk(manager, ref("a"))
    clock.now += 61
    await manager.sweep()
    view = manager.get(ref("a"))
    assert (view.state, view.tier, view.bytes) == ("cold", "ram", 20)
    async with manager.turn(ref("a")) as turn:
        assert manager.get(ref("a")).state == "waking"
        turn.engine_answered("cold-ram; tokens=990")
        assert manager.get(ref("a")).state == "active"
    assert log.decisions == ["hibernate-idle"]
    assert [x[2] for x in log.transitions] == [
        "quiet", "hibernate", "evicted", "turn", "restored", "quiet",
    ]  # fmt: skip


async def test_pressure_takes_the_least_valuable_down_to_low_water(
    manager, engine, clock, ref, talk
):
    for i in range(9):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    await manager.sweep()  # 900 of 1000 bytes: over 850, down to 650
    states = [manager.get(ref(f"s{i}")).state for i in range(9)]
    assert states == ["cold"] * 3 + ["idle"] * 6


async def test_below_high_water_nobody_is_disturbed(manager, engine, ref, talk):
    for i in range(8):
        await talk(manager, ref(f"s{i}"))
    await manager.sweep()
    assert engine.demoted == []


async def test_pinned_sessions_stay_hot(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    assert (await manager.pin(ref("a"), True)).pinned
    clock.now += 1e6
    await manager.sweep()
    assert manager.get(ref("a")).state == "idle"
    await manager.pin(ref("a"), False)
    await manager.sweep()
    assert manager.get(ref("a")).state == "cold"


async def test_a_turn_during_hibernation_keeps_the_session_going(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    engine.gate = asyncio.Event()
    job = asyncio.create_task(manager.demote(ref("a")))
    await asyncio.sleep(0)
    assert manager.get(ref("a")).state == "hibernating"
    async with manager.turn(ref("a")) as turn:
        engine.gate.set()
        await job
        assert manager.get(ref("a")).state == "active"
        turn.engine_answered("cold-ram; tokens=990")
    assert manager.get(ref("a")).state == "idle"


async def test_concurrent_turns_of_one_session_are_quiet_only_together(manager, ref):
    async with manager.turn(ref("a")) as first:
        first.engine_answered("miss")
        async with manager.turn(ref("a")) as second:
            second.engine_answered("hot; tokens=5")
        assert manager.get(ref("a")).state == "active"
    assert manager.get(ref("a")).state == "idle"


async def test_a_turn_that_dies_before_the_engine_answered_leaves_no_waking_row(
    manager, engine, clock, ref, talk
):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    with pytest.raises(EngineUnavailable):
        async with manager.turn(ref("a")):
            raise EngineUnavailable("gone")
    assert manager.get(ref("a")).state == "idle"


async def test_a_session_the_engine_will_not_let_go_is_not_asked_every_second(
    manager, engine, clock, ref, talk
):
    await talk(manager, ref("a"))
    engine.kept = "no-cold-copy"
    clock.now += 61
    for _ in range(10):
        await manager.sweep()
        clock.now += 1
    assert engine.demoted == ["a"]
    clock.now += 15
    await manager.sweep()
    assert engine.demoted == ["a", "a"]


async def test_prefetch_wakes_without_a_turn(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    assert (await manager.prefetch(ref("a"))).state == "idle"
    assert engine.held["alice", "a"].hot


async def test_a_turn_joins_a_prefetch(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    engine.gate = asyncio.Event()
    job = asyncio.create_task(manager.prefetch(ref("a")))
    await asyncio.sleep(0)
    async with manager.turn(ref("a")) as turn:
        assert manager.get(ref("a")).state == "waking"
        turn.engine_answered("cold-ram; tokens=9")
        engine.gate.set()
        await job
        assert manager.get(ref("a")).state == "active"
    assert manager.get(ref("a")).state == "idle"


async def test_forget_removes_now_and_again_after_the_running_turn(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    async with manager.turn(ref("a")) as turn:
        turn.engine_answered("hot; tokens=9")
        assert await manager.forget(ref("a"))
        assert manager.get(ref("a")) is None
        engine.held["alice", "a"] = Held()  # the turn's own save
    assert engine.held == {}
    assert manager.list("alice") == []
    assert not await manager.forget(ref("a"))


async def test_tenants_see_their_own_sessions_only(manager, ref, talk):
    await talk(manager, ref("x", "alice"))
    await talk(manager, ref("x", "bob"))
    await manager.forget(ref("x", "bob"))
    assert [x.id for x in manager.list("alice")] == ["x"]
    assert manager.list("bob") == []


async def test_a_restarted_gateway_adopts_what_the_engine_holds(manager, engine, ref):
    engine.held["alice", "hot"] = Held()
    engine.held["alice", "cold"] = Held(hot=False, tier="disk")
    await manager._adopt_all()
    assert {x.id: x.state for x in manager.list("alice")} == {"hot": "idle", "cold": "cold"}


async def test_a_restarted_engine_takes_hot_sessions_with_it(manager, engine, ref, talk):
    for name in ("saved", "unsaved"):
        await talk(manager, ref(name))
    engine.held = {("alice", "saved"): Held(hot=False, tier="disk")}
    await manager._adopt_all()
    assert {x.id: x.state for x in manager.list("alice")} == {"saved": "cold"}


async def test_an_engine_that_evicts_on_its_own_is_believed(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    dropped = Held(hot=False).report("alice", "a")
    manager._notice(Notice(cause="dropped", session=dropped))
    assert manager.get(ref("a")).state == "cold"


async def test_the_loop_survives_an_engine_that_is_away(manager_with, engine, clock, ref, talk):
    manager = manager_with(idle_after_s=1.0, sweep_every_s=0.01)
    await talk(manager, ref("a"))
    clock.now += 5
    engine.down = True
    loop = asyncio.create_task(manager.run())
    await asyncio.sleep(0.1)
    assert manager.get(ref("a")).state == "idle"
    engine.down = False
    async with asyncio.timeout(2):
        while manager.get(ref("a")).state != "cold":
            await asyncio.sleep(0.01)
    loop.cancel()
    with suppress(asyncio.CancelledError):
        await loop


async def test_settled_once_the_engine_that_is_there_was_asked(manager, engine, ref):
    assert not manager.settled
    engine.held[("alice", "old")] = Held()
    async with asyncio.timeout(10):
        loop = asyncio.create_task(manager.run())
        engine.queue.put_nowait(None)
        while not manager.settled:
            await asyncio.sleep(0.01)
        assert manager.get(ref("old")) is not None
        engine.welcome = msgspec.structs.replace(engine.welcome)  # another process
        assert not manager.settled
        engine.queue.put_nowait(None)
        while not manager.settled:
            await asyncio.sleep(0.01)
    loop.cancel()
    with suppress(asyncio.CancelledError):
        await loop


async def test_without_hibernation_nobody_sleeps(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    engine.welcome = None
    clock.now += 1e6
    await manager.sweep()
    assert engine.demoted == []


async def test_the_table_is_bounded_and_drops_the_longest_idle_row(manager_with, clock, ref, talk):
    manager = manager_with(max_sessions=3)
    for i in range(5):
        await talk(manager, ref(f"s{i}"))
        await manager.demote(ref(f"s{i}"))
        clock.now += 1
    assert [x.id for x in manager.list("alice")] == ["s4", "s3", "s2"]


def test_low_water_must_be_below_high_water():
    with pytest.raises(ValueError, match=r"scheduler\.low_water"):
        SchedulerConfig(low_water=0.9, high_water=0.8)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["turn", "sweep", "demote", "prefetch", "forget", "pin", "evict", "lose", "adopt"]
        ),
        st.integers(0, 3),
        st.integers(0, 100),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_any_history_ends_in_a_table_that_agrees_with_itself(steps):
    asyncio.run(_live_through(steps))


async def _live_through(steps) -> None:
    engine, clock = RowsEngine(), Clock()
    manager = SessionManager(
        engine, SchedulerConfig(idle_after_s=60.0), salt_of=salt_of, clock=clock, observer=Log()
    )
    running: list[asyncio.Task[None]] = []

    async def turn(ref: SessionRef) -> None:
        async with manager.turn(ref) as running_turn:
            await asyncio.sleep(0)
            running_turn.engine_answered("cold-ram; tokens=1")
            await asyncio.sleep(0)
            engine.held[ref.tenant, ref.id] = Held()

    for step, number, seconds in steps:
        clock.now += seconds
        ref = SessionRef(tenant="alice", id=f"s{number}", salt=salt_of("alice"))
        held = engine.held.get(("alice", ref.id))
        if step == "turn":
            running.append(asyncio.create_task(turn(ref)))
            await asyncio.sleep(0)
        elif step in ("demote", "prefetch", "forget"):
            await getattr(manager, step)(ref)
        elif step == "pin":
            await manager.pin(ref, seconds % 2 == 0)
        elif step == "sweep":
            await manager.sweep()
        elif step == "adopt":
            await manager._adopt_all()
        elif held and step == "evict":
            held.hot = False
            manager._notice(Notice(cause="dropped", session=held.report("alice", ref.id)))
        elif step == "lose":
            engine.held.pop(("alice", ref.id), None)
    await asyncio.gather(*running)
    await manager._adopt_all()
    for session in manager._table.values():
        assert session.num_turns == 0
        assert session.state in (State.IDLE, State.COLD)
        assert engine.held[session.ref.tenant, session.ref.id].hot == (session.state is State.IDLE)
    assert {x.id for x in manager.list("alice")} == {id for _, id in engine.held}
