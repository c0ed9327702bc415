"""The eviction order: what it keeps, and that no sequence of uses spoils its books."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.session import TenantLimits
from kvstore.tiers.return_order import ReturnOrder, stated_size
from kvstore.tiers.runs import links_before


class Clock:
    """Moves on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def chain(name: str, num: int, *, shared: int = 0) -> dict[bytes, int]:
    """``num`` links of ten bytes each, of which the first ``shared`` are in other chains, too."""
    names = (f"c shared {i}" if i < shared else f"c {name} {i}" for i in range(num))
    return {name.encode(): 10 for name in names}


def order_of(capacity_bytes: int, **limits: int) -> ReturnOrder[int]:
    order = ReturnOrder(capacity_bytes, Clock(), stated_size)
    order.limit(TenantLimits(dict(limits)))
    return order


def held(order: ReturnOrder[int], keys: dict[bytes, int]) -> int:
    """How many keys of a chain are held; checks that they are its beginning."""
    flags = [key in order for key in keys]
    assert flags == sorted(flags, reverse=True), "a hole"
    return sum(flags)


def turn(
    order: ReturnOrder[int], keys: dict[bytes, int], owner: str = "", record: bytes = b""
) -> int:
    """Restore what is held of a session and save the rest; returns how many keys came back."""
    back = held(order, keys)
    order.touch([record, *keys])
    order.add(keys, owner)
    last = list(keys)[held(order, keys) - 1] if held(order, keys) else b""
    if record:
        order.replace(record, 3, owner, last)
    order.touch([record, *keys], restored=False)
    return back


def resized(order: ReturnOrder[int], capacity_bytes: int) -> list[bytes]:
    order.capacity_bytes = capacity_bytes
    return order.evict()


def names(name: str, *numbers: int) -> list[bytes]:
    return [f"c {name} {i}".encode() for i in numbers]


# ---- chains


def test_add_says_which_keys_come_and_go():
    order = order_of(50)
    assert order.add(chain("a", 3)) == (names("a", 0, 1, 2), [])
    update = order.add(chain("b", 4))
    assert update.added == names("b", 0, 1, 2, 3)
    assert update.evicted == names("a", 2, 1)
    assert order.nbytes == 50


def test_a_chain_never_evicts_its_own_blobs():
    order = order_of(50)
    update = order.add(chain("a", 9))
    assert (len(update.added), update.evicted) == (5, [])
    assert turn(order, chain("a", 9)) == 5


def test_a_chain_keeps_its_head_when_what_is_held_of_it_has_another_owner():
    """An order of last use with owners evicted ``p`` for ``b``, which is useless without it."""
    order = order_of(100)
    order.add({b"c p": 60}, "s")
    order.add({b"c a": 40}, "t")
    order.add({b"c p": 60, b"c b": 40}, "t")
    assert b"c p" in order
    assert b"c b" in order


def test_a_chain_may_be_entered_piece_by_piece():
    order = order_of(1000)
    keys = list(chain("a", 8))
    order.add(dict.fromkeys(keys[:3], 10))
    order.add(dict.fromkeys(keys[3:5], 10), after=keys[2])
    order.add(dict.fromkeys(keys[5:], 10), after=keys[4])
    assert held(order, chain("a", 8)) == 8
    assert len(set(order._runs.of.values())) == 1
    assert order.add(chain("b", 1), after=b"c absent") == ([], [])


def test_what_several_chains_share_outlives_each_of_them():
    order = order_of(60)
    order.add(chain("a", 4, shared=2))
    order.add(chain("b", 4, shared=2))
    order.add(chain("c", 4))
    assert held(order, chain("x", 2, shared=2)) == 2
    assert order.nbytes == 60


def test_the_order_costs_nothing_for_what_was_there_before():
    order = order_of(10**9)
    keys = list(chain("a", 5000))
    order.add(dict.fromkeys(keys, 10))
    seen = 0

    class Counted(dict):
        def get(self, key, default=None):
            nonlocal seen
            seen += 1
            return super().get(key, default)

    order._runs.of = Counted(order._runs.of)
    order.touch([b"r", *keys])
    order.add({b"c new": 10}, after=keys[-1])
    assert seen < 10


# ---- records and states


def test_a_record_goes_after_all_links_of_its_session():
    order = order_of(100)
    turn(order, chain("a", 9), record=b"r a")
    order.add(chain("b", 9))
    assert b"r a" in order
    assert held(order, chain("a", 9)) == 0
    order.add(chain("d", 9))
    assert b"r a" not in order


