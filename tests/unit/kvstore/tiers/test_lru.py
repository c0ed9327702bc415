from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.tenant_bytes import TenantLimits, TenantUse
from kvstore.tiers.base import MAX_REMEMBERED, EvictionCauses
from kvstore.tiers.lru import IndexUpdate, RecencyEntry, RecencyIndex
from kvstore.tiers.tenant_parts import ACTIVE_S
from tests.clock import Clock


def filled(capacity: int, *keys: bytes) -> RecencyIndex:
    """Keys of ten bytes each, entered one by one: the last one is the most recent."""
    index = RecencyIndex(capacity)
    for key in keys:
        index.insert(key, 10)
    return index


def test_add_lists_the_keys_that_come_and_go():
    index = filled(30, b"a", b"b", b"c")
    update = index.add({b"b": 10, b"d": 10})
    assert update.added == [b"d"]
    assert [key for key, _ in update.evicted] == [b"a"]
    assert list(index) == [b"c", b"d", b"b"]
    assert index.nbytes == 30


def test_a_blob_that_gets_evicted_by_its_own_chain_is_added_afresh():
    index = filled(30, b"z", b"a", b"b")
    update = index.add({b"x": 25, b"z": 5})
    assert update.added == [b"x", b"z"]
    assert [key for key, _ in update.evicted] == [b"z", b"a", b"b"]
    assert index.nbytes == 30


def test_add_evicts_nothing_for_a_key_that_cannot_fit():
    index = filled(30, b"a", b"b", b"c")
    index.pin([b"a", b"b"])
    assert index.add({b"d": 11}) == IndexUpdate([], [])
    assert index.nbytes == 30


def test_undo_restores_order_and_stamps():
    index = filled(30, b"a", b"b", b"c")
    before = {key: index.entry(key) for key in index}
    update = index.add({b"x": 15})
    index.undo(update)
    assert {key: index.entry(key) for key in index} == before
    assert list(index) == [b"a", b"b", b"c"]
    assert index.nbytes == 30


def test_undo_puts_an_evicted_key_that_was_pinned_meanwhile_among_the_pinned():
    index = filled(20, b"a", b"b")
    update = index.add({b"x": 15})
    index.pin([b"a"])
    index.undo(update)
    assert [key for key, _ in index.add({b"y": 10}).evicted] == [b"b"]
    assert b"a" in index


def test_stamps_grow_with_every_use_and_follow_the_order():
    index = filled(100, b"a", b"b", b"c")
    index.touch([b"a", b"b"])
    stamps = [index.entry(key).stamp for key in index]  # type: ignore[union-attr]
    assert stamps == sorted(stamps)
    assert list(index) == [b"c", b"b", b"a"]


def test_persisted_stamps_are_taken_over_and_continued():
    index = RecencyIndex(100)
    index.insert(b"a", 10, stamp=7)
    index.insert(b"b", 10, stamp=1000)
    index.insert(b"c", 10)
    assert index.entry(b"a") == RecencyEntry(10, 7)
    assert index.entry(b"c") == RecencyEntry(10, 1001)


def test_shrink_leaves_the_pinned_even_above_the_budget():
    index = filled(15, b"a", b"b", b"c")
    index.pin([b"a", b"c"])
    assert [key for key, _ in index.shrink()] == [b"b"]
    assert index.nbytes == 20


def test_an_absent_key_has_no_entry():
    index = RecencyIndex(10)
    assert index.entry(b"a") is None
    assert index.remove(b"a") is None
    index.touch([b"a"])
    assert (len(index), index.nbytes) == (0, 0)


def test_evict_takes_the_least_recent_and_stops_at_spared_keys():
    index = RecencyIndex(100)
    for key in (b"a", b"b", b"c", b"d"):
        index.insert(key, 10)
    index.pin([b"a"])
    assert [key for key, _ in index.evict(11, {b"d"})] == [b"b", b"c"]
    assert index.evict(1, {b"d"}) == []
    assert (sorted(index), index.nbytes) == ([b"a", b"d"], 20)


# ---- tenants


def test_who_is_away_for_longer_than_a_day_has_no_part():
    clock = Clock(0.0)
    index = RecencyIndex(100, 0.5, clock)
    index.add({b"q1": 10, b"q2": 10}, "quiet")
    clock.now = ACTIVE_S - 1
    index.add({b"g%d" % i: 10 for i in range(20)}, "greedy")
    assert {b"q1", b"q2"} <= set(index)
    clock.now = ACTIVE_S + 1
    index.add({b"g%d" % i: 10 for i in range(20, 30)}, "greedy")
    assert not {b"q1", b"q2"} & set(index)


