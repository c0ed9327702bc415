"""The gateway's requests to an engine of two ranks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from engines.config import CalibrationOrder
from engines.vllm_plugin.scheduler import verbs
from engines.vllm_plugin.worker import rank
from engines.wire import (
    MAX_FRAME_BYTES,
    Adopted,
    Demote,
    Done,
    Forget,
    GetStats,
    LimitTenants,
    ListSessions,
    Measure,
    Pin,
    Prefetch,
    Refused,
    Sessions,
    Stats,
    TenantUses,
    Unpin,
)
from kvstore.session import TenantLimits
from tests.block_sessions import BLOCK, ref, save
from tests.unit.engines.vllm_plugin.hub_engine import CHAIN, Engine
from tests.waiting import until


def test_a_session_is_cold_only_where_every_rank_has_it(engine):
    engine.save(ranks=1)
    assert engine.ask(ListSessions()) == Sessions([])
    engine.save()
    (report,) = engine.ask(ListSessions()).sessions
    assert (report.id, report.hot, report.tier, report.tokens) == ("s", False, "ram", 24 * BLOCK)
    assert report.cold_bytes == sum(x.record(ref()).packed_bytes for x in engine.stores)


def saving(engine: Engine) -> Callable[[], None]:
    """The ranks have a save, and end it once the test lets them."""
    return engine.begin_save().set


def handing_over(engine: Engine) -> Callable[[], None]:
    """A save is planned, and no rank has heard of it."""
    engine.save()
    quiet(engine)
    engine.hot.count_save(ref(), +1)
    return lambda: engine.hot.count_save(ref(), -1)


def quiet(engine: Engine) -> None:
    """A turn of the session, whose blocks are in vLLM's pool, has ended."""
    engine.hot.begin(ref())
    engine.pool.fill(CHAIN)
    engine.hot.end(ref(), CHAIN)


@pytest.mark.parametrize("begin", [saving, handing_over])
@pytest.mark.parametrize(
    "verb", [Demote(ref(), "disk"), Pin(ref()), Forget(ref())], ids=["demote", "pin", "forget"]
)
def test_a_verb_waits_for_a_save_that_is_under_way(engine, begin, verb):
    end, held = begin(engine), []

    def end_save() -> None:
        held.extend(x.record(ref()) is not None for x in engine.stores)  # none is gone so far
        end()

    threading.Timer(0.1, end_save).start()
    done = engine.done(verb)
    assert held == [begin is handing_over] * 2
    assert done.kept is None
    if isinstance(verb, Demote):
        assert done.report.tier == "disk"
    elif isinstance(verb, Pin):
        assert done.report.pinned
    else:
        assert [x.record(ref()) for x in engine.stores] == [None, None]
        assert [x.num_blobs for store in engine.stores for x in store.stats().tiers] == [0] * 4


def test_demote_says_that_a_save_is_still_under_way(engine, monkeypatch):
    for waiting in (verbs, rank):
        monkeypatch.setattr(waiting, "SETTLE_S", 0.05)
    hand_over = handing_over(engine)
    assert engine.done(Demote(ref())).kept == "saving"
    hand_over()
    go_on = engine.begin_save()  # the ranks have it, and have not packed it yet
    done = engine.done(Demote(ref()))
    assert (done.kept, done.report.hot) == ("saving", True)
    go_on.set()
    until(lambda: engine.done(Demote(ref())).kept is None)


def test_demote_moves_it_down_on_every_rank(engine):
    engine.save()
    done = engine.done(Demote(ref(), "disk"))
    assert (done.report.tier, done.kept) == ("disk", None)
    assert [x.tier_of(x.record(ref())) for x in engine.stores] == ["disk", "disk"]
    assert engine.done(Prefetch(ref())).report.tier == "ram"


def test_demote_drops_the_live_blocks(engine):
    engine.save()
    engine.hot.begin(ref())
    engine.pool.fill(CHAIN)
    assert engine.done(Demote(ref())).kept == "busy"
    engine.hot.end(ref(), CHAIN)
    assert engine.ask(ListSessions()).sessions[0].hot
    assert not engine.done(Demote(ref())).report.hot
    engine.hot.drop_asked()
    assert not engine.pool.cached


def test_without_a_cold_copy_the_live_one_is_kept(engine):
    quiet(engine)
    done = engine.done(Demote(ref()))
    assert (done.kept, done.report.hot, done.report.tier) == ("no-cold-copy", True, None)


