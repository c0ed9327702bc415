"""Pinned sessions: what keeps them, what ends it."""

from __future__ import annotations

from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    begin_save,
    come_back,
    disk,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)


def test_a_pin_outlives_a_restart(tmp_path, opened):
    store = opened([disk(tmp_path)])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    store.close()
    again = disk(tmp_path)
    store = opened([again])
    assert store.record(ref()).pinned
    assert again._index.pins == {store.ledger.index.key(store.record(ref()))}


def test_whether_a_session_is_pinned_is_known_without_asking_a_tier(tmp_path, opened):
    tier = FaultyTier(disk(tmp_path))
    store = opened([tier])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    tier.fails = lambda number, method: True
    assert store.is_pinned(ref())
    assert not store.is_pinned(ref("other"))
    tier.fails = lambda number, method: False
    store.pin(ref(), False)
    assert not store.is_pinned(ref())


def test_a_pin_waits_for_the_first_save(store):
    begin_save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert store.record(ref()).pinned
    store.pin(ref("new"), True)
    assert store.record(ref("new")) is None


def test_chunks_of_a_pinned_session_that_were_brought_near_go_last_too(tmp_path, opened):
    store = opened([disk(tmp_path)])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    store.close()
    store = opened([ram(187_000), disk(tmp_path)])
    assert come_back(store, ref(), HISTORY)[1].tier == "disk"
    assert store.workers.quiet(10)
    for i in range(10):
        save(store, ref(f"other {i}"), tokens(200, 50 + i))
    assert store.stats().tiers[0].evictions > 0
    assert come_back(store, ref(), HISTORY)[1].tier == "ram"