def test_a_touch_keeps_a_tenant_active():
    clock = Clock(0.0)
    index = RecencyIndex(100, 0.5, clock)
    index.add({b"q1": 10}, "quiet")
    clock.now = ACTIVE_S - 1
    index.touch([b"q1"])
    clock.now = 2 * ACTIVE_S - 2
    index.add({b"g%d" % i: 10 for i in range(20)}, "greedy")
    assert b"q1" in index


def test_a_part_that_began_in_an_earlier_run_ends_a_day_after_its_tenants_last_use():
    clock = Clock(0.0)
    index = RecencyIndex(100, 0.5, clock)
    index.insert(b"q1", 10)
    index.insert(b"r1", 10)
    index.own("new", [b"r1"], 0.0)
    index.own("quiet", [b"q1"], ACTIVE_S - 10)  # after one that was used later
    clock.now = 9
    index.add({b"g%d" % i: 10 for i in range(20)}, "greedy")
    assert {b"q1", b"r1"} <= set(index)
    clock.now = 11
    index.add({b"g%d" % i: 10 for i in range(20, 30)}, "greedy")
    assert b"q1" not in index and b"r1" in index


def test_bytes_that_others_pin_are_not_taken_from_the_writer():
    index = RecencyIndex(100, 0.5)
    index.add({b"p": 70}, "pins")
    index.pin([b"p"])
    index.add({b"a": 25}, "a")
    assert index.add({b"b": 25}, "b").added == []  # a's part, and the pinned bytes
    entry = index.entry(b"a")
    assert index.add({b"a2": 20}, "a") == IndexUpdate([b"a2"], [(b"a", entry)])
    assert index.nbytes == 90


NAMES = st.sampled_from("abc")
CHAINS = st.dictionaries(
    st.integers(0, 40).map(lambda i: b"%d" % i), st.integers(1, 20), min_size=1, max_size=12
)


@given(st.lists(st.tuples(NAMES, CHAINS), max_size=40), st.sampled_from((0.2, 0.5, 1.0)))
@example([("a", {b"0": 20, b"1": 20}), ("a", {b"0": 1, b"1": 1, b"2": 41})], 0.2)
@example([("c", {b"0": 1}), ("a", {b"0": 30}), ("c", {b"1": 71, b"0": 20})], 0.2)
def test_no_tenant_takes_the_part_of_another(
    writes: list[tuple[str, dict[bytes, int]]], share: float
):
    index = RecencyIndex(100, share)
    for owner, chain in writes:
        sizes = {owner.encode() + key: nbytes for key, nbytes in chain.items()}
        before = held(index)
        # A key that is there keeps its size, unless its own chain evicts it and adds it again.
        known = {key: entry.nbytes for key in sizes if (entry := index.entry(key))}
        most = sum(max(nbytes, known.get(key, 0)) for key, nbytes in sizes.items())
        fits = most <= 100 - 100 * share
        update = index.add(sizes, owner)
        after = held(index)
        assert index.nbytes == sum(after.values()) <= 100
        assert not fits or set(sizes) <= set(index)
        for name in set(before) - {owner}:
            lost = sum(x.nbytes for _, x in update.evicted if x.owner == name)
            biggest = max((x.nbytes for _, x in update.evicted if x.owner == name), default=0)
            assert before[name] - lost == after.get(name, 0)
            # A third, since there are never more; less by the blob that straddles its border.
            assert not lost or after.get(name, 0) > 100 * share / 3 - biggest


def held(index: RecencyIndex) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key in index:
        entry = index.entry(key)
        assert key.startswith(entry.owner.encode())
        sums[entry.owner] = sums.get(entry.owner, 0) + entry.nbytes
    return sums


def test_the_tiers_room_is_the_cause_where_no_tenant_has_a_part():
    index = RecencyIndex(30)
    index.add({b"a": 10, b"b": 10, b"c": 10}, "one")
    index.add({b"d": 10}, "two")
    assert index.why_evicted([b"a", b"b", b"c", b"d"]) == [None, None, "budget", None]


def test_the_share_is_the_cause_where_another_tenant_needs_the_room():
    index = RecencyIndex(40, 0.5)
    for key in (b"a", b"b", b"c", b"d"):
        index.add({key: 10}, "one")
    index.add({b"e": 10}, "two")
    assert index.why_evicted([b"a", b"e"]) == ["share", None]
    index.add({b"a": 10}, "one")  # and it is here again
    assert index.why_evicted([b"a"]) == [None]


def test_one_tenant_alone_makes_way_for_itself_because_of_the_room():
    index = RecencyIndex(30, 0.5)
    for key in (b"a", b"b", b"c", b"d"):
        index.add({key: 10}, "one")
    assert index.why_evicted([b"a"]) == ["budget"]


