from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mlx_worker.generation import Overloaded
from engines.mlx_worker.waiting import FairLine, Places

NAMES = st.sampled_from("abc")


def drained(line: FairLine[str]) -> list[str]:
    items = []
    while (head := line.head()) is not None:
        assert line.pop() == head
        items.append(head)
    return items


def test_tenants_take_turns_and_so_do_their_sessions() -> None:
    line: FairLine[str] = FairLine()
    for name in ("a1", "a2", "a3"):
        line.push(name, "a", "one")
    line.push("a4", "a", "two")
    line.push("b1", "b", "one")
    assert drained(line) == ["a1", "b1", "a4", "a2", "a3"]


def test_the_head_stays_the_head_whoever_comes() -> None:
    line: FairLine[str] = FairLine()
    line.push("a1", "a", "one")
    assert line.head() == "a1"
    line.push("b1", "b", "one")
    line.push("a2", "a", "two")
    assert line.head() == "a1"


def test_who_had_to_step_back_is_first() -> None:
    line: FairLine[str] = FairLine()
    line.push("a1", "a", "one")
    line.push_first("old")
    line.push_first("older")
    assert drained(line) == ["older", "old", "a1"]


@given(st.lists(st.tuples(NAMES, NAMES)), st.data())
def test_nothing_is_lost_and_one_session_keeps_its_order(
    arrivals: list[tuple[str, str]], data: st.DataObject
) -> None:
    line: FairLine[tuple[str, str, int]] = FairLine()
    items = [(tenant, session, i) for i, (tenant, session) in enumerate(arrivals)]
    for item in items:
        line.push(item, item[0], item[1])
    for item in data.draw(st.lists(st.sampled_from(items), unique=True)) if items else []:
        assert line.remove(item)
        assert not line.remove(item)
        items.remove(item)
    assert len(line) == len(items) and sorted(line.items()) == sorted(items)
    out = []
    while line.head() is not None:
        out.append(line.pop())
    assert sorted(out) == sorted(items)
    for key in {item[:2] for item in items}:
        of_key = [item for item in out if item[:2] == key]
        assert of_key == sorted(of_key)


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_tenant_with_many_requests_delays_another_by_one(many: int, few: int) -> None:
    line: FairLine[str] = FairLine()
    for _ in range(many):
        line.push("many", "a", "x")
    for _ in range(few):
        line.push("few", "b", "x")
    first = drained(line)[: 2 * min(many, few)]
    assert first.count("few") == min(many, few)


def test_places_are_bounded_for_all_and_for_each() -> None:
    places = Places(4)
    for _ in range(places.share):
        places.take("a")
    with pytest.raises(Overloaded):
        places.take("a")
    places.take("b")
    with pytest.raises(Overloaded, match="4 requests are waiting"):
        places.take("c")
    places.leave("a")
    places.take("c")
    assert places.num_taken == 4