def test_a_record_moves_with_its_session_to_another_branch():
    order = order_of(200)
    turn(order, chain("a", 8, shared=4), record=b"r a")
    turn(order, chain("b", 8, shared=4), record=b"r a")
    order.remove(names("a", 4))
    assert b"r a" in order
    assert order._runs.of[b"r a"] is order._runs.of[names("b", 7)[0]]


def test_records_of_equal_chains_can_go_one_by_one():
    order = order_of(40)
    for number in range(9):
        turn(order, chain("x", 2, shared=2), record=b"r %d" % number)
    assert held(order, chain("x", 2, shared=2)) == 2
    assert sum(b"r %d" % i in order for i in range(9)) == 6
    assert b"r 8" in order


def test_a_state_goes_with_the_links_after_which_it_was_entered():
    order = order_of(75)
    keys = list(chain("a", 6))
    order.add(dict.fromkeys(keys[:4], 10))
    order.add({b"s 4": 5}, after=keys[3])
    order.add(dict.fromkeys(keys[4:], 10), after=keys[3])
    order.add({b"s 6": 5}, after=keys[5])
    assert order.add(chain("b", 2)).evicted == [b"s 6", keys[5]]
    assert len(set(map(id, map(order._runs.of.get, keys[:5])))) == 1  # a state parts no run
    assert order.remove(keys[4:5]) == keys[4:5]
    assert b"s 4" in order  # it may be of use with what is left
    assert order.remove([b"s 4"]) == [b"s 4"]
    assert held(order, chain("a", 5)) == 4


def test_a_chain_that_comes_back_to_its_state_does_not_come_after_itself():
    order = order_of(200)
    first, second, third = chain("a", 3)
    order.add({first: 10, b"s 1": 5, second: 10, third: 10})
    order.add({b"c branch": 10}, after=first)
    assert order.evict(20) == [third, second]
    order.add({b"s 1": 5, second: 10}, after=first)
    check(order)
    order.evict(200)
    assert len(order) == 0


def test_a_state_that_a_chain_left_behind_can_be_evicted():
    order = order_of(200)
    first, second = chain("a", 2)
    order.add({first: 10, b"c other": 10})
    order.add({b"s 1": 5}, after=first)
    for record in (b"r 1", b"r 2"):
        order.replace(record, 3, "", b"s 1")
    order.add({second: 10}, after=b"s 1")
    order.replace(b"r 3", 3, "", second)
    order.touch([b"c other"])
    order.remove([b"r 1", b"r 2"])
    assert order.evict(10) == [second]
    order.add({second: 10}, after=first)
    check(order)
    order.evict(200)
    assert len(order) == 0


# ---- sessions in turn, and other traffic


@pytest.mark.parametrize(("sessions", "at_least"), [(21, 17), (24, 16), (38, 16), (76, 16)])
def test_sessions_in_turn_on_too_little_room_do_not_throw_each_other_out(sessions, at_least):
    order = order_of(19 * 43)
    for _ in range(2):
        for s in range(sessions):
            turn(order, chain(str(s), 4), record=b"r %d" % s)
    for _ in range(10):
        back = [turn(order, chain(str(s), 4), record=b"r %d" % s) for s in range(sessions)]
        assert back.count(4) >= at_least


@pytest.mark.parametrize(
    ("order", "num_turns", "at_least"),
    [
        (order_of(19 * 40), 5, 12),  # several turns of one session at a time
        (ReturnOrder(19 * 40, lambda: 7.0, stated_size), 1, 16),  # the clock stands still
        (order_of(24 * 40), 1, 24),  # all of them fit
    ],
)
def test_sessions_in_turn_come_back(order, num_turns, at_least):
    for _ in range(6):
        back = [[turn(order, chain(str(s), 4)) for _ in range(num_turns)][0] for s in range(24)]
    assert back.count(4) >= at_least


def test_sessions_in_turn_that_are_hot_and_only_saved_are_uses_all_the_same():
    order = order_of(19 * 40)
    for _ in range(6):
        for s in range(24):
            order.add(chain(str(s), 4))
            order.touch(list(chain(str(s), 4)), restored=False)
    back = [held(order, chain(str(s), 4)) for s in range(24)]
    assert back.count(4) >= 16


def test_prompts_that_never_return_do_not_throw_out_those_that_do():
    order = order_of(10 * 40)
    for i in range(60):
        back = turn(order, chain(f"steady{i % 6}", 4))
        order.add(chain(f"once{i}", 4))
        assert back == 4 or i < 12


