from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.users.figures import Result, Run, Target, percentiles, report_of
from benchmarks.users.workload import PRESETS, Habits, Workload, workload_of
from launch.errors import UsageError
from launch.remote.server import Address
from launch.remote.turn import RemoteTurn


def result(source: str = "hot", step: int = 1, **fields) -> Result:
    turn = RemoteTurn(status=200, source=source, prompt_tokens=100, answer_tokens=10, **fields)
    return Result("one", 0, "c", step, False, 0.0, turn)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_lie_within_the_measured_values_and_rise(values):
    found = percentiles(values)
    assert min(values) - 1e-3 <= found[0] <= found[1] <= found[2] <= max(values) + 1e-3


def test_percentiles_of_known_values():
    assert percentiles([]) == (None, None, None)
    assert percentiles(range(101)) == (50, 90, 99)


def test_a_miss_of_a_first_turn_is_no_loss():
    assert result("miss", step=0).source == "new"
    assert result("miss", step=1).source == "miss"
    assert result("cold-disk").source == "cold-disk"


def test_a_report_counts_shares_speed_and_errors():
    failed = result(error="busy")
    failed.turn.status = 503
    rows = [result("miss", 0, cached_tokens=0), result(cached_tokens=80), result(), failed]
    run = Run(Target(Address("http://u")), Workload("w"))
    run.results, run.walls = rows, {"one": 2.0}
    report = report_of(run, finished=True)
    (phase,) = report["phases"]
    assert (phase["requests"], phase["errors"], phase["tokens_per_s"]) == (4, 1, 20.0)
    assert report["errors"] == {"503: busy": 1}
    keys = ("source", "requests", "reused_share")
    found = [tuple(x[y] for y in keys) for x in report["sources"]]
    assert found == [("hot", 2, 0.4), ("new", 1, 0.0)]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_whole_and_every_conversation_has_its_own_name(preset):
    workload = workload_of(preset, Habits(), 3, 2)
    names = [x.name for phase in workload.phases for user in phase.users for x in user]
    assert len(set(names)) == len(names)
    assert len({phase.name for phase in workload.phases}) == len(workload.phases)
    assert workload.num_steps > 0


def test_a_workload_is_bounded():
    with pytest.raises(UsageError, match="at most 100000"):
        workload_of("chat", Habits(turns=501), 200, 1)
    with pytest.raises(UsageError, match="words in a message"):
        workload_of("chat", Habits(words=0), 1)
    assert Workload("none").phases == ()
