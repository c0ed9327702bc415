"""Bringing sessions to slower tiers: order, bounds, and deliveries that are made good later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any

import pytest
from msgspec.structs import replace

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import RECORD, STATE
from kvstore.ledger.stack import TierStack
from kvstore.ledger.writing import Delivery, WriteBehind, deliver
from kvstore.stats import Counters
from kvstore.tiers.base import Tier
from kvstore.tiers.ram_tier import RamTier
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import CHUNK, begin_save, come_back, open_store, ram, ref, save, tokens

HISTORY = tokens(200)
KEYS = [CHUNK_KIND + bytes([i]) * 32 for i in range(40)]
RECORD_KEY = RECORD + bytes(32)
OLD_STATE = STATE + bytes(32)


def delivery(keys=KEYS, fresh=KEYS, obsolete=(), record=b"new", record_key=RECORD_KEY) -> Delivery:
    blobs = dict.fromkeys(fresh, b"blob")
    return Delivery(record_key, record, keys, blobs, obsolete, done=Future())


def stack_of(*tiers) -> TierStack:
    return TierStack(tiers, Counters())


def slow() -> FaultyTier:
    return FaultyTier(ram(), "disk")


@pytest.fixture
def behind() -> Iterator[Callable[..., WriteBehind]]:
    """Opens queues for the second of two tiers, and closes them at the end."""
    with ExitStack() as stack:

        def open(near: Tier, far: Tier, max_bytes: int = 1 << 20, **more: Any) -> WriteBehind:
            more = {"counters": Counters()} | more
            queue = WriteBehind(stack_of(near, far), 1, max_bytes, **more)
            return stack.enter_context(closing(queue))

        yield open


def test_the_record_is_written_last_and_the_obsolete_go_after_it():
    tier = slow()
    tier.inner.put_many([(KEYS[0], b"blob"), (OLD_STATE, b"old state")])
    assert deliver(stack_of(tier), 0, delivery(obsolete=[OLD_STATE]), whole=True) == (True, True)
    calls = [x for x in tier.calls if x not in ("touch", "contains_many")]
    assert calls == [*["put_many"] * 3, "replace", "delete_many"]
    assert tier.inner.contains_many([*KEYS, RECORD_KEY, OLD_STATE]) == [True] * 41 + [False]


def test_blobs_that_are_not_fresh_are_read_from_faster_tiers():
    near, far = ram(), slow()
    near.put_many([(x, b"blob") for x in KEYS[:30]])
    assert deliver(stack_of(near, far), 1, delivery(fresh=KEYS[30:]), whole=True) == (True, True)
    assert all(far.inner.contains_many(KEYS))


def test_blobs_that_no_tier_has_any_more_leave_part_of_the_session():
    near, far = ram(), slow()
    near.put_many([(x, b"blob") for x in KEYS[:30]])
    assert not deliver(stack_of(near, far), 1, delivery(fresh=[]), whole=True).complete
    assert far.inner.contains_many([RECORD_KEY, KEYS[29], KEYS[30]]) == [True, True, False]


@pytest.mark.parametrize("method", ["put_many", "replace"])
def test_a_tier_that_goes_away_keeps_its_older_record_and_state(method):
    tier = slow()
    tier.inner.put_many([(RECORD_KEY, b"old"), (OLD_STATE, b"old state")])
    tier.fails = lambda number, called: called == method
    assert not deliver(stack_of(tier), 0, delivery(obsolete=[OLD_STATE]), whole=True).complete
    assert tier.inner.get_many([RECORD_KEY, OLD_STATE]) == [b"old", b"old state"]


def test_a_session_larger_than_its_tier_keeps_its_head():
    tier = RamTier(20 * 558)
    assert not deliver(stack_of(tier), 0, delivery(), whole=True).complete
    held = tier.contains_many(KEYS)
    assert held.index(False) >= 15
    assert tier.contains_many([RECORD_KEY]) == [True]


def test_a_chain_that_grew_at_two_places_is_evicted_from_its_end():
    """A state goes between chunks that are held, and further chunks come after them."""
    tier = RamTier(60 * 300)
    deliver(stack_of(tier), 0, delivery(KEYS[:30], KEYS[:30]), whole=True)
    grown = delivery([*KEYS[:10], OLD_STATE, *KEYS[10:]], [OLD_STATE, *KEYS[30:]])
    assert deliver(stack_of(tier), 0, grown, whole=True).complete
    tier.put_many([(CHUNK_KIND + bytes([i]) * 32, b"blob") for i in range(100, 130)])
    held = tier.contains_many(KEYS)
    assert 0 < sum(held) < len(KEYS)
    assert held == sorted(held, reverse=True)


class AskedRam(RamTier):
    """Counts the keys that it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(1 << 26)
        self.name = name
        self.num_asked = 0

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        self.num_asked += len(keys)
        return super().contains_many(keys)

    def lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        self.num_asked += len(keys)
        return super().lengths(keys)


