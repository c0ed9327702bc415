from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.host.fair_shares import FairShares
from engines.host.line_order import (
    OLDEST_EVERY,
    SHORT_TOKENS,
    in_fair_order,
    in_turns,
    length_class,
    next_of,
)

TENANTS = st.sampled_from("abcdef")


def test_lengths_differ_by_doublings() -> None:
    lengths = [length_class(x) for x in (0, SHORT_TOKENS - 1, SHORT_TOKENS, 1023, 1024, 8192)]
    assert lengths == [0, 0, 1, 1, 2, 5]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 9))
def test_the_whole_line_is_that_of_one_choice_after_another(
    lengths: list[int], num_begun: int
) -> None:
    line, expected = list(enumerate(lengths)), []
    left = list(line)
    while left:
        chosen = next_of(left, lambda x: x[1], num_begun + len(expected))
        left.remove(chosen)
        expected.append(chosen)
    assert in_turns(line, lambda x: x[1], num_begun) == expected


def test_equals_keep_their_order() -> None:
    assert in_turns("abcdefg", lambda x: 0, 0) == list("abcdefg")


class Clock:
    now = 0.0


SECONDS = {0: 1.0, 1: 20.0}  # that one of each length takes


def test_a_long_one_begins_in_bounded_time_however_many_short_ones_come() -> None:
    clock, waited = Clock(), {}
    line = [(f"long {i}", 1, clock.now) for i in range(10)]
    for number in range(OLDEST_EVERY * 10):
        # More than can ever be served.
        line += [(f"short {number}", 0, clock.now), (f"other {number}", 0, clock.now)]
        chosen = next_of(line, lambda x: x[1], number)
        line.remove(chosen)
        name, length, came = chosen
        waited[name] = clock.now - came
        clock.now += SECONDS[length]
    for i in range(10):
        assert waited[f"long {i}"] <= (i + 1) * (3 * SECONDS[0] + SECONDS[1])


@pytest.mark.parametrize("num_begun", range(OLDEST_EVERY))
def test_a_short_one_does_not_wait_for_ten_long_ones(num_begun: int) -> None:
    clock = Clock()
    line = [(f"long {i}", 1) for i in range(10)]
    clock.now = 60.0  # so long have they waited
    line.append(("short", 0))
    came = clock.now
    for name, length in in_turns(line, lambda x: x[1], num_begun):
        if name == "short":
            break
        clock.now += SECONDS[length]
    assert clock.now - came <= SECONDS[1]  # one of ten at most


@given(
    st.lists(st.tuples(TENANTS, st.integers(0, 3)), max_size=40),
    st.dictionaries(TENANTS, st.integers(0, 4)),
    st.dictionaries(TENANTS, st.sampled_from((0.0, 32.0, 64.0, 100.0, 500.0))),
    st.dictionaries(TENANTS, st.sampled_from((1, 2, 4))),
)
def test_tenants_are_served_as_if_each_place_were_asked_for(
    waiting: list[tuple[str, int]],
    places: dict[str, int],
    served: dict[str, float],
    weights: dict[str, int],
) -> None:
    shares = FairShares()
    for tenant in dict.fromkeys([*(x for x, _ in waiting), *places]):
        shares.come(tenant, weights.get(tenant, 1))
    for tenant, tokens in served.items():
        shares.serve(tenant, tokens)
    lines: dict[str, list[tuple[str, int]]] = {}
    for item in waiting:
        lines.setdefault(item[0], []).append(item)
    order = in_fair_order(shares, lines, places)
    left = {tenant: list(line) for tenant, line in lines.items()}
    held, expected = Counter(places), []
    while left:
        tenant = shares.first(left, held)
        expected.append(left[tenant].pop(0))
        held[tenant] += 1
        if not left[tenant]:
            del left[tenant]
    assert order == expected
