from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.host.fair_shares import FairShares, QueueFull, QueueLimit
from engines.mlx_worker.batch.admission import FairQueue

NAMES = st.sampled_from("abc")
T = TypeVar("T")


def new_queue(first: Callable[[Iterable[str]], str] = lambda x: next(iter(x))) -> FairQueue[Any]:
    """A queue in which the tenant that waited longest is next, and all lengths are alike."""
    return FairQueue(first, lambda item: 0)


def popped(queue: FairQueue[T]) -> T:
    head = queue.head()
    assert head is not None and queue.take(head)
    return head


def drained(queue: FairQueue[T]) -> list[T]:
    items = []
    while queue.head() is not None:
        items.append(popped(queue))
    return items


def test_tenants_take_turns_and_so_do_their_sessions() -> None:
    queue: FairQueue[str] = new_queue()
    for name in ("a1", "a2", "a3"):
        queue.push(name, "a", "one")
    queue.push("a4", "a", "two")
    queue.push("b1", "b", "one")
    assert drained(queue) == ["a1", "b1", "a4", "a2", "a3"]


def test_who_has_left_cannot_be_taken() -> None:
    queue: FairQueue[str] = new_queue()
    for name in ("a1", "a2"):
        queue.push(name, "a", "one")
    assert queue.remove("a1") and not queue.take("a1")
    assert queue.take("a2") and not queue.take("a2")


def test_the_head_stays_the_head_when_others_come() -> None:
    queue: FairQueue[str] = new_queue()
    queue.push("a1", "a", "one")
    assert queue.head() == "a1"
    queue.push("b1", "b", "one")
    queue.push("a2", "a", "two")
    assert queue.head() == "a1"


def test_who_had_to_step_back_goes_before_its_own_tenant_only() -> None:
    queue: FairQueue[str] = new_queue()
    queue.push("a1", "a", "one")
    queue.push("b1", "b", "one")
    queue.push_back("b2", "b")
    queue.push_back("b3", "b")
    assert drained(queue) == ["a1", "b2", "b3", "b1"]


def test_rows_that_take_turns_without_end_let_one_in_four_begin() -> None:
    queue: FairQueue[str] = new_queue()
    for name in ("a1", "a2"):
        queue.push(name, "a", name)
    queue.push_back("row 0", "a")
    order = []
    for number in range(1, 9):
        order.append(popped(queue))
        queue.push_back(f"row {number}", "a")
    assert order[3] == "a1" and order[7] == "a2"
    assert [x for x in order if x[0] == "r"] == [f"row {i}" for i in range(6)]


def test_who_is_taken_out_of_turn_counts_as_begun() -> None:
    queue: FairQueue[str] = new_queue()
    for name in ("a1", "a2"):
        queue.push(name, "a", "one")
    for number in range(4):
        queue.push_back(f"row {number}", "a")
    assert queue.head() == "row 0" and queue.take("a1")
    assert [popped(queue) for _ in range(4)] == ["row 0", "row 1", "row 2", "a2"]


def test_the_tenant_that_was_served_least_is_next() -> None:
    shares = FairShares()
    queue: FairQueue[str] = new_queue(shares.first)
    for name in ("a1", "a2", "b1", "b2"):
        queue.push(name, name[0], "one")
        shares.come(name[0])
    shares.serve("a", 10)
    assert popped(queue) == "b1"
    shares.serve("b", 20)
    assert drained(queue) == ["a1", "a2", "b2"]


@given(st.lists(st.tuples(NAMES, NAMES)), st.data())
def test_nothing_is_lost_and_one_session_keeps_its_order(
    arrivals: list[tuple[str, str]], data: st.DataObject
) -> None:
    queue: FairQueue[tuple[str, str, int]] = new_queue()
    items = [(tenant, session, i) for i, (tenant, session) in enumerate(arrivals)]
    for item in items:
        queue.push(item, item[0], item[1])
    for item in data.draw(st.lists(st.sampled_from(items), unique=True)) if items else []:
        assert queue.remove(item)
        assert not queue.remove(item)
        items.remove(item)
    assert len(queue) == len(items) and sorted(queue.items()) == sorted(items)
    out = drained(queue)
    assert sorted(out) == sorted(items)
    for key in {item[:2] for item in items}:
        of_key = [item for item in out if item[:2] == key]
        assert of_key == sorted(of_key)


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_tenant_with_many_requests_delays_another_by_one(many: int, few: int) -> None:
    queue: FairQueue[str] = new_queue()
    for _ in range(many):
        queue.push("many", "a", "x")
    for _ in range(few):
        queue.push("few", "b", "x")
    first = drained(queue)[: 2 * min(many, few)]
    assert first.count("few") == min(many, few)


def test_waiting_is_bounded_for_all_and_for_each() -> None:
    limit = QueueLimit(4)
    for _ in range(limit.share):
        limit.enter("a")
    with pytest.raises(QueueFull):
        limit.enter("a")
    limit.enter("b")
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        limit.enter("c")
    limit.leave("a")
    limit.enter("c")
    assert limit.num_waiting == 4