def test_a_pinned_session_is_kept(engine):
    engine.save()
    assert engine.done(Pin(ref())).report.pinned
    assert engine.done(Demote(ref(), "disk")).kept == "pinned"
    assert not engine.done(Unpin(ref())).report.pinned


def test_a_session_that_one_rank_does_not_have_is_pinned_by_none(engine):
    engine.save(ranks=1)
    assert engine.done(Pin(ref())).report is None
    assert not engine.stores[0].record(ref()).pinned


def test_a_session_is_pinned_only_where_every_rank_has_it_pinned(engine):
    engine.save()
    engine.stores[0].pin(ref(), True)
    (report,) = engine.ask(ListSessions()).sessions
    assert not report.pinned
    assert engine.done(Pin(ref())).report.pinned
    assert [x.record(ref()).pinned for x in engine.stores] == [True, True]


def test_forget_reports_the_session_that_it_removes(engine):
    engine.save()
    quiet(engine)
    assert engine.done(Forget(ref())).report.tokens == 24 * BLOCK
    engine.hot.drop_asked()
    assert not engine.pool.cached
    assert engine.done(Forget(ref())).report is None
    assert engine.ask(ListSessions()) == Sessions([])


def test_a_session_that_cannot_be_forgotten_now_is_refused(engine, monkeypatch):
    monkeypatch.setattr(rank, "FORGET_S", 0.1)
    engine.save()
    go_on = engine.begin_save()
    refused = engine.ask(Forget(ref()))
    assert isinstance(refused, Refused) and "does not end" in refused.message
    assert engine.stores[0].record(ref()) is not None
    go_on.set()


def test_a_list_of_any_length_reaches_the_gateway(engine):
    """More than a frame holds; and the link is as good as before."""
    num = 3 * MAX_FRAME_BYTES // 1_000_000
    for store in engine.stores:
        for i in range(num):
            save(store, ref(f"{i:04}" + "x" * 1_000_000), CHAIN[:2])
    first = engine.ask(ListSessions())
    assert isinstance(first, Sessions) and first.more
    listed = asyncio.run(engine.verbs_list())
    assert len(listed) == num
    assert engine.hub.ready


def test_verbs_for_an_unknown_session_do_nothing(engine):
    for verb in (Demote(ref("x")), Prefetch(ref("x")), Pin(ref("x")), Forget(ref("x"))):
        assert engine.done(verb) == Done(None)


def test_stats_add_the_ranks_up(engine):
    engine.save()
    answer = engine.ask(GetStats())
    assert isinstance(answer, Stats)
    assert answer.report.hot_capacity_bytes == 100 * BLOCK * 2000
    ram = next(x for x in answer.report.tiers if x.name == "ram")
    assert ram.num_blobs == 2 * 13  # twelve chunks and a record on each rank
    assert answer.report.counters["saves"] == 1  # of the engine, not of each rank


def test_every_rank_begins_to_measure_when_it_is_asked_to(engine: Engine) -> None:
    answer = engine.ask(Measure())
    assert isinstance(answer, Adopted)
    assert answer.codec.progress == "measuring: it begins"
    order = CalibrationOrder(presets=("raw",), contexts=(256,), report_path="/nowhere")
    engine.ask(Measure(order))
    assert [x.begun for x in engine.measurements] == [[None, order]] * 2


def test_a_measurement_runs_until_every_rank_has_ended_it(engine: Engine) -> None:
    engine.measurements[1].progress = "measuring: 1 of 8 cases"
    answer = engine.ask(GetStats())
    assert isinstance(answer, Stats) and answer.report.codec is not None
    assert answer.report.codec.progress == "measuring: 1 of 8 cases"


def test_a_limit_is_divided_among_the_ranks_and_its_use_added_up(engine: Engine) -> None:
    def in_ram() -> list[int]:
        tiers = [store.ledger.stats(0).tiers for store in engine.stores]
        return [tier.nbytes for x in tiers for tier in x if tier.name == "ram"]

    for i in range(3):
        engine.save(f"s{i}")
    tenant = ref("s").tenant
    most = sum(in_ram()) // 2
    answer = engine.ask(LimitTenants({"ram": TenantLimits({tenant: most}), "disk": TenantLimits()}))
    assert isinstance(answer, TenantUses)
    held = in_ram()
    assert answer.tiers["ram"][tenant] == sum(held)
    assert all(0 < x <= most // 2 for x in held)
    assert answer.tiers["disk"] == {}
