"""Who waits for a prefill of another request, and for how long."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.messages import Release, Stage
from engines.vllm_plugin.scheduler.shared_prefills import MAX_STALLED
from tests.block_sessions import BLOCK, CHUNK, hashes, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import (
    Bench,
    Request,
    Status,
    restored,
)

NUM_SHARED = 20 * BLOCK
SHARED = tokens_of(20)
WAITS = (None, False)


def prefilled(bench: Bench, more: int = 1, num_computed_tokens: int = 0, **fields) -> Request:
    """A running request of the shared beginning and ``more`` blocks of its own."""
    fields.setdefault("name", "first")
    request = Request(SHARED + tokens_of(more, 3, first=1000), **fields)
    bench.tracker.add(request)
    bench.tracker.allocated(request, [list(range(30))], 0)
    run(request, num_computed_tokens)
    return request


def run(request: Request, num_computed_tokens: int) -> None:
    request.status, request.num_computed_tokens = Status.RUNNING, num_computed_tokens


def follower(bench: Bench, name: str = "second", own: int = 2000, **fields) -> Request:
    """A request of the shared beginning and a chunk of its own."""
    return bench.add(SHARED + tokens_of(2, 3, first=own), name=name, **fields)


def waits(bench: Bench, request: Request, num_computed_tokens: int, stored_blocks: int = 0) -> bool:
    """Whether a request waits for another's prefill once the ranks said what is stored for it."""
    sent = len(bench.ranks.sent)
    found = bench.tracker.match(request, num_computed_tokens)
    if any(isinstance(x, Stage) for x in bench.ranks.sent[sent:]):
        assert found == WAITS
        bench.ranks.answer(stored_blocks)
        found = bench.tracker.match(request, num_computed_tokens)
    return found == WAITS


def test_it_waits_until_all_that_both_have_in_common_is_computed(bench):
    first = prefilled(bench)
    second = follower(bench)
    for computed in range(0, NUM_SHARED - 4 * BLOCK, 4 * BLOCK):
        first.num_computed_tokens = computed
        # vLLM finds the blocks of the step that it plans just now.
        assert waits(bench, second, computed + 4 * BLOCK)
        assert bench.tracker.num_held_back == 1
    assert len(bench.ranks.sent) == 2  # meanwhile nothing is read
    first.num_computed_tokens = NUM_SHARED
    assert bench.tracker.num_held_back == 0  # vLLM is to ask for it again
    assert not waits(bench, second, NUM_SHARED)


def test_those_let_in_by_the_same_step_wait_too(bench):
    """vLLM has set the first one's blocks aside, but computed nothing."""
    others = [follower(bench, f"r{i}", 2000 + 100 * i) for i in range(7)]
    prefilled(bench)
    assert all(waits(bench, x, 4 * BLOCK) for x in others)
    assert bench.tracker.num_held_back == 7


def test_none_waits_if_none_runs(bench):
    requests = [follower(bench, f"r{i}", 2000 + 100 * i) for i in range(3)]
    assert not any(waits(bench, x, 0) for x in requests)
    assert bench.tracker.num_held_back == 0


def test_what_is_stored_beyond_the_others_beginning_is_restored(bench):
    prefilled(bench)
    second = follower(bench)
    assert not waits(bench, second, 4 * BLOCK, stored_blocks=22)
    assert bench.tracker.match(second, 4 * BLOCK) == (18 * BLOCK, True)


def test_what_was_read_and_is_shorter_is_let_go(bench):
    first = prefilled(bench)
    second = follower(bench)
    assert waits(bench, second, 4 * BLOCK, stored_blocks=12)
    assert waits(bench, second, 8 * BLOCK)
    assert [type(x) for x in bench.ranks.sent] == [Stage, Release]
    first.num_computed_tokens = NUM_SHARED
    assert not waits(bench, second, NUM_SHARED, stored_blocks=22)
    assert bench.tracker.match(second, NUM_SHARED) == (2 * BLOCK, True)


@pytest.mark.parametrize("num_alike", [0, CHUNK - 1, CHUNK])
def test_a_whole_chunk_must_be_alike(bench, num_alike):
    prefilled(bench)
    tokens = SHARED[:num_alike] + tokens_of(20, first=3000)
    second = bench.add(tokens, name="second")
    assert waits(bench, second, 0) is (num_alike >= CHUNK)


