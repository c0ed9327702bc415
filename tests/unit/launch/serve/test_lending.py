"""Which models take part in lending memory, and with how much."""

from __future__ import annotations

from gateway.models.budget import Budget
from launch.serve.lending import lending_of
from tests.unit.gateway.in_process import RecordingEngine
from tests.unit.launch.settings.test_several_engines import TWO, engines_of

GIB = 1 << 30
FAR = """
[[engines]]
name = "far"
url = "http://127.0.0.1:9"
control = "tcp://127.0.0.1:10"
"""


async def test_a_model_that_runs_elsewhere_takes_nothing_of_this_machine(tmp_path):
    entries = engines_of(TWO + FAR, tmp_path)
    lending = lending_of(entries, [RecordingEngine() for _ in entries], 1)
    assert lending.most_in_use == Budget(3 * GIB * 2 // 4, GIB * 2 // 4)  # of big/one alone
    await lending.take_back("two")
    assert lending.most_in_use == Budget(3 * GIB * 3 // 4, GIB * 3 // 4)
    await lending.take_back("far")
    assert lending.most_in_use == Budget(3 * GIB * 3 // 4, GIB * 3 // 4)
