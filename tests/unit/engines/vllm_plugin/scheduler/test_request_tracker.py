"""Which tokens are offered to vLLM's scheduler, when, and how their loads end."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.messages import Release, Stage
from engines.vllm_plugin.scheduler.restores import IDLE_WAIT_S
from engines.vllm_plugin.scheduler.tracked_request import TrackedRequest
from engines.wire import RequestProgress
from tests.block_sessions import BLOCK, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import PROMPT, Request, restored


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


@pytest.mark.parametrize(
    "fields",
    [{"lora_request": object()}, {"skip_reading_prefix_cache": True}],
    ids=["an adapter", "prompt logprobs"],
)
def test_what_needs_every_token_computed_is_not_restored(bench, fields):
    assert bench.tracker.match(bench.add(**fields), 0) == (0, False)


HEADERS = [
    ("never-stored", 0, "miss; tokens=0; reason=never-stored"),
    ("never-stored", 64, "hot; tokens=64"),
    ("corrupt", 64, "hot; tokens=64; reason=corrupt"),
    (None, 64, "hot; tokens=64"),
]


@pytest.mark.parametrize(("reason", "tokens", "expected"), HEADERS)
def test_the_cache_header(reason, tokens, expected):
    assert TrackedRequest(None, None, reason=reason).outcome(tokens).header() == expected


def header_of_a_miss(bench, tokens: list[int]) -> str:
    """The cache header of a prompt of the session of which vLLM and the ranks have nothing."""
    request = bench.add(tokens, name="x-tcm" + "0" * 24)
    if bench.tracker.match(request, 0) == (None, False):
        bench.ranks.answer(0, tier=None, reason="never-stored")
        assert bench.tracker.match(request, 0) == (0, False)
    bench.tracker.take_step([(request.request_id, 0)], [])
    bench.tracker.finished(request, [[]])
    return bench.admitted[-1][1]


def test_a_session_of_less_than_a_chunk_is_said_to_be_too_short(bench):
    short, miss = tokens_of(1, 2), "miss; tokens=0; reason="
    assert header_of_a_miss(bench, PROMPT) == f"{miss}never-stored"
    assert header_of_a_miss(bench, short) == f"{miss}never-stored"
    assert bench.end_turn(short) == []
    assert header_of_a_miss(bench, short) == f"{miss}too-short"
    assert header_of_a_miss(bench, PROMPT) == f"{miss}too-short"
    assert bench.end_turn(PROMPT) != []
    assert header_of_a_miss(bench, short) == f"{miss}diverged"


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


# ---- loads that work, that fail, and that are no longer wanted


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
    assert (outcome.num_restored, outcome.tier, outcome.reason) == (0, "ram", "corrupt")


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