def test_another_tenants_prompt_is_not_waited_for(bench):
    """Its hashes differ, since its salt does."""
    prefilled(bench)
    second = follower(bench)
    second.block_hashes = hashes(second.all_token_ids, salt="other")
    assert not waits(bench, second, 0)


def test_a_prompt_that_is_the_others_beginning_computes_its_last_token(bench):
    first = prefilled(bench)
    second = bench.add(SHARED, name="second")
    assert waits(bench, second, 4 * BLOCK)
    run(first, 12 * BLOCK)
    end = NUM_SHARED - CHUNK  # the last chunk is not whole without the last token
    assert bench.tracker.match(second, end) == (0, False)


def test_it_goes_on_where_the_other_was_aborted(bench):
    first = prefilled(bench)
    second, third = follower(bench), follower(bench, "third", 2500)
    assert waits(bench, second, 4 * BLOCK)
    bench.tracker.finished(first, [list(range(30))])
    assert bench.tracker.num_held_back == 0
    assert not waits(bench, second, 4 * BLOCK)
    bench.tracker.allocated(second, [list(range(30))], 0)
    run(second, 4 * BLOCK)
    assert waits(bench, third, 8 * BLOCK)  # for the second one now


@pytest.mark.parametrize("status", [Status.PREEMPTED, Status.WAITING_FOR_REMOTE_KVS])
def test_only_a_running_request_is_waited_for(bench, status):
    first = prefilled(bench)
    second = follower(bench)
    first.status = status
    assert not waits(bench, second, 0)
    run(first, 2 * BLOCK)  # resumed
    assert waits(bench, second, 4 * BLOCK)


def test_a_load_is_not_taken_for_a_prefill(bench):
    first = Request(SHARED, name="first")
    restored(bench, first)
    first.status, first.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 10 * BLOCK
    assert not waits(bench, follower(bench), 0)


def test_one_that_gets_no_tokens_is_not_waited_for_long(bench):
    first = prefilled(bench, num_computed_tokens=2 * BLOCK)
    second = follower(bench)
    assert [waits(bench, second, 4 * BLOCK) for _ in range(MAX_STALLED)] == [True] * MAX_STALLED
    assert not waits(bench, second, 4 * BLOCK)
    assert bench.tracker.num_held_back == 0
    run(first, 4 * BLOCK)
    assert waits(bench, second, 8 * BLOCK)  # it goes on meanwhile


def test_what_is_stored_is_loaded_where_the_other_gets_no_tokens(bench):
    """It is asked about twice: once before the store is, once with what is stored."""
    prefilled(bench, num_computed_tokens=2 * BLOCK)
    second = follower(bench)
    asked = (waits(bench, second, 4 * BLOCK, stored_blocks=12) for _ in range(3 * MAX_STALLED))
    assert not all(asked)
    assert bench.tracker.match(second, 4 * BLOCK) == (8 * BLOCK, True)


@pytest.mark.parametrize("is_hot", [True, False])
def test_one_far_behind_is_not_waited_for(bench, is_hot):
    """Its prompt's logprobs are wanted, say: it computes also what vLLM or the store has."""
    first = prefilled(bench, skip_reading_prefix_cache=True)
    second = follower(bench)
    held, stored = (14 * BLOCK, 0) if is_hot else (0, 14)
    assert not waits(bench, second, held, stored)
    run(first, 2 * BLOCK)  # less than a step is missing
    assert waits(bench, second, held, stored)


def test_of_several_the_one_ahead_is_waited_for(bench):
    prefilled(bench)
    ahead = prefilled(bench, 2, name="ahead")
    second = follower(bench)
    run(ahead, 16 * BLOCK)
    assert waits(bench, second, 18 * BLOCK)


def test_a_state_that_vllm_did_not_keep_is_not_waited_for(bench):
    """Of recurrent layers vLLM keeps states only where a piece ends."""
    prefilled(bench, num_computed_tokens=12 * BLOCK)
    assert not waits(bench, follower(bench), 8 * BLOCK)


def test_prompt_logprobs_wait_for_nothing(bench):
    prefilled(bench)
    assert bench.tracker.match(follower(bench, skip_reading_prefix_cache=True), 0) == (0, False)


def test_an_answer_that_runs_on_is_no_prefill(bench):
    first = prefilled(bench)
    run(first, first.num_tokens - 1)
    bench.tracker.take_step([], [])
    first.num_computed_tokens = 0  # as if it were preempted later, and not yet resumed
    assert not waits(bench, follower(bench), 0)
