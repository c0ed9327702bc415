"""Who is put to sleep when, and that no urgent work waits for other work."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from scheduler.config import SchedulerConfig
from scheduler.headroom import LOOK_EVERY_S, Headroom
from scheduler.moves import Moves
from scheduler.session import State
from scheduler.sessions import SessionManager
from scheduler.sweeps import Sweeps
from scheduler.table import SessionTable

from .conftest import salt_of


async def test_pressure_takes_the_least_valuable_down_to_low_water(
    manager, engine, clock, ref, talk
):
    for i in range(9):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    await manager.sweeps.sweep()  # 900 of 1000 bytes: over 850, down to 650
    states = [manager.get(ref(f"s{i}")).state for i in range(9)]
    assert states == ["cold"] * 3 + ["idle"] * 6


async def test_below_high_water_no_session_is_disturbed(manager, engine, ref, talk):
    for i in range(8):
        await talk(manager, ref(f"s{i}"))
    await manager.sweeps.sweep()
    assert engine.demoted == []


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


async def test_without_hibernation_no_session_sleeps(manager, engine, clock, ref, talk):
    await talk(manager, ref("a"))
    engine.welcome = None
    clock.now += 1e6
    await manager.sweeps.sweep()
    assert engine.demoted == []


def test_low_water_must_be_below_high_water():
    with pytest.raises(ValueError, match=r"scheduler\.low_water"):
        SchedulerConfig(low_water=0.9, high_water=0.8)


async def test_memory_pressure_does_not_wait_for_sessions_that_are_slow_to_sleep(
    engine, clock, log, ref, talk
):
    available = 5000
    config = SchedulerConfig(
        idle_after_s=60.0, max_hibernations=1, sweep_every_s=0.001, memory_low_bytes=1000
    )
    manager = SessionManager(
        engine, config, salt_of=salt_of, clock=clock, observer=log, memory=lambda: available
    )
    await talk(manager, ref("quiet"))
    clock.now += 61
    await talk(manager, ref("recent"))
    engine.gate = asyncio.Event()
    loop = asyncio.create_task(manager.sweeps.run())
    async with asyncio.timeout(30):
        while engine.demoted != ["quiet"]:  # under way, and the engine takes its time
            await asyncio.sleep(0.001)
        available = 900
        clock.now += LOOK_EVERY_S
        while engine.demoted != ["quiet", "recent"]:
            await asyncio.sleep(0.001)
    assert log.decisions == ["hibernate-idle", "hibernate-memory"]  # and each of them once
    loop.cancel()
    with suppress(asyncio.CancelledError):
        await loop


async def test_an_urgent_job_overtakes_sessions_that_wait_to_sleep(engine, clock, log, ref, talk):
    available = 5000
    config = SchedulerConfig(idle_after_s=60.0, max_hibernations=1, memory_low_bytes=1000)
    manager = SessionManager(
        engine, config, salt_of=salt_of, clock=clock, observer=log, memory=lambda: available
    )
    for i in range(4):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    clock.now += 61
    engine.gate = asyncio.Event()
    at_leisure = asyncio.create_task(manager.sweeps.sweep())
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.demoted == ["s0"]
    available = 850
    clock.now += LOOK_EVERY_S
    pressed = asyncio.create_task(manager.sweeps.sweep())
    for _ in range(10):
        await asyncio.sleep(0)
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
    for _ in range(10):
        await asyncio.sleep(0)
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
    for _ in range(10):
        await asyncio.sleep(0)
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
