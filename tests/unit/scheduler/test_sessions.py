"""SessionManager against an engine that holds rows instead of KV."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.base import CacheOutcome, EngineUnavailable, KVSize, Notice, SessionRef
from engines.wire import absent
from scheduler import moves
from scheduler.config import SchedulerConfig
from scheduler.moves import KEPT_RETRY_S
from scheduler.session import State
from scheduler.sessions import SessionKept, SessionManager
from tests.clock import Clock
from tests.waiting import eventually

from .conftest import Held, Log, RowsEngine, salt_of


async def test_a_quiet_session_hibernates_and_the_next_turn_wakes_it(
    manager, engine, clock, ref, talk, log
):
    await talk(manager, ref("a"))
    clock.now += 61
    await manager.sweeps.sweep()
    view = manager.get(ref("a"))
    assert (view.state, view.tier, view.bytes) == ("cold", "ram", 20)
    async with manager.turn(ref("a")) as turn:
        assert manager.get(ref("a")).state == "waking"
        turn.engine_answered(CacheOutcome("cold-ram", 990))
        assert manager.get(ref("a")).state == "active"
    assert log.decisions == ["hibernate-idle"]
    assert [x[2] for x in log.transitions] == [
        "quiet", "hibernate", "evicted", "turn", "restored", "quiet",
    ]  # fmt: skip


async def test_a_turn_during_hibernation_keeps_the_session_going(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    engine.gate = asyncio.Event()
    job = asyncio.create_task(manager.demote(ref("a")))
    await asyncio.sleep(0)
    assert manager.get(ref("a")).state == "hibernating"
    async with manager.turn(ref("a")) as turn:
        engine.gate.set()
        with pytest.raises(SessionKept, match="busy"):
            await job
        assert manager.get(ref("a")).state == "active"
        turn.engine_answered(CacheOutcome("cold-ram", 990))
    assert manager.get(ref("a")).state == "idle"


@pytest.mark.parametrize("reason", ["pinned", "no-cold-copy", "disabled"])
async def test_a_session_that_the_engine_keeps_is_no_success(manager, engine, ref, talk, reason):
    await talk(manager, ref("a"))
    before = manager.get(ref("a"))
    engine.kept = reason
    with pytest.raises(SessionKept, match=reason):
        await manager.demote(ref("a"))
    assert manager.get(ref("a")) == before


@pytest.fixture
async def saving(manager, engine, ref, talk, monkeypatch) -> SessionManager:
    """The session ``a`` was to sleep while the engine was saving it."""
    monkeypatch.setattr(moves, "SAVING_LOOK_S", 0.01)
    await talk(manager, ref("a"))
    engine.kept = "saving"
    assert (await manager.demote(ref("a"))).state == "saving"
    assert manager.get(ref("a")).state == "saving"
    return manager


@pytest.mark.parametrize(
    ("asked_again", "then", "ends"),
    [
        (None, None, ("cold", "ram")),
        ("disk", None, ("cold", "disk")),
        (None, "no-cold-copy", ("idle", "ram")),
    ],
)
async def test_a_session_that_is_being_saved_sleeps_as_soon_as_it_is(
    saving, engine, ref, asked_again, then, ends
):
    """Or it is idle again, where it could not be saved; another tier may be asked for."""
    if asked_again:
        assert (await saving.demote(ref("a"), asked_again)).state == "saving"
    assert (await saving.demote(ref("b"))) is None
    engine.kept = then
    await eventually(lambda: (saving.get(ref("a")).state, saving.get(ref("a")).tier) == ends, 5)


async def test_a_turn_keeps_a_session_awake_that_was_to_sleep_when_saved(saving, engine, ref, talk):
    await talk(saving, ref("a"))
    engine.kept = None
    await asyncio.sleep(0.1)
    assert saving.get(ref("a")).state == "idle"


async def test_a_busy_session_is_not_put_to_sleep_and_it_is_said(manager, engine, ref, talk):
    async with manager.turn(ref("a")):
        with pytest.raises(SessionKept, match="busy"):
            await manager.demote(ref("a"))
    assert engine.demoted == []


async def test_a_tier_that_does_not_take_the_session_is_no_success(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    assert (await manager.demote(ref("a"))).state == "cold"  # as it was to be
    engine.kept = "pinned"
    with pytest.raises(SessionKept, match="pinned"):
        await manager.demote(ref("a"), "disk")
    assert manager.get(ref("a")).tier == "ram"


async def test_concurrent_turns_of_one_session_are_quiet_only_together(manager, ref):
    async with manager.turn(ref("a")) as first:
        first.engine_answered(CacheOutcome("miss", 0))
        async with manager.turn(ref("a")) as second:
            second.engine_answered(CacheOutcome("hot", 5))
        assert manager.get(ref("a")).state == "active"
    assert manager.get(ref("a")).state == "idle"


async def test_neither_a_turn_nor_a_prefetch_that_the_engine_never_took_changes_anything(
    manager, engine, ref, talk
):
    await talk(manager, ref("a"))
    cold = await manager.demote(ref("a"))
    with pytest.raises(EngineUnavailable):
        async with manager.turn(ref("a")):
            raise EngineUnavailable("gone")
    assert manager.get(ref("a")) == cold
    assert (cold.state, cold.bytes) == ("cold", 20)
    engine.down = True
    with pytest.raises(EngineUnavailable):
        await manager.prefetch(ref("a"))
    assert manager.get(ref("a")) == cold


async def test_of_two_turns_the_refused_one_leaves_the_other_waking(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    async with manager.turn(ref("a")) as turn:
        with suppress(EngineUnavailable):
            async with manager.turn(ref("a")):
                raise EngineUnavailable("it is full")
        assert manager.get(ref("a")).state == "waking"
        turn.engine_answered(CacheOutcome("cold-ram", 9))
    assert manager.get(ref("a")).state == "idle"


@pytest.mark.parametrize(
    ("wakes", "ends"),
    [(True, ("woken", "idle")), (False, ("kept", "cold"))],  # as vLLM: for a running request only
)
async def test_a_prefetch_wakes_without_a_turn_where_the_engine_does(
    manager, engine, ref, talk, log, wakes, ends
):
    await talk(manager, ref("a"))
    cold = await manager.demote(ref("a"))
    log.transitions.clear()
    engine.wakes = wakes
    found = await manager.prefetch(ref("a"))
    assert found.state == "idle" if wakes else found == cold
    assert engine.held["alice", "a"].hot == wakes
    assert [x[1:] for x in log.transitions] == [("cold", "wake", "waking"), ("waking", *ends)]
    await manager.demote(ref("a"))
    del engine.held["alice", "a"]
    assert await manager.prefetch(ref("a")) is None


async def test_a_prefetch_of_a_row_that_made_room_does_nothing(manager, engine, ref, talk):
    for id in "ab":
        await talk(manager, ref(id))
        await manager.demote(ref(id))
    engine.gate = asyncio.Event()
    jobs = [asyncio.create_task(manager.prefetch(ref(id))) for id in "ab"]
    await asyncio.sleep(0)  # the second waits for the first
    dropped = manager.table.row("alice", "b")
    manager.table._drop(dropped)
    async with manager.turn(ref("b")):
        engine.gate.set()
        await asyncio.gather(*jobs)
        assert manager.table.row("alice", "b").num_turns == 1
    assert manager.table.row("alice", "b") is None or not manager.table.row("alice", "b").num_turns


async def test_a_turn_joins_a_prefetch(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    engine.gate = asyncio.Event()
    job = asyncio.create_task(manager.prefetch(ref("a")))
    await asyncio.sleep(0)
    async with manager.turn(ref("a")) as turn:
        assert manager.get(ref("a")).state == "waking"
        turn.engine_answered(CacheOutcome("cold-ram", 9))
        engine.gate.set()
        await job
        assert manager.get(ref("a")).state == "active"
    assert manager.get(ref("a")).state == "idle"


async def test_forget_removes_now_and_again_after_the_running_turn(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    async with manager.turn(ref("a")) as turn:
        turn.engine_answered(CacheOutcome("hot", 9))
        assert await manager.forget(ref("a"))
        assert manager.get(ref("a")) is None
        engine.held["alice", "a"] = Held()  # the turn's own save
    assert manager.list("alice") == []
    assert not await manager.forget(ref("a"))
    await manager.sweeps.sweep()
    assert engine.held == {}
    assert len(manager.table) == 0


async def test_the_turn_of_a_forgotten_session_waits_for_no_engine(
    manager, engine, clock, ref, talk
):
    """It has been answered: a removal that is still to come delays no client, and fails none."""
    await talk(manager, ref("a"))
    async with manager.turn(ref("a")):
        assert await manager.forget(ref("a"))
        engine.held["alice", "a"] = Held()
        engine.down = True
    await manager.sweeps.sweep()  # the engine says no
    assert manager.get(ref("a")) is None
    engine.down = False
    await manager.sweeps.sweep()  # not yet again
    assert engine.held != {}
    clock.now += KEPT_RETRY_S
    await manager.sweeps.sweep()
    assert engine.held == {}
    await talk(manager, ref("a"))
    assert manager.get(ref("a")).state == "idle"


async def test_a_session_can_be_forgotten_while_it_falls_asleep(manager, engine, ref, talk):
    await talk(manager, ref("a"))
    engine.gate = asyncio.Event()
    job = asyncio.create_task(manager.demote(ref("a")))
    await asyncio.sleep(0)
    assert await manager.forget(ref("a"))
    assert manager.get(ref("a")) is None
    engine.gate.set()
    assert await job is None
    assert len(manager.table) == 0


async def test_tenants_see_their_own_sessions_only(manager, ref, talk):
    await talk(manager, ref("x", "alice"))
    await talk(manager, ref("x", "bob"))
    await manager.forget(ref("x", "bob"))
    assert [x.id for x in manager.list("alice")] == ["x"]
    assert manager.list("bob") == []


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


@given(STEPS)
@example([("turn", 0, 0), ("turn", 1, 0), ("forget", 0, 0), ("turn", 0, 0), ("sweep", 0, 0)])
@example([("turn", 0, 0), ("turn", 1, 0), ("forget", 0, 0), ("turn", 0, 0), ("turn", 1, 1)])
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
            running_turn.engine_answered(CacheOutcome("cold-ram", 1))
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
            with suppress(SessionKept):
                await getattr(manager, step)(ref)
        elif step == "pin":
            await manager.pin(ref, seconds % 2 == 0)
        elif step == "sweep":
            await manager.sweeps.sweep()
        elif step == "adopt":
            await manager.follower.ask()
        elif held and step == "evict":
            held.hot = False
            manager.follower.receive(Notice(cause="dropped", session=held.report("alice", ref.id)))
        elif step == "lose":
            engine.held.pop(("alice", ref.id), None)
    await asyncio.gather(*running)
    clock.now += KEPT_RETRY_S
    await manager.sweeps.sweep()  # removes the session that was forgotten in mid-turn
    await manager.follower.ask()
    for session in manager.table:
        assert session.num_turns == 0
        assert session.state in (State.IDLE, State.COLD)
        assert engine.held[session.ref.tenant, session.ref.id].hot == (session.state is State.IDLE)
    assert {x.id for x in manager.list("alice")} == {id for _, id in engine.held}


async def test_the_observer_hears_which_place_a_session_left_and_why(
    manager, engine, clock, ref, talk, log
):
    """Quiet for long, by hand, by the engine, by a tier's budget, and for good."""
    for name in ("quiet", "asked", "dropped", "lapsed"):
        await talk(manager, ref(name))
        clock.now += 1
    await manager.demote(ref("asked"))
    engine.held[("alice", "dropped")].hot = False
    manager.follower.receive(Notice("dropped", engine.report(ref("dropped"))))
    engine.held[("alice", "dropped")].tier = "disk"
    manager.follower.receive(Notice("moved", engine.report(ref("dropped")), "budget"))
    assert manager.get(ref("dropped")).tier == "disk"
    await manager.demote(ref("lapsed"))
    manager.follower.receive(Notice("lost", absent(ref("lapsed")), "expired"))
    clock.now += 59
    await manager.sweeps.sweep()
    await manager.forget(ref("asked"))
    assert log.departures == [
        ("asked", "hot", "asked"),
        ("dropped", "hot", "engine"),
        ("dropped", "ram", "budget"),
        ("lapsed", "hot", "asked"),
        ("lapsed", "ram", "expired"),
        ("quiet", "hot", "idle"),
        ("asked", "ram", "forgotten"),
    ]


