"""The gateway's verbs on a real engine that is asleep in between."""

from __future__ import annotations

import pytest

from engines.wire import (
    Demote,
    Done,
    Forget,
    LimitTenants,
    Pin,
    Prefetch,
    Refused,
    TenantUses,
    Unpin,
)
from kvstore.session import TenantLimits
from tests.vllm.rig.engine import BLOCK, RealEngine, ref

pytestmark = pytest.mark.vllm
WHOLE = 599 // BLOCK * BLOCK


def done(engine: RealEngine, verb) -> Done:
    answer = engine.control(verb)
    assert isinstance(answer, Done), answer
    return answer


def test_a_demoted_session_is_cold_and_wakes(engine, sessions):
    right = engine.ask(sessions[0], "sleeper").tokens
    report = engine.wait_saved("sleeper")
    assert (report.hot, report.tier, report.busy) == (True, "ram", False)
    assert report.tokens >= 608
    demoted = done(engine, Demote(ref("sleeper"), "disk"))
    assert demoted.kept is None
    assert (demoted.report.hot, demoted.report.tier) == (False, "disk")
    back = engine.ask(sessions[0], "sleeper")
    assert (back.tokens, back.restored, back.tier) == (right, WHOLE, "disk")


def test_prefetch_brings_it_to_the_fastest_tier(engine, sessions):
    engine.ask(sessions[1], "fetched")
    engine.wait_saved("fetched")
    done(engine, Demote(ref("fetched"), "disk"))
    assert done(engine, Prefetch(ref("fetched"))).report.tier == "ram"
    assert engine.ask(sessions[1], "fetched", tokens=2).tier == "ram"


def test_a_pinned_session_stays(engine, sessions):
    engine.ask(sessions[2], "pinned", tokens=2)
    engine.wait_saved("pinned")
    assert done(engine, Pin(ref("pinned"))).report.pinned
    assert done(engine, Demote(ref("pinned"), "disk")).kept == "pinned"
    assert not done(engine, Unpin(ref("pinned"))).report.pinned
    assert done(engine, Demote(ref("pinned"), "disk")).kept is None


def test_a_forgotten_session_is_gone_everywhere(engine, sessions):
    prompt = sessions[3][::-1]
    engine.ask(prompt, "forgotten", tokens=2)
    engine.wait_saved("forgotten")
    assert done(engine, Forget(ref("forgotten"))).report is not None
    assert "forgotten" not in engine.sessions()
    assert engine.ask(prompt, "forgotten2", tokens=2).cached == 0
    assert done(engine, Forget(ref("unknown"))).report is None


def test_a_session_that_is_forgotten_while_it_is_saved_leaves_nothing(engine, sessions):
    prompt = sessions[4][::-1]
    engine.ask(prompt, "hasty", tokens=2)
    done(engine, Forget(ref("hasty")))
    assert engine.ask(prompt, "hasty2", tokens=2).cached == 0
    engine.wait_saved("hasty2")  # saved one after the other: all earlier saves have ended
    assert "hasty" not in engine.sessions()


def test_a_session_is_pinned_as_soon_as_its_turn_is_over(engine, sessions):
    engine.ask(sessions[5], "hasty3", tokens=2)
    assert done(engine, Pin(ref("hasty3"))).report.pinned
    assert not done(engine, Unpin(ref("hasty3"))).report.pinned


def test_verbs_of_an_unknown_session(engine):
    assert done(engine, Demote(ref("unknown"))).report is None
    assert done(engine, Prefetch(ref("unknown"))).report is None


def test_the_token_is_asked_for(engine, monkeypatch):
    monkeypatch.setattr("tests.vllm.rig.engine.TOKEN", "wrong")
    assert isinstance(engine.control(Prefetch(ref("x"))), Refused)


def test_a_tenant_that_may_hold_nothing_keeps_its_answers_and_no_copies(engine, sessions):
    everything = LimitTenants({"ram": TenantLimits({"t": 0}), "disk": TenantLimits({"t": 0})})
    engine.ask(sessions[5][::-1], "bounded")
    engine.wait_saved("bounded")
    uses = engine.control(everything)
    assert isinstance(uses, TenantUses)
    assert {tier: x.get("t", 0) for tier, x in uses.tiers.items()} == {
        "ram": 0,
        "disk": 0,
    }
    assert engine.forget_local()
    assert engine.ask(sessions[5][::-1], "bounded").restored == 0
    assert engine.control(LimitTenants({})) == TenantUses({"ram": {}, "disk": {}})
    engine.ask(sessions[5][::-1], "free")
    engine.wait_saved("free")
    assert engine.forget_local()
    assert engine.ask(sessions[5][::-1], "free").restored == WHOLE
