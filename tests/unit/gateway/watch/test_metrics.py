"""The right things are counted, and no client can make labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from docs.generators.metrics_page import names, table
from engines.http import CACHE_HEADER
from engines.wire import CodecReport, EngineReport, SessionRef, TierStats
from gateway.watch.gauges import Gauges
from gateway.watch.metrics import Metrics
from gateway.watch.requests import LiveRequest, PromptDetails, Usage
from scheduler.session import Step
from tests.qualities import GOOD
from tests.reports import engine_report

REPORT = engine_report(
    10,
    100,
    idle_hot_bytes=4,
    active_bytes=50,
    tiers=[TierStats("disk", 7, 70, 2, 1, 0, True)],
    counters={"saves": 5},
)
DOCS = Path(__file__).parents[4] / "docs"
DASHBOARD = json.loads((DOCS / "grafana/thermocline.json").read_text())
ALERTS = (DOCS / "grafana/alerts.yml").read_text()
_NAME = re.compile(r"\b(?:thermocline|gen_ai)_[a-z_0-9]+(?=[\[{ )]|$)", re.MULTILINE)
_LABELS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")


def samples(metrics: Metrics, report: EngineReport | None = None) -> dict[str, float]:
    """Every sample as ``name{label,label}``: value."""
    gauges = Gauges(ready=report is not None, num_running=3, num_waiting=4, engine=report)
    text = metrics.render(gauges).decode()
    return {
        f"{x.name}{{{','.join(x.labels[k] for k in sorted(x.labels))}}}": x.value
        for family in text_string_to_metric_families(text)
        for x in family.samples
    }


@pytest.mark.parametrize(
    ("hot", "idle", "capacity", "ratio"),
    [(10, 4, 100, 0.06), (120, 0, 100, 1.0), (4, 10, 100, 0.0), (0, 0, 0, None)],
)
def test_use_of_live_kv_is_a_share_between_none_and_all(hot, idle, capacity, ratio) -> None:
    report = msgspec.structs.replace(
        REPORT, hot_bytes=hot, idle_hot_bytes=idle, hot_capacity_bytes=capacity
    )
    assert samples(Metrics(), report).get("thermocline_kv_usage_ratio{}") == ratio


def test_usage_is_split_into_cached_and_prefilled() -> None:
    metrics = Metrics()
    metrics.used("chat", "m", Usage(100, 7, PromptDetails(90)))
    metrics.used("chat", "m", Usage(10, 1))
    found = samples(metrics)
    assert found["thermocline_tokens_total{cached}"] == 90
    assert found["thermocline_tokens_total{prefilled}"] == 20
    assert found["thermocline_tokens_total{answered}"] == 8


def test_cache_outcomes_by_source_and_reason() -> None:
    metrics = Metrics()
    said = ["cold-disk; tokens=5; reason=diverged", "hot; tokens=5", 'evil"; tokens=1']
    for head in ({}, *({CACHE_HEADER: x} for x in (*said, "miss; tokens=0; reason=never-stored"))):
        turn = LiveRequest(SessionRef("t", "s", b""), "r", "chat", "curl", 0.0, lambda: 0.0)
        turn.engine_answered(head)
        metrics.turn_ended(turn, None)
    found = samples(metrics)
    for labels in ("diverged,cold-disk", ",hot", "never-stored,miss", ",unknown"):
        assert found[f"thermocline_cache_outcomes_total{{{labels}}}"] == 1


def test_the_codec_in_use_and_its_measured_cost() -> None:
    row = msgspec.structs.replace(GOOD, codec_id="tq3.2", kl=0.004, chain_kl=0.02)
    codec = CodecReport(name="tq3", id="tq3.2", rows=(row,))
    found = samples(Metrics(), msgspec.structs.replace(REPORT, codec=codec))
    assert found["thermocline_codec_info{tq3.2}"] == 1
    assert found["thermocline_codec_packed_by_host{}"] == 0
    slow = msgspec.structs.replace(codec, why_host="they are wrong")
    found = samples(Metrics(), msgspec.structs.replace(REPORT, codec=slow))
    assert found["thermocline_codec_packed_by_host{}"] == 1
    assert found["thermocline_codec_kl{tq3.2,2048}"] == 0.004
    assert found["thermocline_codec_chain_kl{tq3.2,2048}"] == 0.02
    assert "thermocline_codec_restore_share{tq3.2,2048}" not in found  # which was not timed
    assert found["thermocline_codec_bits_per_element{tq3.2,2048}"] == row.bits_per_element
    assert found["thermocline_codec_unmeasured{}"] == 0


def test_the_machines_memory(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.memory("scarce", 5 << 29)
    assert "memory is scarce: 2.5 GiB of the machine's are available" in caplog.text
    assert samples(metrics)["thermocline_memory_levels_total{scarce}"] == 1
    gauges = Gauges(ready=True, num_running=0, num_waiting=0, engine=None, memory_available_bytes=7)
    assert b"thermocline_memory_available_bytes 7.0" in metrics.render(gauges)
    assert "thermocline_memory_available_bytes{}" not in samples(metrics)


def test_engine_and_tiers_of_the_moment() -> None:
    found = samples(Metrics(), REPORT)
    assert found["thermocline_engine_ready{}"] == 1
    assert found["thermocline_engine_hot_bytes{}"] == 10
    assert found["thermocline_tier_bytes{disk}"] == 7
    assert found["thermocline_engine_events_total{saves}"] == 5
    assert found["thermocline_turns_waiting{}"] == 4
    active = "thermocline_engine_active_bytes{}"
    unknown = samples(Metrics(), msgspec.structs.replace(REPORT, active_bytes=0))
    assert active in found and active not in unknown
    away = samples(Metrics())
    assert away["thermocline_engine_ready{}"] == 0
    assert "thermocline_engine_hot_bytes{}" not in away


def test_the_scheduler_is_observed() -> None:
    metrics = Metrics()
    metrics.transition(SessionRef("t", "s", b""), Step("idle", "hibernate", "hibernating"))
    metrics.decision("hibernate-idle")
    metrics.turn_waited(0.5)
    found = samples(metrics)
    # sorted by label name: after, before, event
    assert found["thermocline_session_transitions_total{hibernating,idle,hibernate}"] == 1
    assert found["thermocline_decisions_total{hibernate-idle}"] == 1
    assert found["thermocline_turn_wait_seconds_count{}"] == 1


def panels() -> list[dict[str, Any]]:
    return [x for x in DASHBOARD["panels"] if x["type"] != "row"]


def expressions() -> list[str]:
    queries = [x["definition"] for x in DASHBOARD["templating"]["list"] if "definition" in x]
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    alerts = re.findall(r"expr: (?:\|\n)?((?:.|\n)*?)\n        (?:for|labels):", ALERTS)
    assert len(alerts) == ALERTS.count("- alert:")
    return [re.sub(r"label_values\((\w+)", r"\1 ", x) for x in (*queries, *asked, *alerts)]


def test_the_table_is_the_one_that_the_code_gives():
    made = (DOCS / "metrics.md").read_text()
    assert made == table(), "run: python -m docs.generators.metrics_page"


@pytest.mark.parametrize("expression", expressions())
def test_a_query_asks_for_metrics_that_exist(expression: str):
    found = {x for x in _NAME.findall(expression) if not x.endswith("_type")}
    assert found and found <= names(), found - names()
    known = set(re.findall(r"`(\w+)`", table())) | {"job", "instance", "le"}
    assert set(_LABELS.findall(expression)) <= known


def test_the_dashboard_can_be_imported():
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None, "Grafana gives it one"
    ids = [x["id"] for x in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"] and panel["description"]
        refs = [x["refId"] for x in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
