"""The number of replicas, by the waiting requests and by how full the live KV is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engines.on_ray.scaling import HOT_SHARE, RUNNING, WAITING, by_waiting_and_heat, replicas_for

FIGURES = [
    (1, 0, 0, 0.0, 1),
    (2, 0, 3, 1.0, 2),  # half full
    (2, 3, 8, 1.0, 3),  # some wait
    (4, 40, 16, 2.0, 6),  # more wait than run: half as many again, no more
    (2, 0, 8, 1.8, 3),  # no request waits yet, but the live KV is nearly full
    (2, 0, 1, 0.3, 1),  # one would do
    (2, 0, 0, 0.0, 1),
    (0, 0, 0, 0.0, 1),
]


@pytest.mark.parametrize(("now", "waiting", "running", "hot_shares", "wanted"), FIGURES)
def test_figures_decide(now, waiting, running, hot_shares, wanted):
    found = replicas_for(now, waiting=waiting, running=running, hot_shares=hot_shares)
    assert found == wanted


def test_the_number_it_shrinks_to_does_not_make_it_grow_again():
    for now in range(2, 20):
        for tenths in range(10 * now + 1):
            fewer = replicas_for(now, waiting=0, running=1, hot_shares=tenths / 10)
            if fewer < now:
                assert replicas_for(fewer, waiting=0, running=1, hot_shares=tenths / 10) <= fewer


def test_the_policy_adds_the_replicas_figures_up():
    figures = {WAITING: {"a": 2.0, "b": 1.0}, RUNNING: {"a": 4.0}, HOT_SHARE: {"a": 0.5}}
    context = SimpleNamespace(target_num_replicas=2, aggregated_metrics=figures)
    assert by_waiting_and_heat(context) == (3, {})
    nothing = SimpleNamespace(target_num_replicas=2, aggregated_metrics=None)
    assert by_waiting_and_heat(nothing)[0] == 1