def test_sessions_of_the_morning_make_way_for_those_of_noon():
    order = order_of(8 * 40)
    for part in ("morning", "noon"):
        for _ in range(12):
            back = [turn(order, chain(f"{part}{s}", 4)) for s in range(8)]
    assert back.count(4) >= 7


# ---- pins


def test_a_pinned_session_goes_last_and_grows_pinned():
    order = order_of(63)
    pinned, record = chain("a", 3), b"r a"
    order.pin(record, True)
    order.add(dict(list(pinned.items())[:2]))
    order.replace(record, 3, after=names("a", 1)[0])
    order.add(chain("b", 3))
    order.add({names("a", 2)[0]: 10}, after=names("a", 1)[0])
    assert order.add(chain("d", 3)).evicted == names("b", 2, 1, 0)
    assert held(order, pinned) == 3
    order.pin(record, False)
    order.add(chain("f", 3))
    assert len(order.add(chain("g", 6)).added) == 6
    assert held(order, pinned) == 0
    assert order.pins == set()
    check(order)


def test_a_pin_stays_with_its_session_when_another_one_shares_its_chain():
    order = order_of(100)
    order.pin(b"r a", True)
    for name in ("a", "b"):
        order.add(chain(name, 4, shared=2))
        order.replace(b"r " + name.encode(), 3, after=names(name, 3)[0])
    check(order)
    order.add(chain("d", 5))
    assert held(order, chain("a", 4, shared=2)) == 4
    assert held(order, chain("b", 4, shared=2)) == 2
    check(order)


# ---- tenants


def test_a_lower_limit_evicts_at_once_and_pinned_blobs_last():
    order = order_of(200)
    order.pin(names("a", 0)[0], True)
    order.add(chain("a", 3), "t")
    order.add(chain("b", 3), "t")
    order.add(chain("d", 3), "u")
    assert order.limit(TenantLimits({"t": 30})) == names("b", 2, 1, 0)
    assert order.limit(TenantLimits({"t": 10})) == names("a", 2, 1)
    assert order.causes[names("b", 2)[0]] == "limit"
    assert order.uses(TenantLimits({"t": 10})) == {"t": 10}
    assert held(order, chain("d", 3)) == 3


# ---- removal, undoing, other sizes


def test_remove_takes_what_continues_a_link_and_leaves_what_comes_before():
    order = order_of(1000)
    order.add(chain("a", 4, shared=2))
    order.add(chain("b", 4, shared=2))
    assert order.remove(names("a", 2)) == names("a", 3, 2)
    assert held(order, chain("b", 4, shared=2)) == 4
    assert len(order.remove([b"c shared 1"])) == 3
    assert held(order, chain("b", 4, shared=2)) == 1
    order.remove([b"c shared 0", b"c absent"])
    assert order.nbytes == 0


def test_a_blob_of_another_size_takes_the_place_of_one_in_the_middle():
    order = order_of(100)
    order.add(chain("a", 6))
    order.add(chain("b", 3))
    (key,) = names("a", 2)
    update = order.replace(key, 25)
    assert update.added == [key]
    assert update.evicted == [key, b"c b 2"]
    assert held(order, chain("a", 6)) == 6
    assert held(order, chain("b", 3)) == 2
    order.replace(key, 5)
    assert order.nbytes == 75
    assert order.remove([key])[-1:] == [key]
    check(order)
    assert order.replace(names("a", 0)[0], 200).added == []
    assert held(order, chain("a", 6)) == 2


def test_a_smaller_budget_evicts_at_once():
    order = order_of(100)
    order.add(chain("a", 10))
    assert resized(order, 50) == names("a", 9, 8, 7, 6, 5)
    order.pin(names("a", 0)[0], True)
    assert len(resized(order, 20)) == 3
    assert order.evict(5, ()) == names("a", 1)
    assert order.evict(5, names("a", 0)) == []


# ---- restart


def restarted(order: ReturnOrder[int]) -> ReturnOrder[int]:
    """The order that a tier makes of what it finds, whose sizes and places come in any order."""
    before: dict[bytes, bytes] = {}
    for run in set(order._runs.of.values()):
        after = run.parent.end if run.parent else b""
        before |= links_before([x for x in run.keys if x[:1] != b"r"], after)
        before |= {x: run.end or after for x in run.keys if x[:1] == b"r"}
    again = ReturnOrder(order.capacity_bytes, order._clock, stated_size)
    sizes = {key: order._runs.of[key].keys[key] for key in sorted(before)}
    again.load(sizes, {key: before[key] for key in sizes})
    check(again)
    assert set(again.keys(b"")) == set(order.keys(b""))
    return again


