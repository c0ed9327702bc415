"""Prometheus' own tool on our queries, our rules and the text of /metrics."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from engines.wire import SessionRef
from gateway.watch.gauges import Gauges
from gateway.watch.metrics import Metrics
from scheduler.session import Step
from tests.command_line import program
from tests.unit.gateway.watch.test_metrics import DASHBOARD, DOCS, panels

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here; on Debian: apt-get install prometheus"
)
RULES = DOCS / "grafana/alerts.yml"
TURNS = 'gen_ai_server_request_duration_seconds_count{error_type="%s"} %s'
OUTCOMES = 'thermocline_cache_outcomes_total{source="%s", reason="%s"} %s'
DECISIONS = 'thermocline_decisions_total{decision="%s"} 0+1x90'
MANY, SOME, FEW = "0+60x90", "0+30x90", "0+10x90"
# What is seen once a minute, whose alert it concerns, and whether that fires.
SEEN: list[tuple[list[str], str, bool]] = [
    (["thermocline_engine_ready 0x90"], "EngineDown", True),
    (["thermocline_engine_ready 1x90"], "EngineDown", False),
    (['thermocline_tier_available{tier="redis"} 0x90'], "TierDown", True),
    ([OUTCOMES % ("miss", "evicted", SOME), OUTCOMES % ("hot", "", MANY)], "SessionsLost", True),
    ([OUTCOMES % ("miss", "never-stored", SOME), OUTCOMES % ("hot", "", MANY)],
     "SessionsLost", False),
    ([DECISIONS % "refused-memory"], "MemoryScarce", True),
    ([DECISIONS % "refused-full"], "Overloaded", True),
    (["thermocline_codec_unmeasured 1x90", "thermocline_codec_measuring 0x90"],
     "CodecUnmeasured", True),
    ([TURNS % ("engine", FEW), TURNS % ("", MANY)], "FailingTurns", True),
    ([TURNS % ("client_gone", FEW), TURNS % ("", MANY)], "FailingTurns", False),
]  # fmt: skip


def promtool(*arguments: str, given: str = "") -> tuple[int, str]:
    assert PROMTOOL is not None
    done = program(PROMTOOL, *arguments, input=given, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_rules_are_rules():
    code, said = promtool("check", "rules", str(RULES))
    assert code == 0 and "7 rules found" in said, said


def test_every_query_of_the_dashboard_can_be_parsed(tmp_path: Path):
    rules = []
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "5m").replace("$__range", "1h")
            rules.append({"record": f"panel_{panel['id']}_{target['refId']}", "expr": query})
    assert len(rules) > len(DASHBOARD["panels"]) // 2
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    code, said = promtool("check", "rules", str(file))
    assert code == 0 and f"{len(rules)} rules found" in said, said


def alerts(folder: Path, alert: str, series: list[str]) -> set[str]:
    """The alerts that fire after 80 minutes of these series, once a minute."""
    given = [x.split("} ") if "{" in x else x.split(" ", 1) for x in series]
    input_series = [
        {"series": f"{name}}}" if "{" in name else name, "values": values} for name, values in given
    ]
    test = {
        "interval": "1m",
        "input_series": input_series,
        "alert_rule_test": [{"eval_time": "80m", "alertname": alert, "exp_alerts": []}],
    }
    file = folder / "test.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    code, said = promtool("test", "rules", str(file))
    assert (code == 0) == ("FAILED" not in said), said
    return set(re.findall(r'alertname="(\w+)"', said.partition("got:")[2])) if code else set()


@pytest.mark.parametrize(("series", "name", "fires"), SEEN)
def test_a_rule_fires_when_it_should(tmp_path: Path, series: list[str], name: str, fires: bool):
    alert = f"Thermocline{name}"
    assert alerts(tmp_path, alert, series) == ({alert} if fires else set())


def test_every_rule_is_tried():
    tried = {f"Thermocline{name}" for _, name, fires in SEEN if fires}
    assert tried == set(re.findall(r"alert: (\w+)", RULES.read_text()))


def test_the_text_that_the_server_exposes_can_be_read():
    metrics = Metrics()
    slept = Step("idle", "evicted", "cold", "ram", left="hot", why="idle")
    metrics.transition(SessionRef("t", "s", b""), slept)
    gauges = Gauges(ready=True, num_running=1, num_waiting=0, engine=None)
    text = metrics.render(gauges).decode()
    assert 'thermocline_session_departures_total{place="hot",why="idle"} 1.0' in text
    code, said = promtool("check", "metrics", given=text)
    assert code in (0, 3), said  # 3: names that it would have chosen otherwise
    assert "error while linting" not in said
