"""Our report on its way into vLLM's own metrics; no engine is started."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engines.vllm_plugin.reports import ColdMetrics, ColdStats, StatsFeed, source_of
from engines.wire import EngineReport, TierStats

pytestmark = pytest.mark.vllm


def report(**counters: int) -> EngineReport:
    return EngineReport(
        hot_bytes=1,
        idle_hot_bytes=1,
        hot_capacity_bytes=2,
        active_bytes=0,
        num_running=0,
        num_waiting=0,
        save_queue_bytes=0,
        tiers=[TierStats("ram", 10 * sum(counters.values()), 100, 3, 0, 0, True)],
        counters=counters,
    )


def data(**counters: int) -> dict[str, object]:
    return msgspec.to_builtins(report(**counters))


def test_a_step_takes_what_has_come_and_asks_once_a_second():
    now, work = [0.0], []

    async def ask() -> EngineReport:
        return report(saves=1)

    feed = StatsFeed(ask, work.append, monotonic=lambda: now[0])
    assert feed.take() is None
    assert feed.take() is None
    assert len(work) == 1
    asyncio.run(work.pop()())
    assert feed.take().reduce() == {"saves": 1}
    assert feed.take() is None
    now[0] = 1.0
    assert feed.take() is None
    assert len(work) == 1


def test_a_missing_worker_is_warned_of_once(caplog):
    now, work, missing = [0.0], [], [True]

    async def ask() -> EngineReport:
        if missing[0]:
            raise ConnectionError("not every worker of the engine is connected")
        return report(saves=1)

    feed = StatsFeed(ask, work.append, monotonic=lambda: now[0])

    def second() -> None:
        now[0] += 1.0
        feed.take()
        asyncio.run(work.pop()())

    def warnings() -> int:
        return caplog.text.count("not every worker of the engine is connected")

    second()
    second()
    assert warnings() == 1
    missing[0] = False
    second()
    assert feed.take().reduce() == {"saves": 1}
    missing[0] = True
    second()
    assert warnings() == 2


def test_totals_are_not_added_up():
    first, second = ColdStats(data=data(saves=1)), ColdStats(data=data(saves=3))
    assert first.aggregate(second).reduce() == {"saves": 3}
    assert first.aggregate(ColdStats()).reduce() == {"saves": 1}
    assert ColdStats().is_empty()
    assert ColdStats().reduce() == {}


def test_prometheus_gets_them_by_event_and_by_tier():
    config = SimpleNamespace(kv_transfer_config=None)
    # Its own: an engine that ran in this process may have taken the names in the common one.
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = ColdMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    for counters in ({"saves": 2}, {"saves": 5, "restores": 1}, {"saves": 5, "restores": 1}):
        metrics.observe(data(**counters))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    assert value("vllm:thermocline_events_total", event="saves") == 5
    assert value("vllm:thermocline_events_total", event="restores") == 1
    assert value("vllm:thermocline_tier_bytes", tier="ram") == 60
    assert value("vllm:thermocline_tier_available", tier="ram") == 1


def test_vllm_has_words_for_two_of_our_tiers():
    assert source_of("ram") is CacheHitSource.HOST
    assert source_of("disk") is CacheHitSource.DISK
    assert source_of("redis") is CacheHitSource.EXTERNAL_UNSPECIFIED
