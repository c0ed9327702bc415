"""Shares by the tokens served: which tenant is next, who gives up a place, and who waits longer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.host.fair_shares import (
    MAX_ABSENT,
    OLDEST_EVERY,
    QUANTUM,
    SHORT_TOKENS,
    FairShares,
    Payer,
    TenantLine,
    in_fair_order,
    in_turns,
    length_class,
    next_of,
)


def of(**weights: int) -> FairShares:
    shares = FairShares()
    for tenant, weight in weights.items():
        shares.come(tenant, weight)
    return shares


def test_who_was_served_least_by_weight_is_first():
    shares = of(a=2, b=2)
    assert shares.first("ab") == "a"
    shares.serve("a", 10)
    assert shares.first("ab") == "b"
    shares.serve("b", 11)
    assert shares.first("ab") == "a"


def test_a_tenant_has_one_weight_the_largest_of_its_requests():
    shares = of(a=4, b=4)
    shares.serve("a", 40)
    shares.come("a", 1)
    shares.serve("b", 41)
    assert shares.first("ab") == "a"
    before = shares.tokens("a")
    shares.come("a", 8)
    assert shares.tokens("a") == before, "its served tokens are as before"
    for _ in range(3):
        shares.leave("a")
    shares.come("a", 1)
    assert shares.held("a", 3) == 3.0


def test_without_places_tokens_follow_weights():
    shares = of(heavy=2, light=1)
    served = Counter[str]()
    for _ in range(300):
        first = shares.first(["heavy", "light"], Counter({"heavy": 0}))
        shares.serve(first, 1)
        served[first] += 1
    assert served == {"heavy": 200, "light": 100}


def test_a_tenant_that_is_a_quantum_short_is_first_even_if_it_holds_places():
    shares = of(a=1, b=3)
    assert shares.first("ab", {"b": 1}) == "b"  # 2 / 3 of a place by weight
    shares.serve("b", 3 * QUANTUM)
    assert shares.first("ab", {"b": 1}) == "a"


def test_a_pause_is_no_credit_and_old_use_no_debt_to_newcomers():
    shares = of(a=1, b=1)
    shares.serve("a", 100)
    shares.serve("b", 100)
    shares.leave("b")
    shares.serve("a", 1000)
    shares.come("b")
    assert shares.first("ba") == "b"
    shares.serve("b", 1)
    assert shares.first("ba") == "a"  # begins where the others are
    shares.come("new")
    shares.serve("new", 2)
    assert shares.first(["new", "a"]) == "a"


def test_a_tenant_that_leaves_for_a_moment_keeps_its_count():
    shares = of(a=1, b=1)
    shares.serve("a", 500)
    shares.leave("a")
    shares.come("a")
    assert shares.first("ab") == "b"


def test_who_holds_fewest_places_by_weight_is_first():
    shares = of(a=1, b=1, c=10)
    shares.serve("b", 5)
    assert shares.first("ab", {"a": 1}) == "b"
    assert shares.first("ab", {"a": 1, "b": 1}) == "a"
    assert shares.first("abc", {"a": 0, "b": 0, "c": 5}) == "c"


def test_a_place_is_taken_from_a_tenant_that_keeps_as_many():
    shares = of(a=1, b=1)
    assert shares.holder_to_yield("b", 1, 1, {"a": 8}) == "a"
    assert shares.holder_to_yield("b", 1, 1, {"a": 5, "b": 3}) == "a"
    assert shares.holder_to_yield("b", 1, 1, {"a": 4, "b": 4}) is None
    assert shares.holder_to_yield("b", 4, 4, {"a": 8}) == "a"
    assert shares.holder_to_yield("b", 5, 5, {"a": 8}) is None
    assert shares.holder_to_yield("b", 1, 1, {"b": 8}) is None


def test_weights_count():
    shares = of(a=3, b=1)
    assert shares.holder_to_yield("b", 1, 1, {"a": 7, "b": 1}) == "a"
    assert shares.holder_to_yield("b", 1, 1, {"a": 6, "b": 2}) is None


def test_more_tenants_than_places_take_turns():
    shares = of(a=1, b=1, c=1)
    places = {"a": 1, "b": 1}
    assert shares.holder_to_yield("c", 1, 1, places) is None
    shares.serve("a", QUANTUM - 1)
    assert shares.holder_to_yield("c", 1, 1, places) is None
    shares.serve("b", QUANTUM)
    assert shares.holder_to_yield("c", 1, 1, places) == "b"


def test_an_exchange_is_never_taken_back_at_once():
    """Or rows would change places in every step."""
    for places in itertools.product(range(9), repeat=2):
        shares, held = of(a=1, b=1), dict(zip("ab", places, strict=True))
        if shares.holder_to_yield("b", 1, 1, held) == "a":
            held = {"a": held["a"] - 1, "b": held["b"] + 1}
            assert shares.holder_to_yield("a", 1, 1, held) is None


def test_absent_tenants_are_forgotten_in_the_end():
    shares = of(here=1)
    for i in range(2 * MAX_ABSENT):
        shares.come(f"t{i}")
        shares.leave(f"t{i}")
    assert len(shares._served) <= MAX_ABSENT + 2


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(1, 8))
def test_tokens_follow_weights_while_all_wait(weights: list[int], num_places: int):
    """Tenants with more requests than there are places get tokens by their weights."""
    shares, names = FairShares(), [f"t{i}" for i in range(len(weights))]
    for name, weight in zip(names, weights, strict=True):
        shares.come(name, weight)
    places, served = Counter[str](), Counter[str]()
    for _ in range(3000):
        for _ in range(num_places):
            first = shares.first(names, places)
            if places.total() < num_places:
                places[first] += 1
            elif (holder := shares.holder_to_yield(first, 1, 1, places)) is not None:
                places[holder] -= 1
                places[first] += 1
        for name, number in places.items():
            shares.serve(name, number)
            served[name] += number
    by_weight = [served[x] / weight for x, weight in zip(names, weights, strict=True)]
    assert max(by_weight) - min(by_weight) <= 2 * QUANTUM + num_places


def test_who_is_ahead_owes_the_others_time_by_their_weights():
    shares = of(a=1, b=2, c=1)
    assert shares.owed("a") == 0.0
    shares.serve("a", 30)
    assert shares.owed("a") == 3.0
    assert shares.owed("b") == 0.0
    shares.serve("b", 80)
    assert shares.owed("b") == 1.0
    assert of(a=1).owed("a") == 0.0


TENANTS = st.sampled_from("abcdef")


def test_lengths_differ_by_doublings():
    lengths = [length_class(x) for x in (0, SHORT_TOKENS - 1, SHORT_TOKENS, 1023, 1024, 8192)]
    assert lengths == [0, 0, 1, 1, 2, 5]


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 9))
def test_the_whole_line_is_that_of_one_choice_after_another(lengths: list[int], num_begun: int):
    line, expected = list(enumerate(lengths)), []
    left = list(line)
    while left:
        chosen = next_of(left, lambda x: x[1], num_begun + len(expected))
        left.remove(chosen)
        expected.append(chosen)
    assert in_turns(line, lambda x: x[1], num_begun) == expected


def test_equals_keep_their_order():
    assert in_turns("abcdefg", lambda x: 0, 0) == list("abcdefg")


class Clock:
    now = 0.0


SECONDS = {0: 1.0, 1: 20.0}  # that one of each length takes


def test_a_long_one_begins_in_bounded_time_however_many_short_ones_come():
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
def test_a_short_one_does_not_wait_for_ten_long_ones(num_begun: int):
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
):
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


async def take(line: TenantLine, payer: Payer, num_texts: int, order: list[str]) -> None:
    with line.place(payer):
        for _ in range(num_texts):
            async with line.turn(payer, 10):
                order.append(payer.tenant)
                await asyncio.sleep(0)


async def test_tenants_take_turns_by_their_weight() -> None:
    line, order = TenantLine(64), list[str]()
    requests = [take(line, Payer("many"), 10, order) for _ in range(20)]
    requests += [take(line, Payer("heavy", 3), 10, order) for _ in range(3)]
    await asyncio.gather(*requests, take(line, Payer("one"), 10, order))
    assert len(order) == 240
    early = order[:50]
    assert abs(early.count("one") - 10) <= 2 and abs(early.count("heavy") - 30) <= 3


async def test_turns_are_never_lost_however_clients_leave() -> None:
    chance, line, order = random.Random(7), TenantLine(64), list[str]()
    for _ in range(50):
        tasks = [asyncio.create_task(take(line, Payer(f"t{i % 3}"), 5, order)) for i in range(12)]
        for task in chance.sample(tasks, 8):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
    order.clear()
    async with asyncio.timeout(5):
        await take(line, Payer("last"), 2, order)
    assert order == ["last"] * 2
