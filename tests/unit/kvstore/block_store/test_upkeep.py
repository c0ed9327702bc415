"""Sessions of blocks between their turns: moved, pinned, brought near, and gone for good."""

from __future__ import annotations

import threading

import pytest

from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import hashes, open_store, ram_and_disk, ref, save
from tests.faulty_tier import FaultyTier

LONG = hashes(list(range(100)))  # 25 blocks: 6 chunks and a tail of one


def test_warming_brings_a_session_to_the_fastest_tier(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    store.warm(ref())
    assert store.tier_of(store.record(ref())) == "ram"


# ---- pins and the queues of slower tiers


def reopened(store, folder):
    """After the process has ended in good order."""
    store.close()
    return open_store(ram_and_disk(folder))


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_is_not_undone_by_a_save_that_still_waits(tmp_path, pinned):
    disk = FaultyTier(DiskTier(tmp_path, 1 << 26))
    store = open_store([RamTier(1 << 26), disk])
    save(store, ref(), LONG)
    if not pinned:
        store.pin(ref(), True)
    assert store.flush(10)
    disk.hanging = "put_many"
    disk.go_on.clear()
    save(store, ref(), hashes(list(range(140))))  # its delivery hangs, with the older record
    assert disk.entered.wait(10)
    store.pin(ref(), pinned)
    disk.go_on.set()
    again = reopened(store, tmp_path)
    assert again.record(ref()).pinned is pinned
    again.close()


def test_a_pin_reaches_a_tier_that_was_down_meanwhile(tmp_path):
    disk = FaultyTier(DiskTier(tmp_path, 1 << 26))
    store = open_store([RamTier(1 << 26), disk])
    save(store, ref(), LONG)
    assert store.flush(10)
    disk.fails = lambda number, method: method == "replace"
    store.pin(ref(), True)
    assert store.flush(10)
    disk.fails = lambda number, method: False
    again = reopened(store, tmp_path)
    assert again.record(ref()).pinned
    again.close()


def test_a_pin_waits_for_a_commit_and_neither_is_lost(store):
    save(store, ref(), LONG)
    longer = hashes(list(range(140)))
    with store.ledger.claims.claim(store.keys.record_key("t", "s")):
        pinning = threading.Thread(target=store.pin, args=(ref(), True))
        saving = threading.Thread(target=save, args=(store, ref(), longer))
        pinning.start()
        saving.start()
        assert not store.record(ref()).pinned
    pinning.join(10)
    saving.join(10)
    record = store.record(ref())
    assert (record.pinned, record.num_tokens) == (True, 140)


# ---- nothing comes back


def test_discard_removes_blobs_that_a_restore_brings_near(tmp_path, opened):
    near = FaultyTier(RamTier(1 << 26))
    store = opened([near, DiskTier(tmp_path, 1 << 26)])
    bad = save(store, ref(), LONG)[0]
    store.demote(ref(), "disk")
    near.hanging = "put_many"
    near.go_on.clear()
    store.fetch(ref(), LONG, 0)
    assert near.entered.wait(10)  # the blobs are on their way up
    discarding = threading.Thread(target=store.discard, args=(bad.key,))
    discarding.start()
    discarding.join(0.05)
    near.go_on.set()
    discarding.join(10)
    assert store.workers.quiet(10)
    assert store.missing(LONG)[0].key == bad.key  # and with it all that continues it


def what_is_below(store):
    """Blobs as a restore has read them from the slower tier, by key."""
    keys = [x.key for x in store.keys.whole(LONG)]
    return list(zip(keys, store.ledger.stack.find(1, keys), strict=True))


def test_a_restore_that_ends_after_forget_brings_nothing_back(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    slow, use = what_is_below(store), store.ledger.promotion.used
    store.forget(ref())
    use(store.ledger.record_key(ref()), [key for key, _ in slow], slow)
    assert [x.num_blobs for x in store.stats().tiers] == [0, 0]


def test_blobs_read_by_content_are_not_brought_back_after_forget(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    slow, use = what_is_below(store), store.ledger.promotion.used
    store.forget(ref())
    use(None, [key for key, _ in slow], slow)  # for another session, with the same beginning
    assert [x.num_blobs for x in store.stats().tiers] == [0, 0]


def test_blobs_read_by_content_are_brought_near(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    assert store.fetch(ref("new"), LONG, 0).tier == "disk"
    assert store.workers.quiet(10)
    assert store.fetch(ref("new"), LONG, 0).tier == "ram"
