"""Sessions that go by themselves, by age or eviction, and the listeners that hear of it."""

from __future__ import annotations

from tests.clock import Clock
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import come_back, everything, ram, ref, save, tokens

HISTORY = tokens(200)


def test_no_session_is_reported_gone_while_a_tier_is_down(opened):
    below = FaultyTier(ram(), "disk")
    store = opened([ram(100_000), below])
    gone = []
    store.listen(gone.append)
    for i in range(10):
        save(store, ref(str(i)), tokens(100, i))
    below.fails = lambda number, method: True
    for _ in range(3):
        store.expire()
    assert gone == []


def test_a_listener_that_fails_does_not_keep_others_from_expiring(opened):
    clock = Clock()
    store = opened([ram()], clock=clock, ttl_s=100.0)

    def fails(session):
        raise ValueError("the listener fell down")

    store.listen(fails)
    save(store, ref("a"), HISTORY)
    save(store, ref("b"), HISTORY)
    clock.now += 110
    store.expire()
    assert store.records() == [] and everything(store.ledger.stack.tiers[0]) == {}


def test_a_clock_that_jumps_back_expires_nothing(opened):
    clock = Clock()
    store = opened([ram()], clock=clock, ttl_s=100.0)
    save(store, ref(), HISTORY)
    clock.now -= 86400
    store.expire()
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 192
