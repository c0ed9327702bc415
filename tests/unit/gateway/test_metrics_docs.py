"""The documents about metrics name those that exist: the table, the dashboard, the alerts."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.description.metrics_table import names, table

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = json.loads((DOCS / "grafana/thermocline.json").read_text())
ALERTS = (DOCS / "grafana/alerts.yml").read_text()
_NAME = re.compile(r"\b(?:thermocline|gen_ai)_[a-z_0-9]+(?=[\[{ )]|$)", re.MULTILINE)
_LABELS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")


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
    assert made == table(), "run: python -m gateway.description.metrics_table"


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


def test_panels_lie_beside_each_other_and_within_24_columns():
    places = [x["gridPos"] for x in DASHBOARD["panels"]]
    assert all(x["x"] >= 0 and x["x"] + x["w"] <= 24 for x in places)
    for a, b in itertools.combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)


def test_it_shows_figures_that_no_other_dashboard_has():
    asked = " ".join(expressions())
    for name in ("thermocline_sessions", "thermocline_saved_prefill", "thermocline_cache_outcomes"):
        assert name in asked