def test_a_save_looks_up_what_is_new_of_a_long_session():
    tiers, history = [AskedRam("ram"), AskedRam("disk")], tokens(401 * CHUNK)
    with closing(open_store(tiers)) as store:
        save(store, ref(), history[:-CHUNK])
        before = [x.num_asked for x in tiers]
        save(store, ref(), history)
        assert max(x.num_asked - y for x, y in zip(tiers, before, strict=True)) < 60
        sizes = [len(x) for _, x in tiers[1].scan(CHUNK_KIND)]
        assert (len(sizes), sum(sizes)) == (401, store.record(ref()).packed_bytes)


def test_a_tier_that_lost_the_end_of_a_chain_gets_all_that_it_lacks():
    near, far = ram(), slow()
    near.put_many([(x, b"blob") for x in KEYS])
    far.inner.put_many([(x, b"blob") for x in KEYS[:10]])
    grown = replace(delivery(fresh=KEYS[30:]), first=29)
    assert deliver(stack_of(near, far), 1, grown, whole=True) == (True, True)
    assert all(far.inner.contains_many(KEYS))


def test_the_next_delivery_brings_what_one_before_it_left_out(behind):
    near, far = ram(), slow()
    chain = [*KEYS[:10], OLD_STATE, *KEYS[10:]]
    near.put_many([(x, b"blob") for x in chain])
    far.inner.put_many([(x, b"blob") for x in KEYS[:20]])
    far.fails = lambda number, called: called == "put_many"
    queue = behind(near, far)
    queue.offer(first := replace(delivery(chain[:21], [OLD_STATE]), first=9))
    assert not first.done.result(5)
    far.fails = lambda number, called: False
    queue.offer(second := replace(delivery(chain, KEYS[20:]), first=20))
    assert second.done.result(5)
    assert all(far.inner.contains_many(chain))


@pytest.mark.parametrize("key", [RECORD_KEY, b"r2"], ids=["the same session", "another"])
def test_a_full_queue_refuses_and_says_who_is_behind(behind, key):
    """An older delivery of the session that ends well does not hide it."""
    tier, counters = slow(), Counters()
    tier.hang("put_many")
    queue = behind(ram(), tier, 400, counters=counters)
    older, newer = delivery(), delivery(record=b"n" * 1000, record_key=key)
    queue.offer(older)
    assert tier.entered.wait(10)
    queue.offer(newer)
    assert newer.done.result(10) is False
    tier.go_on.set()
    assert older.done.result(10) is True
    assert queue.wait_idle(10) and queue.nbytes == 0
    assert queue.take_behind() == {key}
    assert counters.as_dict() == {"behind.disk": 1}


def test_of_a_tier_that_stays_away_only_so_many_sessions_are_remembered(behind):
    tier = slow()
    tier.fails = lambda number, method: True
    queue = behind(ram(), tier, max_behind=3)
    for name in (b"r1", b"r2", b"r3", b"r1", b"r4"):
        queue.offer(late := delivery(record_key=name))
        assert late.done.result(5) is False
    assert queue.take_behind() == {b"r1", b"r3", b"r4"}


def test_what_another_session_has_taken_over_since_is_not_deleted(behind):
    tier, kept, gone = ram(), *(CHUNK_KIND + bytes([i]) * 32 for i in (98, 99))
    tier.put_many([(kept, b"blob"), (gone, b"blob")])
    queue = behind(ram(), tier, unused=lambda keys: [x for x in keys if x != kept])
    queue.offer(delivery(obsolete=[kept, gone]))
    assert queue.wait_idle(5)
    assert tier.contains_many([kept, gone]) == [True, False]


def test_a_closed_queue_refuses_deliveries(behind):
    queue = behind(ram(), slow())
    queue.close()
    queue.offer(late := delivery())
    assert late.done.result(5) is False


@pytest.mark.parametrize("by", ["a flush", "the next save", "a demotion"])
def test_a_tier_that_was_down_is_caught_up(opened, by):
    tier = slow()
    store = opened([ram(), tier])
    tier.fails = lambda number, method: True
    begin_save(store, ref(), HISTORY[:100])
    store.flush(10)
    assert store.demote(ref(), "disk") == "ram"
    assert store.stats().counters["behind.disk"] >= 1
    assert not any(tier.inner.scan(b""))
    tier.fails = lambda number, method: False
    if by == "the next save":
        save(store, ref(), HISTORY)
    elif by == "a flush":
        assert store.flush(200)
        assert all(tier.inner.contains_many(store.ledger.index.blob_keys(store.record(ref()))))
    assert store.demote(ref(), "disk") == "disk"
    assert come_back(store, ref(), HISTORY)[1].num_tokens == (192 if by == "the next save" else 96)
