"""Forgetting a session: nothing of its own is left anywhere."""

from __future__ import annotations

import threading

import pytest

from kvstore.blobs.chain import CHUNK
from kvstore.tiers.ram_tier import RamTier
from tests.clock import Clock
from tests.contract.store_rig import damage
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    begin_save,
    chain_of,
    everything,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)


class SlowRedis(RamTier):
    """A shared tier whose writes wait until ``gate`` is set."""

    name = "redis"

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.gate = threading.Event()
        self.gate.set()

    def put_many(self, *arguments, **options):
        self.gate.wait(10)
        return super().put_many(*arguments, **options)

    def replace(self, *arguments, **options):
        self.gate.wait(10)
        return super().replace(*arguments, **options)


def test_an_older_record_of_our_own_in_a_slow_tier_is_not_that_of_another_engine(opened):
    """Otherwise the newer record, which is on its way there, is forgotten with blobs of its own."""
    redis, memory = SlowRedis(), RamTier(1 << 24)
    store = opened([memory, redis])
    base = tokens(48)
    first, edited, last = ([*base, *tokens(n, n)] for n in (17, 18, 34))
    save(store, ref(), first)
    assert store.flush(200)
    redis.gate.clear()
    _saved_here(store, edited)
    store.match(ref(), chain_of(store, ref(), first))
    _saved_here(store, last)
    redis.gate.set()
    assert store.flush(200)
    assert store.forget(ref())
    assert store.flush(200)
    assert everything(memory) == everything(redis) == {}


def _saved_here(store, prompt):
    done = threading.Event()
    assert begin_save(store, ref(), prompt, on_done=lambda record: done.set())
    assert done.wait(10)


def test_forgetting_takes_a_save_that_waits_along(store, tiers):
    for _ in range(20):
        begin_save(store, ref(), HISTORY)
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


@pytest.mark.parametrize("place", [0, 1])
def test_forgetting_waits_for_blobs_on_their_way_to_a_tier(place, opened):
    tiers = [FaultyTier(ram()), FaultyTier(ram(), "disk")]
    store = opened(tiers)
    if place == 0:  # a promotion after a restore
        save(store, ref(), HISTORY)
        store.demote(ref(), "disk")
    tiers[place].hang("put_many")
    if place == 0:
        store.restore(store.prepare(ref())[0])
    else:  # write-behind after a save
        begin_save(store, ref(), HISTORY)
    assert tiers[place].entered.wait(10)
    forgetting = threading.Thread(target=store.forget, args=(ref(),))
    forgetting.start()
    forgetting.join(0.05)
    tiers[place].go_on.set()
    forgetting.join(20)
    assert store.flush(200)
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_copy_that_is_mended_meanwhile_does_not_come_back(opened):
    tiers = [FaultyTier(ram()), FaultyTier(ram(), "disk")]
    store = opened(tiers)
    save(store, ref(), HISTORY)
    damage(tiers[0], lambda name: name[:1] == CHUNK)
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    tiers[0].hang("replace")
    waking = threading.Thread(target=store.restore, args=(match, 20.0))
    waking.start()
    assert tiers[0].entered.wait(10)
    assert store.forget(ref())
    tiers[0].go_on.set()
    waking.join(20)
    assert store.flush(200)
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_neither_a_pin_nor_a_rotated_salt_protects_from_forgetting(store, tiers):
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert store.forget(ref(salt=b"rotated"))
    assert everything(tiers[0]) == everything(tiers[1]) == {}
    assert tiers[0]._index.pins == set()


def test_a_deletion_that_waits_for_a_tier_is_made_also_if_the_clock_was_set_back(opened):
    """The record in the tier is then from the future, but not newer than the deletion."""
    clock, redis = Clock(), FaultyTier(ram(), "redis")
    store = opened([ram(), redis], clock=clock)
    save(store, ref(), HISTORY)
    assert store.flush(200)
    clock.now -= 86_400
    redis.fails = lambda number, method: True
    assert store.forget(ref())
    redis.fails = lambda number, method: False
    assert store.record(ref()) is None
    store.ledger.deletions.retry()
    assert everything(redis) == {}
