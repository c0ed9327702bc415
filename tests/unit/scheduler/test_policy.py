"""Who is put to sleep first."""

from __future__ import annotations

from itertools import count

import pytest

from engines.base import SessionRef
from scheduler.policy import (
    MAX_RANKED,
    bytes_over,
    leaving_memory,
    long_idle,
    value,
    victims,
    wake_seconds,
)
from scheduler.session import Session, State

NUMBERS = count()


def idle(name: str, tenant: str = "t", **facts) -> Session:
    ref = SessionRef(tenant=tenant, id=name, salt=b"")
    session = Session(
        ref=ref,
        state=State.IDLE,
        last_used=0.0,
        listener=lambda *_: None,
        number=next(NUMBERS),
    )
    for key, fact in {"tokens": 1000, "hot_bytes": 100, "tier": "ram", **facts}.items():
        setattr(session, key, fact)
    return session


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


def test_a_session_without_a_cold_copy_is_the_last_to_go():
    rows = [idle("unsaved", tier=None, last_used=0.0), idle("saved", last_used=99.0)]
    assert names(victims(rows, 200, 100.0, 600.0)) == ["saved", "unsaved"]


def test_long_silence_outweighs_everything():
    rows = [idle("unsaved", tier=None, last_used=0.0), idle("saved", last_used=9999.0)]
    assert names(victims(rows, 100, 10000.0, 600.0)) == ["unsaved"]


def test_pinned_sessions_are_never_victims():
    assert victims([idle("p", pinned=True)], 1 << 40, 1e9, 1.0) == []


def test_value_halves_per_half_life():
    session = idle("s")
    assert value(session, 600.0, 600.0) == pytest.approx(value(session, 0.0, 600.0) / 2)


def test_slower_tiers_and_longer_prompts_cost_more_to_wake():
    costs = [wake_seconds(idle("s", tier=tier)) for tier in ("ram", "disk", "redis", None)]
    assert costs == sorted(costs)
    assert wake_seconds(idle("s", tokens=8000)) > 8 * wake_seconds(idle("s", tokens=1000))


@pytest.mark.parametrize(("hot", "over"), [(0, 0), (850, 0), (851, 201), (1000, 350), (2000, 1350)])
def test_bytes_over_goes_from_high_water_down_to_low_water(hot, over):
    assert bytes_over(hot, 1000, 0.85, 0.65) == over


def test_children_go_first_and_who_is_to_be_kept_goes_late():
    rows = [
        idle("parent", last_used=0.0, num_children=1),
        idle("kept", last_used=0.0, retain_until=500.0),
        idle("main", last_used=50.0),
        idle("child", last_used=99.0, is_child=True),
        idle("was kept", last_used=10.0, retain_until=99.0),
    ]
    assert names(victims(rows, 500, 100.0, 60.0)) == ["child", "was kept", "main", "kept", "parent"]
    rows.sort(key=lambda x: x.last_used)
    assert names(long_idle(rows, 100.0, 30.0)) == ["was kept", "main"]
    everything = names(leaving_memory(rows, 10**9, 100.0))
    assert everything[0] == "child"
    assert everything[-2:] == ["kept", "parent"]


def test_a_session_to_be_kept_never_outlasts_a_budget():
    rows = [idle("kept", retain_until=500.0), idle("parent", num_children=2)]
    assert names(victims(rows, 200, 100.0, 60.0)) == ["kept", "parent"]


def test_of_very_many_sessions_only_the_longest_quiet_are_ranked():
    rows = [idle(f"s{i}", last_used=float(i)) for i in range(MAX_RANKED)]
    rows.append(idle("child", last_used=float(MAX_RANKED), is_child=True))
    chosen = names(leaving_memory(rows, 10**9, 10_000.0))
    assert (chosen[0], chosen[-1], len(chosen)) == ("s0", "child", MAX_RANKED + 1)


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
