"""The machine's memory: sessions leave it when it is low, turns are refused when it is scarce."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.stacks.constants import configured
from engines.base import Demoted, SessionRef
from scheduler.config import SchedulerConfig
from scheduler.headroom import LOOK_EVERY_S, RETRY_S, Headroom, MemoryScarce
from scheduler.sessions import SessionManager
from tests.clock import Clock

from .conftest import Held, Log, RowsEngine, salt_of

MARKS = {"memory_low_bytes": 1000, "memory_stop_bytes": 600, "memory_end_bytes": 300}


class Machine:
    def __init__(self) -> None:
        self.available: int | None = 5000
        self.num_looks = 0

    def __call__(self) -> int | None:
        self.num_looks += 1
        return self.available


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def headroom(machine: Machine, clock: Clock, log: Log) -> Headroom:
    return Headroom(machine, configured(SchedulerConfig, **MARKS), clock=clock, observer=log)


@pytest.fixture
def manager(manager_with, machine: Machine) -> SessionManager:
    return manager_with(memory=machine, **MARKS)


def set_memory(machine: Machine, clock: Clock, available: int | None) -> None:
    machine.available = available
    clock.now += LOOK_EVERY_S


def test_the_door_opens_again_half_way_up(headroom, machine, clock, log):
    seen = []
    for available in (5000, 999, 600, 599, 799, 800, 600, 1000):
        set_memory(machine, clock, available)
        seen.append(headroom.scarce)
    assert seen == [False, False, False, True, True, False, False, False]
    assert log.levels == [("low", 999), ("scarce", 599), ("low", 800), ("enough", 1000)]


def test_a_burst_of_turns_shares_one_look(headroom, machine, clock):
    for _ in range(100):
        headroom.admit()
    assert machine.num_looks == 1
    clock.now += LOOK_EVERY_S
    headroom.admit()
    assert machine.num_looks == 2


@pytest.mark.parametrize(("marks", "available", "looks"), [(MARKS, None, 1), ({}, 1, 0)])
def test_where_memory_is_unknown_or_not_watched_nothing_is_scarce(
    machine, clock, log, marks, available, looks
):
    config = configured(SchedulerConfig, **marks)
    headroom = Headroom(machine, config, clock=clock, observer=log)
    machine.available = available
    headroom.admit()
    assert (headroom.available_bytes, headroom.missing_bytes(), log.levels) == (None, 0, [])
    assert machine.num_looks == looks


async def test_scarce_memory_refuses_turns_and_prefetches(manager, machine, clock, ref, talk, log):
    await talk(manager, ref("a"))
    await manager.demote(ref("a"))
    set_memory(machine, clock, 599)
    with pytest.raises(MemoryScarce) as caught:
        async with manager.turn(ref("b")):
            raise AssertionError("it was admitted")
    assert caught.value.retry_after_s == RETRY_S
    with pytest.raises(MemoryScarce):
        await manager.prefetch(ref("a"))
    assert log.decisions == ["refused-memory"]
    assert manager.num_running == 0
    set_memory(machine, clock, 800)
    async with manager.turn(ref("b")):
        pass


async def test_who_waits_in_line_is_refused_as_well(manager_with, machine, clock, ref):
    manager = manager_with(memory=machine, **MARKS, max_running=1)

    async def turn() -> None:
        async with manager.turn(ref("b")):
            pass

    async with manager.turn(ref("a")):
        waiting = asyncio.create_task(turn())
        await asyncio.sleep(0)
        assert manager.num_waiting == 1
        set_memory(machine, clock, 1)
    with pytest.raises(MemoryScarce):
        await waiting


@pytest.mark.parametrize("below", ["disk", "redis"])
async def test_low_memory_sends_the_longest_quiet_below_it(
    manager, engine, machine, clock, ref, talk, log, below
):
    engine.tiers = ["ram", below]
    for i in range(4):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    await manager.demote(ref("s0"))  # packed, in RAM: 20 bytes; a hot one is 120
    set_memory(machine, clock, 1000 - 130)
    await manager.sweeps.sweep()
    assert [engine.held["alice", f"s{i}"].tier for i in range(4)] == [below, below, "ram", "ram"]
    assert [manager.get(ref(f"s{i}")).state for i in range(4)] == ["cold", "cold", "idle", "idle"]
    assert log.decisions == ["hibernate-memory"] * 2
    set_memory(machine, clock, 1000)
    await manager.sweeps.sweep()
    assert engine.demoted == ["s0", "s0", "s1"]


async def test_low_memory_without_another_tier_packs_what_is_hot(
    manager, engine, machine, clock, ref, talk, log
):
    engine.tiers = ["ram"]
    for i in range(2):
        await talk(manager, ref(f"s{i}"))
        clock.now += 1
    await manager.demote(ref("s0"))
    set_memory(machine, clock, 1000 - 130)
    for _ in range(2):
        await manager.sweeps.sweep()
    assert engine.demoted == ["s0", "s1"]
    assert log.decisions == ["hibernate-memory"]


async def test_pinned_and_busy_sessions_stay(manager, engine, machine, clock, ref, talk):
    await talk(manager, ref("pinned"))
    await manager.pin(ref("pinned"), True)
    set_memory(machine, clock, 700)
    async with manager.turn(ref("busy")):
        await manager.sweeps.sweep()
    assert engine.demoted == []


class RamOnly(RowsEngine):
    async def demote(self, session: SessionRef, tier: str | None = None) -> Demoted:
        return await super().demote(session, None)


async def test_a_session_that_cannot_leave_is_not_asked_every_second(manager_with, machine, clock):
    engine = RamOnly()
    engine.held["alice", "a"] = Held(hot=False)
    manager = manager_with(engine=engine, memory=machine, **MARKS)
    await manager.follower.ask()
    set_memory(machine, clock, 700)
    for _ in range(10):
        await manager.sweeps.sweep()
        clock.now += 1
    assert engine.demoted == ["a"]
    clock.now += 15
    await manager.sweeps.sweep()
    assert engine.demoted == ["a", "a"]


class Naps:
    """A sleep that lets a script of memory readings pass, one reading for each nap."""

    def __init__(self, machine: Machine, readings: list[int]) -> None:
        self.machine, self.readings = machine, readings
        self.naps: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.naps.append(seconds)
        if not self.readings:
            raise asyncio.CancelledError
        if seconds == LOOK_EVERY_S:
            self.machine.available = self.readings.pop(0)


async def test_the_engine_is_ended_before_the_machine_hangs(machine, clock, log):
    config = configured(SchedulerConfig, **{name: mib << 20 for name, mib in MARKS.items()})
    naps = Naps(machine, [x << 20 for x in (5000, 299, 300, 299, 250, 200, 100, 5000)])
    headroom = Headroom(machine, config, clock=clock, observer=log, sleep=naps)
    ended: list[str] = []
    with pytest.raises(asyncio.CancelledError):
        await headroom.guard(ended.append)
    assert [x.split()[1] for x in ended] == ["250", "100"]
    assert log.decisions == ["restart-engine"] * 2
    assert naps.naps.count(RETRY_S) == 2


async def test_models_that_share_the_machine_free_the_missing_bytes_once(machine, clock, log, ref):
    headroom = Headroom(machine, configured(SchedulerConfig, **MARKS), clock=clock, observer=log)
    set_memory(machine, clock, 900)
    assert headroom.missing_bytes() == 100
    headroom.count_leaving(lambda: 60)  # one model's sessions on their way
    headroom.count_leaving(lambda: 30)
    assert headroom.missing_bytes() == 10
    engines = [RowsEngine(), RowsEngine()]
    managers = [
        SessionManager(x, configured(SchedulerConfig, **MARKS), salt_of=salt_of, headroom=headroom)
        for x in engines
    ]
    assert not any(x._guards for x in managers)  # the server guards them, all at once
    assert SessionManager(engines[0], configured(SchedulerConfig, **MARKS), salt_of=salt_of)._guards
