"""How much is staged at once, and who is next."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.messages import Stage
from tests.block_sessions import tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import (
    PROMPT,
    Bench,
    Request,
    new_bench,
)


@pytest.fixture
def bench() -> Bench:
    return new_bench(max_staged_bytes=400)


def waiting(bench: Bench, *names: str) -> list[Request]:
    """Requests that ask in this order; each takes 160 of the 400 bytes that may be staged."""
    requests = [Request(PROMPT, name=x, session=x) for x in names]
    for request in requests:
        bench.tracker.add(request)
    ask_all(bench, requests)
    return requests


def ask_all(bench: Bench, requests: list[Request]) -> None:
    """A step of vLLM's in which nothing is known yet."""
    for request in requests:
        assert bench.tracker.match(request, 0) == (None, False)


def staged_for(bench: Bench) -> list[str]:
    return [x.session.id for x in bench.ranks.sent if isinstance(x, Stage)]


def test_no_more_is_staged_than_there_is_room_for(bench):
    requests = waiting(bench, "a", "b", "c", "d")
    assert staged_for(bench) == ["a", "b"]
    bench.ranks.answer(10)  # of b; no load has read it yet, so it is in memory
    assert bench.tracker.match(requests[1], 0) == (160, True)
    ask_all(bench, requests[2:])
    bench.tracker.allocated(requests[1], [list(range(20, 31))], 160)
    ask_all(bench, requests[2:])
    assert staged_for(bench) == ["a", "b"]
    bench.tracker.absorb(set(), ["b"], {}, [], [])
    ask_all(bench, requests[2:])
    assert staged_for(bench) == ["a", "b", "c"]


@pytest.mark.parametrize("answered", [True, False])
def test_a_miss_or_an_abort_makes_room(bench, answered):
    requests = waiting(bench, "a", "b", "c")
    if answered:
        bench.ranks.answer(0, tier=None, reason="never-stored")
        assert bench.tracker.match(requests[1], 0) == (0, False)
    else:
        bench.tracker.finished(requests[1], [[]])
    ask_all(bench, requests[2:])
    assert staged_for(bench) == ["a", "b", "c"]


def test_a_session_larger_than_all_room_is_staged_alone(bench):
    small = Request(PROMPT, name="small", session="small")
    large = Request(tokens_of(50), name="large", session="large")
    last = Request(PROMPT, name="last", session="last")
    for request in (small, large, last):
        bench.tracker.add(request)
    ask_all(bench, [small, large, last])
    assert staged_for(bench) == ["small"]  # who came later does not overtake
    bench.tracker.finished(small, [[]])
    ask_all(bench, [last, large])
    assert staged_for(bench) == ["small", "large"]
    ask_all(bench, [last])
    bench.tracker.finished(large, [[]])
    ask_all(bench, [last])
    assert staged_for(bench) == ["small", "large", "last"]


def test_a_request_that_gives_up_waiting_keeps_no_other_back(bench):
    requests = waiting(bench, "a", "b", "c", "d", "e")
    bench.tracker.finished(requests[2], [[]])
    assert bench.tracker.match(requests[3], 160) == (0, False)  # vLLM has it all by now
    bench.tracker.finished(requests[0], [[]])
    ask_all(bench, requests[4:])
    assert staged_for(bench) == ["a", "b", "e"]


def test_none_waits_for_room_where_a_rank_is_silent(bench):
    """Those that have room time out one after the other; the line must not wait for all of them."""
    requests = waiting(bench, "a", "b", "c", "d")
    bench.now[0] += 15
    assert [bench.tracker.match(x, 0) for x in requests] == [(0, False)] * 4
    assert bench.tracker.finished(requests[3], [[]]).reason == "deadline"


def test_a_rank_that_was_silent_before_a_request_came_is_asked_again(bench):
    requests = waiting(bench, "a", "b", "c")
    bench.now[0] += 15
    assert [bench.tracker.match(x, 0) for x in requests] == [(0, False)] * 3
    bench.now[0] += 1
    later = waiting(bench, "d", "e", "f")
    ask_all(bench, later)
    assert staged_for(bench) == ["a", "b", "d", "e"]