async def test_what_lay_in_an_engines_memory_is_away_while_the_engine_is(
    manager, engine, ref, talk
):
    for id in ("hot", "ram", "disk"):
        await talk(manager, ref(id))
    await manager.demote(ref("ram"))
    await manager.demote(ref("disk"), "disk")
    welcome, engine.welcome = engine.welcome, None
    seen = {x.id: (x.state, x.tier) for x in manager.list("alice")}
    assert seen == {"hot": ("away", None), "ram": ("away", None), "disk": ("cold", "disk")}
    engine.welcome = welcome
    assert {x.id: x.state for x in manager.list("alice")} == {
        "hot": "idle",
        "ram": "cold",
        "disk": "cold",
    }


async def test_tokens_and_bytes_grow_with_a_turn_until_the_engine_says_them(
    manager, engine, ref, talk
):
    engine.welcome = msgspec.structs.replace(engine.welcome, live_kv=KVSize(per_token=10))
    async with manager.turn(ref("a")) as turn:
        turn.engine_answered(CacheOutcome("miss", 0))
        turn.used(50)
    assert manager.get(ref("a")).bytes == 500
    async with manager.turn(ref("a")) as turn:
        turn.engine_answered(CacheOutcome("hot", 50))
        turn.used(70)
        turn.used(60)  # a shorter prompt: the tokens that the engine still has are not known
    view = manager.get(ref("a"))
    assert (view.tokens, view.bytes) == (70, 700)
    report = Held(tokens=64, hot_bytes=650).report("alice", "a")
    manager.follower.receive(Notice("saved", report))
    assert manager.get(ref("a")).bytes == 650