def test_the_share_is_the_cause_while_older_entries_are_guaranteed():
    index = RecencyIndex(40, 0.5)
    index.add({b"a": 10}, "two")  # the oldest, and two's part
    for key in (b"b", b"c", b"d", b"e"):
        index.add({key: 10}, "one")
    assert index.why_evicted([b"a", b"b"]) == [None, "share"]


def test_the_room_is_the_cause_for_who_was_away_for_a_day():
    clock = Clock(0.0)
    index = RecencyIndex(30, 0.5, clock)
    index.add({b"a": 10}, "one")
    clock.now = ACTIVE_S + 1.0
    for key in (b"b", b"c", b"d"):
        index.add({key: 10}, "two")
    assert index.why_evicted([b"a"]) == ["budget"]


def test_only_so_many_causes_are_remembered():
    causes = EvictionCauses()
    for number in range(MAX_REMEMBERED + 1):
        causes.remember(number.to_bytes(4, "big"), "share")
    first, last = (0).to_bytes(4, "big"), MAX_REMEMBERED.to_bytes(4, "big")
    assert causes.of([first, last]) == [None, "share"]


def limited(**named: int) -> RecencyIndex:
    index = RecencyIndex(1000)
    index.limit(TenantLimits(named))
    return index


def test_a_tenants_oldest_keys_make_way_for_its_new_ones():
    index = limited(a=30)
    index.add({b"b": 500}, "b")
    for key in (b"1", b"2", b"3"):
        index.add({key: 10}, "a")
    update = index.add({b"4": 20}, "a")
    assert [key for key, _ in update.evicted] == [b"1", b"2"]
    assert index.why_evicted([b"1", b"b"]) == ["limit", None]
    limits = TenantLimits({"a": 30})
    assert index.take_uses(limits) == {"a": TenantUse(30, 20)}
    assert index.take_uses(limits) == {"a": TenantUse(30, 0)}


def test_a_key_that_its_owners_limit_has_no_room_for_is_refused():
    index = limited(a=30)
    index.pin([b"pinned"])
    index.add({b"pinned": 25}, "a")
    assert index.add({b"large": 10}, "a") == IndexUpdate([], [])
    assert index.take_uses(TenantLimits({"a": 30})) == {"a": TenantUse(25, 10)}


def test_a_chain_beyond_its_owners_limit_keeps_its_head():
    index = limited(a=30)
    update = index.add({b"1": 20, b"2": 20, b"3": 10}, "a")
    assert (update.added, update.evicted) == ([b"1", b"3"], [])


def test_a_lower_limit_evicts_at_once():
    index = limited(a=30)
    for key in (b"1", b"2", b"3"):
        index.add({key: 10}, "a")
    assert [key for key, _ in index.limit(TenantLimits({"a": 10}))] == [b"1", b"2"]
    assert index.limit(TenantLimits()) == []
    assert index.take_uses(TenantLimits()) == {}


def test_limits_that_only_ask_what_is_held_leave_those_in_force():
    index = limited(a=30)
    index.add({b"1": 10}, "a")
    index.add({b"b": 500}, "b")
    asked = TenantLimits({"a": 0}, others=0, counts_only=True)
    assert index.limit(asked) == []
    assert index.take_uses(asked) == {"a": TenantUse(10), "b": TenantUse(500)}
    assert index.add({b"2": 20}, "a").evicted == []
    assert [key for key, _ in index.add({b"3": 10}, "a").evicted] == [b"1"]


def test_a_named_tenant_may_hold_any_number_where_others_may_not():
    index = RecencyIndex(1000)
    limits = TenantLimits({"free": None}, others=10)
    index.limit(limits)
    assert index.add({b"f": 500}, "free").added == [b"f"]
    assert index.add({b"a": 500}, "a").added == []
    assert index.take_uses(limits) == {"a": TenantUse(0, 500)}


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", ""]), st.integers(1, 40), st.booleans()), max_size=80
    ),
    st.integers(0, 200),
)
def test_no_tenant_ever_holds_more_than_its_limit(writes: list[tuple[str, int, bool]], most: int):
    index = RecencyIndex(300, 0.5)
    index.limit(TenantLimits({"a": most}, others=100))
    held = dict.fromkeys(("a", "b", ""), 0)
    for number, (owner, nbytes, pinned) in enumerate(writes):
        key = str(number).encode()
        if pinned:
            index.pin([key])
        update = index.add({key: nbytes, key + b"+": nbytes}, owner)
        for _, entry in update.evicted:
            held[entry.owner] -= entry.nbytes
        for added in update.added:
            entry = index.entry(added)
            held[owner] += entry.nbytes if entry else 0
        assert held["a"] <= most and held["b"] <= 100
        assert sum(held.values()) == index.nbytes <= 300
