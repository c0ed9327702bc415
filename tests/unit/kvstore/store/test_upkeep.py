"""Where sessions rest, moving and pinning them, and what never comes back."""

from __future__ import annotations

import threading

import pytest

from kvstore.tiers.ram_tier import RamTier
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    MIB,
    begin_save,
    chain_of,
    come_back,
    disk,
    everything,
    open_store,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)


def test_a_demotion_waits_for_the_save_before_it(store, tiers):
    assert begin_save(store, ref(), HISTORY)
    assert store.demote(ref(), "disk") == "disk"
    assert everything(tiers[0]) == {}


@pytest.mark.parametrize(
    ("near", "far", "expected"), [(12, 12, "ram"), (5, 3, "ram"), (3, 5, "disk"), (0, 0, None)]
)
def test_its_tier_is_the_slowest_that_is_needed_for_what_is_left(store, tiers, near, far, expected):
    """Tiers evict chains from their ends."""
    save(store, ref(), HISTORY)
    keys = store.ledger.index.blob_keys(store.record(ref()))
    for tier, num_left in zip(tiers, (near, far), strict=True):
        tier.delete_many(keys[num_left:])
    assert store.tier_of(ref()) == expected


# ---- the list


def test_sessions_whose_record_was_evicted_are_not_listed(opened):
    store = opened([ram(100_000)])
    for i in range(20):
        save(store, ref(str(i)), tokens(100, i))
    listed = {x.id for x in store.records()}
    assert "19" in listed and len(listed) < 20


def test_ram_off_and_disk_off(tmp_path):
    for tiers in ([disk(tmp_path)], [ram(MIB)]):
        store = open_store(tiers)
        save(store, ref(), HISTORY)
        assert come_back(store, ref(), HISTORY)[1].num_tokens == 192
        assert store.tier_of(ref()) == tiers[0].name
        assert store.forget(ref())
        store.close()


def test_warming_brings_a_session_to_the_fastest_tier(store):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    store.warm(ref())
    assert store.tier_of(store.record(ref())) == "ram"


def test_the_blobs_of_a_session_are_known_without_asking_a_tier(opened):
    tier = FaultyTier(ram())
    store = opened([tier])
    save(store, ref(), HISTORY)
    tier.calls.clear()
    record, pieces = store.pieces_of(ref())
    assert (record.num_tokens, [x.first_token for x in pieces]) == (192, list(range(0, 192, 16)))
    assert store.pieces_of(ref("new")) is None
    assert tier.calls == []


# ---- pins and the queues of slower tiers


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_is_not_undone_by_a_save_that_still_waits(tmp_path, opened, pinned):
    below = FaultyTier(disk(tmp_path))
    store = opened([ram(), below])
    save(store, ref(), HISTORY[:100])
    if not pinned:
        store.pin(ref(), True)
    assert store.flush(200)
    below.hang("put_many")
    begin_save(store, ref(), HISTORY)  # its delivery hangs, with the older record
    assert below.entered.wait(10)
    store.pin(ref(), pinned)
    below.go_on.set()
    store.close()
    assert opened([ram(), disk(tmp_path)]).record(ref()).pinned is pinned


def test_a_pin_reaches_a_tier_that_was_down_meanwhile(tmp_path, opened):
    below = FaultyTier(disk(tmp_path))
    store = opened([ram(), below])
    save(store, ref(), HISTORY)
    below.fails = lambda number, method: method == "replace"
    store.pin(ref(), True)
    assert store.flush(200)
    below.fails = lambda number, method: False
    store.close()
    assert opened([ram(), disk(tmp_path)]).record(ref()).pinned


# ---- nothing comes back


def test_discard_removes_blobs_that_a_restore_brings_near(tmp_path, opened):
    near = FaultyTier(RamTier(1 << 26))
    store = opened([near, disk(tmp_path)])
    save(store, ref(), HISTORY)
    match, _ = store.prepare(ref())
    bad = match.reads[0].key
    store.demote(ref(), "disk")
    near.hang("put_many")
    store.fetch(store.prepare(ref())[0])
    assert near.entered.wait(10)  # the blobs are on their way up
    discarding = threading.Thread(target=store.discard, args=(bad,))
    discarding.start()
    discarding.join(0.05)
    near.go_on.set()
    discarding.join(10)
    assert store.workers.quiet(10)
    source = save(store, ref(), HISTORY)
    assert source.packed[0].key == bad  # nothing is left of it, nor of its continuation
    assert store.stats().counters["corrupt"] == 1


@pytest.mark.parametrize("by_content", [True, False])
def test_a_restore_that_ends_after_forget_brings_nothing_back(store, by_content):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    keys = [b"c" + x for x in chain_of(store, ref(), HISTORY)]
    slow = list(zip(keys, store.ledger.stack.find(1, keys), strict=True))
    use = store.ledger.restored
    store.forget(ref())
    # For another session with the same beginning, or for this one.
    use(None if by_content else store.ledger.index.key_of(ref()), keys, slow)
    assert [x.num_blobs for x in store.stats().tiers] == [0, 0]


def test_blobs_read_by_content_are_brought_near(store):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    assert come_back(store, ref("new"), HISTORY)[1].tier == "disk"
    assert store.workers.quiet(10)
    assert come_back(store, ref("new"), HISTORY)[1].tier == "ram"


def test_what_is_brought_near_follows_the_chunk_before_it(store, tiers):
    save(store, ref(), HISTORY)
    keys = [b"c" + x for x in chain_of(store, ref(), HISTORY)]
    slow = list(zip(keys, store.ledger.stack.find(1, keys), strict=True))
    tiers[0].delete_many(keys[8:9])  # and all after it
    store.ledger.restored(store.ledger.index.key_of(ref()), keys, [slow[2], *slow[8:]])
    order = tiers[0]._index
    assert [x for x in order.evict(order.nbytes) if x in keys] == keys[::-1]
