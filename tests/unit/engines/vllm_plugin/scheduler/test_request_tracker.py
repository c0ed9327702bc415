"""Which tokens are offered to vLLM's scheduler, and when."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.messages import Release, Stage
from engines.vllm_plugin.scheduler.restores import IDLE_WAIT_S
from engines.vllm_plugin.scheduler.tracked_request import TrackedRequest
from engines.wire import RequestProgress
from tests.block_sessions import BLOCK, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import PROMPT, Request


def test_nothing_is_offered_before_it_is_verified(bench):
    request = bench.add()
    for _ in range(3):
        assert bench.tracker.match(request, 0) == (None, False)
    assert len(bench.ranks.sent) == 1
    stage = bench.ranks.sent[0]
    assert (stage.session.id, stage.first_block, len(stage.hashes)) == ("s", 0, 10 * 32)
    bench.ranks.answer(6)
    assert bench.tracker.match(request, 0) == (6 * BLOCK, True)
    assert bench.tracker.match(request, 0) == (6 * BLOCK, True)  # asking changes nothing


def test_while_nothing_runs_the_answer_may_be_waited_for(bench):
    """Once per step, however many ask; blobs in memory are then offered without another step."""
    requests = [Request(PROMPT, name=f"r{i}") for i in range(3)]
    for request in requests:
        bench.tracker.add(request)
        assert bench.tracker.match(request, 0) == (None, False)
    assert bench.ranks.patience == [IDLE_WAIT_S, 0, 0]
    assert bench.tracker.take_step([], []).wait_s == IDLE_WAIT_S
    bench.tracker.match(requests[0], 0)
    assert bench.ranks.patience[3:] == [IDLE_WAIT_S]


def test_a_running_request_waits_for_no_restore(bench):
    running, other = Request(PROMPT, name="r1"), Request(PROMPT, name="r2")
    bench.tracker.add(running)
    assert bench.tracker.take_step([("r1", 0)], []).wait_s == 0
    bench.tracker.add(other)
    bench.tracker.match(other, 0)
    assert bench.ranks.patience == [0]
    bench.tracker.finished(running, [[]])
    assert bench.tracker.take_step([], []).wait_s == IDLE_WAIT_S


def test_one_token_is_always_left_to_compute(bench):
    request = bench.add(tokens_of(10))
    bench.tracker.match(request, 0)
    assert len(bench.ranks.sent[0].hashes) == 8 * 32  # in whole chunks


def test_local_blocks_are_not_asked_for(bench):
    request = bench.add()
    assert bench.tracker.match(request, 10 * BLOCK) == (0, False)
    assert bench.tracker.match(request, 4 * BLOCK) == (None, False)
    bench.ranks.answer(10)
    assert bench.tracker.match(request, 4 * BLOCK) == (6 * BLOCK, True)
    assert bench.tracker.match(request, 7 * BLOCK) == (3 * BLOCK, True)  # others computed more
    bench.tracker.allocated(request, [list(range(50, 61))], 3 * BLOCK)
    load = bench.tracker.take_step([], []).loads[0]
    assert (load.first_block, load.block_ids) == (7, [57, 58, 59])


def test_a_local_prefix_that_shrank_is_asked_for_again(bench):
    request = bench.add()
    bench.tracker.match(request, 4 * BLOCK)
    bench.ranks.answer(10)
    assert bench.tracker.match(request, 2 * BLOCK) == (None, False)
    assert [type(x) for x in bench.ranks.sent] == [Stage, Release, Stage]


def test_ranks_that_are_not_there_yet_are_not_waited_for(bench):
    bench.ranks.ready = False
    request = bench.add()
    assert bench.tracker.match(request, 0) == (0, False)


def test_a_rank_that_never_answers_costs_the_deadline(bench):
    request = bench.add(name="x-tcm" + "0" * 24)
    assert bench.tracker.match(request, 0) == (None, False)
    bench.now[0] = 7.1
    assert bench.tracker.match(request, 0) == (0, False)
    assert bench.tracker.match(request, 0) == (0, False)
    assert isinstance(bench.ranks.sent[-1], Release)
    bench.tracker.take_step([(request.request_id, 0)], [])
    assert bench.admitted == [("tcm" + "0" * 24, "miss; tokens=0; reason=deadline")]


def test_adapters_are_neither_restored_nor_saved(bench):
    request = bench.add(num_computed_tokens=len(PROMPT), lora_request=object())
    assert bench.tracker.match(request, 0) == (0, False)
    bench.tracker.finished(request, [list(range(10))])
    assert bench.tracker.is_settled


def test_prompt_logprobs_need_every_token_computed(bench):
    request = bench.add(skip_reading_prefix_cache=True)
    assert bench.tracker.match(request, 0) == (0, False)


HEADERS = [
    ("never-stored", 0, "miss; tokens=0; reason=never-stored"),
    ("never-stored", 64, "hot; tokens=64"),
    ("corrupt", 64, "hot; tokens=64; reason=corrupt"),
    (None, 64, "hot; tokens=64"),
]


@pytest.mark.parametrize(("reason", "tokens", "expected"), HEADERS)
def test_the_cache_header(reason, tokens, expected):
    assert TrackedRequest(None, None, reason=reason).outcome(tokens).header() == expected


def test_it_says_how_far_the_requests_of_sessions_are(bench):
    request = Request(PROMPT, num_prompt_tokens=len(PROMPT), num_output_tokens=0)
    request.num_computed_tokens = 24  # restored or hot
    bench.tracker.add(request)
    assert bench.tracker.progress() == []  # it waits
    bench.tracker.take_step([("r1", 24)], [])
    assert bench.tracker.progress() == [RequestProgress("t", "s", len(PROMPT), 24, 0)]
    request.num_computed_tokens, request.num_output_tokens = len(PROMPT) + 3, 4
    assert bench.tracker.progress() == [RequestProgress("t", "s", len(PROMPT), len(PROMPT), 4)]
    bench.tracker.finished(request, [[]])
    assert bench.tracker.progress() == []