def test_blobs_of_an_earlier_life_go_in_the_order_in_which_they_get_their_owner():
    order = order_of(100)
    keys = {name: chain(name, 3) for name in ("a", "b", "orphan")}
    order.load(
        {key: 10 for x in keys.values() for key in x},
        {key: after for x in keys.values() for key, after in links_before(x, b"").items()},
    )
    order.own("t", keys["b"])
    order.own("t", keys["a"])
    assert order.uses(TenantLimits(others=1)) == {"t": 60}
    for name in ("orphan", "b", "a"):
        assert order.evict(30) == names(name, 2, 1, 0)
        check(order)


# ---- any sequence


def check(order: ReturnOrder[int]) -> None:
    """The invariants: sums, budget, orders, chains without holes."""
    runs = set(order._runs.of.values())
    sizes = {key: nbytes for run in runs for key, nbytes in run.keys.items()}
    assert sizes.keys() == order._runs.of.keys()
    assert sum(sizes.values()) == order.nbytes <= order.capacity_bytes
    assert order._kept_bytes == sum(run.nbytes for run in runs if run.is_kept)
    of_owner: Counter[str] = Counter()
    for run in runs:
        of_owner[run.owner] += run.nbytes
        assert run.keys and not run.is_busy
        assert run.nbytes == sum(run.keys.values())
        links = [key for key in run.keys if key[:1] == b"c"]
        assert not links or run.first == links[0]
        assert not links or run.end == links[-1]
        assert all(child.parent is run and child in runs for child in run.children)
        assert run.parent is None or (run.parent in runs and run in run.parent.children)
        is_pinned = run.head in order.pins
        expected = [not is_pinned and not run.is_kept, not is_pinned and run.is_kept, is_pinned]
        assert [run in x for x in order._orders] == [x and not run.children for x in expected]
        assert (run in order._of[run.owner]) == (not run.children)
    assert +order._held == +of_owner
    assert sum(map(len, order._orders)) == sum(map(len, order._of.values()))
    for owner, nbytes in of_owner.items():
        assert nbytes <= (order._limits.of(owner) or nbytes)
    assert order._lru_bytes == sum(order._lru.values()) <= order.capacity_bytes
    assert not order._runs.gone.keys() & order._runs.of.keys()


steps = st.lists(
    st.tuples(
        st.sampled_from(["turn"] * 4 + ["touch", "pin", "unpin", "remove", "fail", "put", "state"]),
        st.integers(0, 5),  # the session
        st.integers(1, 12),  # its length
        st.integers(0, 3),  # how much of it is shared, by the three with that parity
    ),
    max_size=60,
)


@given(steps, st.integers(20, 400))
def test_any_sequence_of_uses_keeps_the_books(uses, capacity_bytes):
    order = order_of(capacity_bytes, t1=100)
    for verb, session, num, shared in uses:
        name = [f"c {session % 2} {i}" if i < shared else f"c {session} {shared} {i}"
                for i in range(num)]  # fmt: skip
        keys = {key.encode(): 10 + i % 3 for i, key in enumerate(name)}
        owner, record = f"t{session % 2}", f"r {session}".encode()
        last = list(keys)[max(held(order, keys) - 1, 0)]
        if verb == "turn":
            turn(order, keys, owner, record)
        elif verb == "touch":
            order.touch(list(keys)[session % 2 :])
        elif verb in ("pin", "unpin"):
            order.pin(record, verb == "pin")
        elif verb == "remove":
            order.remove([*keys, record] if num % 2 else [last])
        elif verb == "fail":
            update = order.add(keys, owner)
            written = update.added[: num % 3]
            order.remove(update.added[len(written) :])
        elif verb == "put" and last in order:
            order.replace(last, num * 3, owner)
        elif verb == "state":
            order.add({f"s {session} {num}".encode(): 4}, owner, last)
        held(order, keys)
        check(order)
    again = restarted(order)
    again.evict(10**9, ())
    assert (again.nbytes, len(again)) == (0, 0)


def test_what_chains_shared_stays_a_run_of_its_own_when_none_goes_on_from_it():
    """Else the next one that does would be judged by the uses of all before it."""
    order = order_of(1000)
    for name in "ab":
        order.add(chain(name, 4, shared=2))
    for name in "ab":
        order.remove(list(chain(name, 4, shared=2))[2:])
    order.add(chain("x", 4, shared=2))
    runs = [order._runs.of[key] for key in chain("x", 4, shared=2)]
    assert runs[0] is runs[1] is not runs[2] is runs[3]
    assert not runs[0].is_spare
