"""Loads that work, that fail, and that are no longer wanted."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.messages import Release, Stage
from tests.block_sessions import BLOCK
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import PROMPT, Request, restored


def test_a_load_that_works(bench):
    request = Request(PROMPT, name="chatcmpl-tcm" + "a" * 24 + "-1")
    ids = restored(bench, request)
    assert bench.tracker.has_work
    step = bench.tracker.take_step([], [])
    (load,) = step.loads
    assert (load.request_id, load.first_block, load.block_ids) == (request.request_id, 0, ids)
    bench.tracker.absorb(set(), [request.request_id], {}, [], [])
    bench.tracker.take_step([(request.request_id, 10 * BLOCK)], [])
    assert bench.admitted == [("tcm" + "a" * 24, "cold-ram; tokens=160")]
    counted = {"restores": 1, "restored_tokens": 160, "restored_tokens.ram": 160}
    counted |= {"prompts": 1, "prompt_tokens": 162, "cached_tokens": 160, "source.cold-ram": 1}
    assert bench.counters.as_dict() == counted


def test_a_failed_load_is_not_offered_again(bench):
    """The livelock of the policy ``recompute``: block 0 fails, vLLM starts over and asks again."""
    request = Request(PROMPT)
    ids = restored(bench, request)
    bench.tracker.take_step([], [])
    bench.tracker.absorb({ids[0]}, [request.request_id], {}, [], [])
    for _ in range(5):
        assert bench.tracker.match(request, 0) == (0, False)
    assert sum(isinstance(x, Stage) for x in bench.ranks.sent) == 1
    request.num_computed_tokens = len(PROMPT)
    outcome = bench.tracker.finished(request, [ids])
    assert outcome == {"restored_tokens": 0, "tier": "ram", "reason": "corrupt"}


def test_the_failure_may_be_reported_a_step_earlier(bench):
    request = Request(PROMPT)
    ids = restored(bench, request)
    bench.tracker.absorb({ids[3]}, [], {}, [], [])
    bench.tracker.absorb(set(), [request.request_id], {}, [], [])
    assert bench.counters.as_dict() == {"loads_failed": 1}


def test_other_requests_failures_are_none_of_ours(bench):
    request = Request(PROMPT)
    restored(bench, request)
    bench.tracker.absorb({99}, [request.request_id], {}, [], [])
    assert bench.counters.as_dict()["restores"] == 1
    assert "loads_failed" not in bench.counters.as_dict()


def test_a_miss_is_counted_as_reported_to_its_client(bench):
    request = bench.add()
    bench.tracker.match(request, 0)
    bench.ranks.answer(0, tier=None, reason="never-stored")
    assert bench.tracker.match(request, 0) == (0, False)
    assert (bench.tracker.num_running, bench.tracker.num_waiting) == (0, 1)
    bench.tracker.take_step([(request.request_id, 0)], [])
    bench.tracker.take_step([(request.request_id, 0)], [])  # reported twice: after a preemption
    assert (bench.tracker.num_running, bench.tracker.num_waiting) == (1, 0)
    bench.tracker.finished(request, [[]])
    assert (bench.tracker.num_running, bench.tracker.num_waiting) == (0, 0)
    counted = {"prompts": 1, "prompt_tokens": 162, "cached_tokens": 0}
    counted |= {"source.miss": 1, "misses.never-stored": 1}
    assert bench.counters.as_dict() == counted


def test_after_a_preemption_a_request_may_be_restored_again(bench):
    request = Request(PROMPT)
    restored(bench, request)
    bench.tracker.absorb(set(), [request.request_id], {}, [], [])
    assert bench.tracker.match(request, 0) == (None, False)
    assert sum(isinstance(x, Stage) for x in bench.ranks.sent) == 2


@pytest.mark.parametrize("answered", [False, True])
def test_an_abort_before_the_load_releases_the_staged_blobs(bench, answered):
    request = bench.add()
    bench.tracker.match(request, 0)
    if answered:
        bench.ranks.answer(10)
        bench.tracker.match(request, 0)
    bench.tracker.finished(request, [[]])
    assert isinstance(bench.ranks.sent[-1], Release)
    assert bench.tracker.is_settled
    assert not bench.hot.is_busy(("t", "s"))


def test_an_abort_during_the_load_saves_nothing(bench):
    request = Request(PROMPT, num_computed_tokens=10 * BLOCK)
    ids = restored(bench, request)
    bench.tracker.take_step([], [])
    bench.tracker.finished(request, [ids])
    assert bench.tracker.take_step([], []).saves == []
    bench.tracker.absorb(set(), [request.request_id], {}, [], [])
    assert bench.tracker.is_settled
