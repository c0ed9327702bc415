"""Budgets for a number of sessions: enough for all of them, and within the room there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.plan.fit import Rooms, choose_budgets, refusal, what_would
from launch.plan.needs import MIB, Asleep, Needs

GIB = 1 << 30
ROOMS = Rooms(hot=4 * GIB, ram=4 * GIB, shared=4 * GIB, disk=16 * GIB)


def needs_at(context: int) -> Needs:
    """32 KiB a token live, 5 times less asleep in memory, 10 times less on disk."""
    live = context * 32 << 10
    asleep = {
        "ram": Asleep("dense3", live // 5 + 4096, planned=False),
        "disk": Asleep("max", live // 10 + 4096, planned=False),
    }
    return Needs(context, running_bytes=2 * live, idle_bytes=live, asleep=asleep)


@given(
    sessions=st.integers(1, 100_000),
    context=st.integers(1, 65_536),
    memory=st.integers(64, 1 << 17),
    disk=st.integers(16, 1 << 19),
    apart=st.booleans(),
)
def test_budgets_stay_within_the_room_and_hold_sessions_that_were_not_refused(
    sessions, context, memory, disk, apart
):
    room = memory * MIB
    shared = 2 * room if apart else room
    rooms = Rooms(hot=room, ram=room, shared=shared, disk=disk * MIB)
    needs = needs_at(context)
    found = choose_budgets(needs, rooms, sessions)
    assert found.hot <= rooms.hot
    assert found.ram <= rooms.ram
    assert found.hot + found.ram <= rooms.shared
    assert found.disk <= rooms.disk
    if refusal(needs, rooms, sessions):
        assert found.most < sessions or found.hot < needs.running_bytes
    else:
        assert found.most >= sessions
        assert found.hot >= needs.running_bytes
        held = {"ram": found.ram, "disk": found.disk}
        assert any(held[x] >= sessions * needs.asleep[x].nbytes for x in held)


@given(
    num=st.integers(1, 100_000),
    tier=st.sampled_from(["ram", "disk"]),
    nbytes=st.integers(1, 1 << 32),
)
def test_as_many_sleep_in_a_budget_as_it_was_made_for(num, tier, nbytes):
    needs = Needs(1, 1, 1, {tier: Asleep("x", nbytes, planned=False)})
    budget = needs.cold_bytes(tier, num)
    held = needs.num_asleep(tier, budget)
    assert held >= num
    assert needs.cold_bytes(tier, held) <= budget < needs.cold_bytes(tier, held + 1)


def test_all_sleep_in_memory_while_it_has_room_and_else_on_disk():
    few, many = (choose_budgets(needs_at(8192), ROOMS, n) for n in (20, 300))
    assert few.num_held["ram"] >= 20
    assert few.num_held["disk"] >= 20  # survive a restart
    assert many.num_held["ram"] < 300 <= many.num_held["disk"]
    assert many.num_hot >= 4  # not one after the other


def test_given_budgets_stay_and_are_counted_with():
    rooms = Rooms(hot=GIB, ram=GIB, shared=2 * GIB, disk=0, given_hot=GIB, given_ram=64 * MIB)
    found = choose_budgets(needs_at(1024), rooms, 1000)
    assert (found.hot, found.ram, found.disk) == (GIB, 64 * MIB, 0)
    assert "1.0 GiB" not in refusal(needs_at(1024), rooms, 5)
    assert "64 MiB may be used" in refusal(needs_at(1024), rooms, 1000)


@pytest.mark.parametrize(("sessions", "context"), [(5000, 8192), (100, 65_536), (1, 400_000)])
def test_the_offers_are_really_possible(sessions, context):
    assert refusal(needs_at(context), ROOMS, sessions)
    ways = what_would(needs_at, ROOMS, sessions, context)
    offers = [way.split() for way in ways if way.startswith("--sessions")]
    assert offers
    for _, count, _, length in offers:
        assert refusal(needs_at(int(length)), ROOMS, int(count)) == ""


def test_a_model_that_was_not_measured_may_use_more_of_the_disk_until_it_is():
    live = 1024 * 32 << 10
    asleep = dict.fromkeys(("ram", "disk"), Asleep("dense3", live // 5, True, until_then=live))
    needs = Needs(1024, 2 * live, live, asleep)
    found = choose_budgets(needs, ROOMS, 300)
    assert found.num_at_first >= 300
    assert found.disk >= 300 * live
    small = Rooms(hot=GIB, ram=GIB, shared=GIB, disk=3 * GIB)
    assert refusal(needs, small, 300) == ""
    assert choose_budgets(needs, small, 300).num_at_first < 300


def test_redis_holds_sessions_too():
    needs = needs_at(8192)
    asleep = {**needs.asleep, "redis": needs.asleep["disk"]}
    needs = Needs(8192, needs.running_bytes, needs.idle_bytes, asleep)
    rooms = Rooms(hot=GIB, ram=GIB, shared=GIB, disk=0, given_disk=0, redis=64 * GIB)
    assert refusal(needs, rooms, 1000) == ""
    assert choose_budgets(needs, rooms, 1000).num_held["redis"] >= 1000
