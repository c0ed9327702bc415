"""Who is put to sleep when, and that no urgent work waits for other work."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from scheduler.config import SchedulerConfig
from scheduler.headroom import LOOK_EVERY_S, Headroom
from scheduler.moves import Moves
from scheduler.session import Session, State
from scheduler.sweeps import (
    MAX_WEIGHED,
    Sweeps,
    bytes_over,
    leaving_memory,
    long_idle,
    value,
    victims,
    wake_seconds,
)
from scheduler.table import SessionTable
from tests.unit.scheduler.test_follower import running
from tests.unit.scheduler.test_session import new_session

NUMBERS = count()


def idle(name: str, **facts) -> Session:
    usual = {"state": State.IDLE, "tokens": 1000, "hot_bytes": 100, "tier": "ram"}
    return new_session(id=name, number=next(NUMBERS), **usual | facts)


async def steps() -> None:
    """Let other tasks go on for a few steps."""
    for _ in range(10):
        await asyncio.sleep(0)


def names(sessions) -> list[str]:
    return [x.ref.id for x in sessions]


def test_long_idle_spares_pinned_and_busy():
    rows = [
        idle("pinned", last_used=0.0, pinned=True),
        idle("busy", last_used=0.0, state=State.ACTIVE),
        idle("refused", last_used=0.0, keep_until=200.0),
        idle("older", last_used=5.0),
        idle("old", last_used=10.0),
        idle("young", last_used=95.0),
    ]
    assert names(long_idle(rows, 100.0, 60.0)) == ["older", "old"]


def test_victims_stop_when_enough_is_freed():
    rows = [idle(f"s{i}", last_used=float(i)) for i in range(5)]
    assert names(victims(rows, 150, 100.0, 60.0)) == ["s0", "s1"]
    assert victims(rows, 0, 100.0, 60.0) == []
    assert victims([idle("p", pinned=True)], 1 << 40, 1e9, 1.0) == []


def test_those_go_first_that_cost_least_to_wake():
    rows = [idle(str(tier), tier=tier) for tier in (None, "redis", "disk", "ram")]
    assert names(victims(rows, 400, 100.0, 600.0)) == ["ram", "disk", "redis", "None"]
    assert wake_seconds(idle("s", tokens=8000)) > 8 * wake_seconds(idle("s", tokens=1000))


def test_long_silence_outweighs_everything():
    rows = [idle("unsaved", tier=None, last_used=0.0), idle("saved", last_used=9999.0)]
    assert names(victims(rows, 100, 10000.0, 600.0)) == ["unsaved"]


def test_value_halves_per_half_life():
    session = idle("s")
    assert value(session, 600.0, 600.0) == pytest.approx(value(session, 0.0, 600.0) / 2)


@pytest.mark.parametrize(("hot", "over"), [(0, 0), (850, 0), (851, 201), (1000, 350), (2000, 1350)])
def test_bytes_over_goes_from_high_water_down_to_low_water(hot, over):
    assert bytes_over(hot, 1000, 0.85, 0.65) == over


def test_tasks_go_first_then_children_and_who_is_to_be_kept_goes_late():
    rows = [
        idle("parent", last_used=0.0, num_children=1),
        idle("kept", last_used=0.0, retain_until=500.0),
        idle("main", last_used=50.0),
        idle("child", last_used=99.0, is_child=True),
        idle("task", last_used=99.0, is_child=True, is_task=True),
        idle("was kept", last_used=10.0, retain_until=99.0),
    ]
    order = ["task", "child", "was kept", "main", "kept", "parent"]
    assert names(victims(rows, 600, 100.0, 60.0)) == order
    rows.sort(key=lambda x: x.last_used)
    assert names(long_idle(rows, 100.0, 30.0)) == ["was kept", "main"]
    everything = names(leaving_memory(rows, 10**9, 100.0))
    assert everything[:2] == ["task", "child"]
    assert everything[-2:] == ["kept", "parent"]


def test_a_session_to_be_kept_never_outlasts_a_budget():
    rows = [idle("kept", retain_until=500.0), idle("parent", num_children=2)]
    assert names(victims(rows, 200, 100.0, 60.0)) == ["kept", "parent"]


def test_of_very_many_sessions_only_the_longest_quiet_are_ranked():
    rows = [idle(f"s{i}", last_used=float(i)) for i in range(MAX_WEIGHED)]
    rows.append(idle("child", last_used=float(MAX_WEIGHED), is_child=True))
    chosen = names(leaving_memory(rows, 10**9, 10_000.0))
    assert (chosen[0], chosen[-1], len(chosen)) == ("s0", "child", MAX_WEIGHED + 1)


def test_a_wish_reaches_as_far_as_the_tenants_share():
    greedy = [
        idle(f"g{i}", tenant="greedy", last_used=float(i), retain_until=500.0) for i in range(6)
    ]
    modest = [idle(f"m{i}", tenant="modest", last_used=50.0 + i) for i in range(2)]
    order = names(victims([*modest, *greedy], 800, 100.0, 60.0))
    # Of 800 bytes 400 are greedy's share: the two longest unused of its six have no wish left.
    assert order == ["g0", "g1", "m0", "m1", "g2", "g3", "g4", "g5"]
    alone = names(victims([*greedy, idle("other", last_used=99.0, tenant="greedy")], 700, 100, 60))
    assert alone == ["other", "g0", "g1", "g2", "g3", "g4", "g5"]


async def test_pressure_takes_the_least_valuable_down_to_low_water(
    manager, engine, clock, ref, talk, log
):
    for i in range(9):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    await manager.sweeps.sweep()  # 900 of 1000 bytes: over 850, down to 650
    states = [manager.get(ref(f"s{i}")).state for i in range(9)]
    assert states == ["cold"] * 3 + ["idle"] * 6
    assert log.departures == [(f"s{i}", "hot", "pressure") for i in range(3)]


async def test_pinned_sessions_stay_hot(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    assert (await manager.pin(ref("a"), True)).pinned
    clock.now += 1e6
    await manager.sweeps.sweep()
    assert manager.get(ref("a")).state == "idle"
    await manager.pin(ref("a"), False)
    await manager.sweeps.sweep()
    assert manager.get(ref("a")).state == "cold"


async def test_a_session_the_engine_will_not_let_go_is_not_asked_every_second(
    manager, engine, clock, ref, talk
):
    await talk(manager, ref("a"))
    engine.kept = "no-cold-copy"
    clock.now += 61
    for _ in range(10):
        await manager.sweeps.sweep()
        clock.now += 1
    assert engine.demoted == ["a"]
    clock.now += 15
    await manager.sweeps.sweep()
    assert engine.demoted == ["a", "a"]


async def test_the_loop_survives_an_engine_that_is_away(manager_with, engine, clock, ref, talk):
    manager = manager_with(idle_after_s=1.0)
    await talk(manager, ref("a"))
    clock.now += 5
    engine.down = True
    async with running(manager.run()):
        manager.sweeps.hurry()
        await asyncio.sleep(0.1)
        assert manager.get(ref("a")).state == "idle"
        engine.down = False
        while manager.get(ref("a")).state != "cold":
            manager.sweeps.hurry()
            await asyncio.sleep(0.01)


async def test_without_hibernation_no_session_sleeps(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    engine.welcome = None
    clock.now += 1e6
    await manager.sweeps.sweep()
    assert engine.demoted == []


# The machine's memory is watched, and one session at a time goes to sleep.
WATCHED = {"idle_after_s": 60.0, "max_hibernations": 1, "memory_low_bytes": 1000}
WATCHED |= {"memory_stop_bytes": 0, "memory_end_bytes": 0}


async def test_memory_pressure_does_not_wait_for_sessions_that_are_slow_to_sleep(
    manager_with, engine, clock, log, ref, talk
):
    available = 5000
    manager = manager_with(memory=lambda: available, **WATCHED)
    await talk(manager, ref("quiet"))
    clock.now += 61
    await talk(manager, ref("recent"))
    engine.gate = asyncio.Event()
    async with running(manager.sweeps.run()):
        while engine.demoted != ["quiet"]:  # under way, and the engine takes its time
            manager.sweeps.hurry()
            await asyncio.sleep(0.001)
        available = 900
        clock.now += LOOK_EVERY_S
        while engine.demoted != ["quiet", "recent"]:
            manager.sweeps.hurry()
            await asyncio.sleep(0.001)
    assert log.decisions == ["hibernate-idle", "hibernate-memory"]  # and each of them once


async def test_an_urgent_job_overtakes_sessions_that_wait_to_sleep(
    manager_with, engine, clock, ref, talk
):
    available = 5000
    manager = manager_with(memory=lambda: available, **WATCHED)
    for i in range(4):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    clock.now += 61
    engine.gate = asyncio.Event()
    at_leisure = asyncio.create_task(manager.sweeps.sweep())
    await steps()
    assert engine.demoted == ["s0"]
    available = 850
    clock.now += LOOK_EVERY_S
    pressed = asyncio.create_task(manager.sweeps.sweep())
    await steps()
    assert len(engine.demoted) > 1
    engine.gate.set()
    await asyncio.gather(at_leisure, pressed)


async def test_a_session_that_cannot_be_demoted_does_not_stand_before_the_others(
    manager, engine, clock, ref, talk
):
    for i in range(9):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    engine.held["alice", "s0"].hot_bytes = 400  # of 1200, where there is room for 1000
    await manager.follower.ask()
    engine.refuses = {"s0"}
    for _ in range(3):
        await manager.sweeps.sweep()
    assert engine.demoted.count("s0") == 1
    assert "s4" in engine.demoted


async def test_sessions_that_are_leaving_already_count_as_gone(
    manager, engine, clock, ref, talk, log
):
    for i in range(9):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    engine.gate = asyncio.Event()
    first, second = (asyncio.create_task(manager.sweeps.sweep()) for _ in range(2))
    await steps()
    engine.gate.set()
    await asyncio.gather(first, second)
    assert log.decisions == ["hibernate-pressure"] * 3


async def test_a_session_that_is_used_while_it_waits_for_its_job_stays_hot(
    manager_with, engine, clock, ref, talk
):
    manager = manager_with(idle_after_s=60.0, max_hibernations=1)
    for name in "ab":
        await talk(manager, ref(name))
    clock.now += 61
    engine.gate = asyncio.Event()
    sweep = asyncio.create_task(manager.sweeps.sweep())
    await steps()
    await talk(manager, ref("b"))
    engine.gate.set()
    await sweep
    assert engine.demoted == ["a"]
    assert manager.get(ref("b")).state == "idle"


async def test_under_pressure_those_go_first_that_would_go_anyway(
    manager_with, engine, clock, ref, talk
):
    """However much a prefill of theirs would cost."""
    manager = manager_with(idle_after_s=60.0, value_half_life_s=1e6)
    await talk(manager, ref("dear"))
    engine.held["alice", "dear"].tokens = 100_000
    clock.now += 61
    for i in range(8):
        await talk(manager, ref(f"s{i}"))
    await manager.follower.ask()
    await manager.sweeps.sweep()
    assert engine.demoted[0] == "dear"


class Watched(SessionTable):
    """Notes whom a queue has shown."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.shown: list[str] = []

    def queue(self, queue):
        for session in super().queue(queue):
            self.shown.append(session.ref.id)
            yield session


async def test_a_sweep_does_not_look_at_sessions_that_are_not_due(engine, clock, log, ref):
    """Counted, not timed: a hundred thousand sleeping sessions must cost nothing."""
    config = SchedulerConfig(idle_after_s=60.0)
    table = Watched(1000, clock, log)
    moves = Moves(engine, table, config, clock, log)
    headroom = Headroom(lambda: None, config, clock=clock, observer=log)
    sweeps = Sweeps(engine, table, moves, headroom, config, clock, log)
    for i in range(100):
        table.add(ref(f"cold{i}"), State.COLD, 0.0)
    for i in range(100):
        table.add(ref(f"hot{i}"), State.IDLE, clock.now + i)
    await sweeps.sweep()
    assert table.shown == ["hot0"]
