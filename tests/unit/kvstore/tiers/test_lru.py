from __future__ import annotations

from kvstore.tiers.lru import IndexUpdate, RecencyEntry, RecencyIndex


def filled(capacity: int, *keys: bytes) -> RecencyIndex:
    """Keys of ten bytes each, entered one by one: the last one is the most recent."""
    index = RecencyIndex(capacity)
    for key in keys:
        index.insert(key, 10)
    return index


def test_add_says_what_comes_and_what_goes() -> None:
    index = filled(30, b"a", b"b", b"c")
    update = index.add({b"b": 10, b"d": 10})
    assert update.added == [b"d"]
    assert [key for key, _ in update.evicted] == [b"a"]
    assert list(index) == [b"c", b"d", b"b"]
    assert index.nbytes == 30


def test_a_blob_that_gets_evicted_by_its_own_chain_is_added_afresh() -> None:
    index = filled(30, b"z", b"a", b"b")
    update = index.add({b"x": 25, b"z": 5})
    assert update.added == [b"x", b"z"]
    assert [key for key, _ in update.evicted] == [b"z", b"a", b"b"]
    assert index.nbytes == 30


def test_add_evicts_nothing_for_what_cannot_fit() -> None:
    index = filled(30, b"a", b"b", b"c")
    index.pin([b"a", b"b"])
    assert index.add({b"d": 11}) == IndexUpdate([], [])
    assert index.nbytes == 30


def test_undo_restores_order_and_stamps() -> None:
    index = filled(30, b"a", b"b", b"c")
    before = {key: index.entry(key) for key in index}
    update = index.add({b"x": 15})
    index.undo(update)
    assert {key: index.entry(key) for key in index} == before
    assert list(index) == [b"a", b"b", b"c"]
    assert index.nbytes == 30


def test_undo_puts_an_evicted_key_that_was_pinned_meanwhile_among_the_pinned() -> None:
    index = filled(20, b"a", b"b")
    update = index.add({b"x": 15})
    index.pin([b"a"])
    index.undo(update)
    assert [key for key, _ in index.add({b"y": 10}).evicted] == [b"b"]
    assert b"a" in index


def test_stamps_grow_with_every_use_and_follow_the_order() -> None:
    index = filled(100, b"a", b"b", b"c")
    index.touch([b"a", b"b"])
    stamps = [index.entry(key).stamp for key in index]  # type: ignore[union-attr]
    assert stamps == sorted(stamps)
    assert list(index) == [b"c", b"b", b"a"]


def test_persisted_stamps_are_taken_over_and_continued() -> None:
    index = RecencyIndex(100)
    index.insert(b"a", 10, stamp=7)
    index.insert(b"b", 10, stamp=1000)
    index.insert(b"c", 10)
    assert index.entry(b"a") == RecencyEntry(10, 7)
    assert index.entry(b"c") == RecencyEntry(10, 1001)


def test_shrink_leaves_the_pinned_even_above_the_budget() -> None:
    index = filled(15, b"a", b"b", b"c")
    index.pin([b"a", b"c"])
    assert [key for key, _ in index.shrink()] == [b"b"]
    assert index.nbytes == 20


def test_what_is_not_there_has_no_entry() -> None:
    index = RecencyIndex(10)
    assert index.entry(b"a") is None
    assert index.remove(b"a") is None
    index.touch([b"a"])
    assert (len(index), index.nbytes) == (0, 0)


def test_evict_takes_the_least_recent_and_stops_at_what_is_spared() -> None:
    index = RecencyIndex(100)
    for key in (b"a", b"b", b"c", b"d"):
        index.insert(key, 10)
    index.pin([b"a"])
    assert [key for key, _ in index.evict(11, {b"d"})] == [b"b", b"c"]
    assert index.evict(1, {b"d"}) == []
    assert (sorted(index), index.nbytes) == ([b"a", b"d"], 20)
