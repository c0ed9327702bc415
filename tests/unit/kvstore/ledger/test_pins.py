"""Pinned sessions: what keeps them, how many there may be, what ends it."""

from __future__ import annotations

from contextlib import suppress

import pytest

from kvstore.errors import PinLimit
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    RenamedRam,
    begin_save,
    come_back,
    disk,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)
ALONE = {"tenant_pinned_share": 1.0}  # one tenant may pin all that may be pinned


def test_pinned_sessions_survive_saves_that_evict_the_others(opened):
    store = opened([ram(200_000)], **ALONE)
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    for i in range(10):
        save(store, ref(f"other {i}"), tokens(200, 50 + i))
    assert store.stats().tiers[0].evictions > 0
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 192
    assert store.record(ref()).pinned
    store.pin(ref(), False)
    for i in range(10):
        save(store, ref(f"other {i}"), tokens(200, 80 + i))
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 0


def test_new_chunks_of_a_pinned_session_are_pinned(store, tiers):
    save(store, ref(), HISTORY[:100])
    store.pin(ref(), True)
    save(store, ref(), HISTORY)
    keys = [
        store.ledger.index.key(store.record(ref())),
        *store.ledger.index.blob_keys(store.record(ref())),
    ]
    assert sorted(store.ledger.pins.pinned[keys[0]]) == sorted(keys)
    assert tiers[0].pins == dict.fromkeys(keys, 1)
    store.pin(ref(), False)
    assert tiers[0].pins == {}


def test_a_pin_outlives_a_restart(tmp_path, opened):
    store = opened([disk(tmp_path)])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    store.close()
    again = disk(tmp_path)
    store = opened([again])
    assert store.record(ref()).pinned
    assert len(again.pins) == 13


def num_pinned(tier) -> int:
    return len(tier.pins)


def test_a_pin_beyond_the_share_is_refused_and_says_what_to_do(opened):
    # A session is about 46 kB, and takes 52 kB of memory.
    store = opened([ram(400_000), RenamedRam(240_000)], **ALONE)
    for name in "abc":
        save(store, ref(name), tokens(200, ord(name)))
    store.pin(ref("a"), True)
    store.pin(ref("b"), True)
    with pytest.raises(PinLimit, match="pinned_share"):
        store.pin(ref("c"), True)
    assert store.record(ref("c")).pinned is False
    store.pin(ref("b"), True)  # it is already
    store.pin(ref("a"), False)
    store.pin(ref("c"), True)
    store.forget(ref("c"))
    store.pin(ref("a"), True)


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


def test_others_always_have_room_beside_the_pinned(opened):
    store = opened([ram(240_000)], **ALONE)
    for i in range(12):
        save(store, ref(str(i)), tokens(200, i))
        with suppress(PinLimit):
            store.pin(ref(str(i)), True)
    save(store, ref("last"), HISTORY)
    assert come_back(store, ref("last"), HISTORY)[1].num_tokens == 192
    assert sum(x.pinned for x in store.ledger.index.all()) == 2


def test_new_chunks_of_a_pinned_session_beyond_the_share_are_not_pinned(opened):
    tier = ram(200_000)
    store = opened([tier], **ALONE)
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert num_pinned(tier) == 13
    long = [*HISTORY, *tokens(500, 1)]
    save(store, ref(), long)
    assert store.record(ref()).pinned
    assert num_pinned(tier) == 13  # record and chunks
    for i in range(8):
        save(store, ref(str(i)), tokens(200, i))
    assert 192 <= come_back(store, ref(), long)[1].num_tokens < 700
    store.pin(ref(), False)
    assert num_pinned(tier) == 0 and not store.ledger.pins._by_tenant.total()


def test_with_a_smaller_share_after_a_restart_the_newest_pins_stay(tmp_path, opened):
    store = opened([disk(tmp_path)])
    for name in "abc":
        save(store, ref(name), tokens(200, ord(name)))
        store.pin(ref(name), True)
    store.close()
    again = disk(tmp_path)
    share = 340_000 / again.stats().capacity_bytes  # each fills 160 kB of pages
    store = opened([again], pinned_share=share, **ALONE)
    newest = [store.ledger.index.key(store.record(ref(x))) for x in "bc"]
    assert set(store.ledger.pins.pinned) == set(newest) and num_pinned(again) == 26


def test_a_pin_waits_for_the_first_save(store):
    begin_save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert store.record(ref()).pinned
    store.pin(ref("new"), True)
    assert store.record(ref("new")) is None
