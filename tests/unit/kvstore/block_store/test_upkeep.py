"""Sessions of blocks between their turns: moved, pinned, forgotten, gone by themselves."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import PinLimit
from kvstore.ledger.notices import StoreNotice
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import check_rows, hashes, open_store, ram_and_disk, ref, save
from tests.faulty_tier import FaultyTier

LONG = hashes(list(range(100)))  # 25 blocks: 6 chunks and a tail of one
OTHER = hashes(list(range(1000, 1100)))


@pytest.fixture
def store():
    store = open_store()
    yield store
    store.close()


def test_demote_leaves_only_the_slower_copy(tmp_path):
    store = open_store(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    assert store.demote(ref(), "disk") == "disk"
    assert store.fetch(ref(), LONG, 0).tier == "disk"
    assert store.workers.quiet(5)
    assert store.tier_of(store.record(ref())) == "ram"  # promoted by the restore
    store.close()


class SlowRam(RamTier):
    name = "disk"


def test_a_session_that_the_lower_tier_cannot_take_stays():
    store = open_store([RamTier(1 << 26), SlowRam(20_000)])
    save(store, ref(), LONG)
    assert store.demote(ref(), "disk") == "ram"
    check_rows(store, LONG, store.fetch(ref(), LONG, 0))
    assert store.fetch(ref(), LONG, 0).end_block == 25
    store.close()


def test_a_session_stays_where_it_is_while_the_lower_tier_is_down():
    below = FaultyTier(SlowRam(1 << 26))
    store = open_store([RamTier(1 << 26), below])
    below.fails = lambda number, method: True
    save(store, ref(), LONG)
    assert store.demote(ref(), "disk") == "ram"
    assert store.fetch(ref(), LONG, 0).end_block == 25
    store.close()


def test_warming_brings_a_session_to_the_fastest_tier(tmp_path):
    store = open_store(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    store.warm(ref())
    assert store.tier_of(store.record(ref())) == "ram"
    store.close()


def test_a_pinned_session_is_not_demoted_and_outlives_pressure(tmp_path):
    disk = DiskTier(tmp_path, 1 << 26)
    store = open_store([RamTier(600_000), disk], tenant_pinned_share=1.0)
    save(store, ref("kept"), LONG)
    store.pin(ref("kept"), True)
    assert store.demote(ref("kept"), "disk") == "ram"
    for i in range(8):
        save(store, ref(f"other{i}"), hashes(list(range(1000 * i + 1000, 1000 * i + 1100))))
    assert store.tier_of(store.record(ref("kept"))) == "ram"
    store.close()


def test_a_pin_beyond_the_share_is_refused():
    store = open_store([RamTier(500_000)], tenant_pinned_share=1.0)  # a session is about 205 kB
    save(store, ref("a"), LONG)
    save(store, ref("b"), hashes(list(range(1000, 1100))))
    store.pin(ref("a"), True)
    with pytest.raises(PinLimit):
        store.pin(ref("b"), True)
    assert not store.record(ref("b")).pinned
    store.forget(ref("a"))
    store.pin(ref("b"), True)
    store.close()


def test_forget_leaves_nothing_of_its_own(tmp_path):
    store = open_store(ram_and_disk(tmp_path))
    save(store, ref("a"), LONG)
    save(store, ref("b"), hashes([*range(40), *range(500, 560)]))
    assert store.flush(10)
    assert store.forget(ref("a"))
    assert not store.forget(ref("a"))
    assert store.fetch(ref("a"), LONG, 0).end_block == 8  # the blocks that b shares
    assert store.fetch(ref("b"), hashes([*range(40), *range(500, 560)]), 0).end_block == 25
    store.close()
    again = open_store(ram_and_disk(tmp_path))
    assert [x.id for x in again.records()] == ["b"]
    again.close()


def test_a_session_that_is_no_longer_listed_is_still_found_and_forgotten():
    tier = RamTier(1 << 26)
    store = open_store([tier], index_bytes=1)
    save(store, ref("a"), LONG)
    save(store, ref("b"), hashes(list(range(1000, 1100))))
    assert [x.id for x in store.records()] == ["b"]
    assert store.forget(ref("a"))
    assert not store.forget(ref("a"))
    assert tier.stats().num_blobs == 8  # of b
    assert store.forget(ref("b"))
    assert tier.stats().num_blobs == 0
    assert not store.ledger.index._users
    store.close()


def test_forget_takes_abandoned_branches_along(store):
    save(store, ref(), LONG)
    save(store, ref(), hashes([*range(20), *range(700, 780)]))
    assert store.fetch(None, LONG, 0).end_block == 24
    store.forget(ref())
    assert store.fetch(None, LONG, 0).spans == []


def test_sessions_expire():
    now = [1000.0]
    store = open_store(ttl_s=60.0, clock=lambda: now[0])
    save(store, ref("old"), LONG)
    now[0] += 61
    save(store, ref("new"), hashes(list(range(5000, 5100))))
    store.expire()
    assert [x.id for x in store.records()] == ["new"]
    store.close()


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


def test_small_pins_count_as_the_pages_that_they_fill(tmp_path):
    disk = DiskTier(tmp_path, 4 << 20)
    store = open_store([RamTier(1 << 26), disk], codec="tq3", tenant_pinned_share=1.0)
    with pytest.raises(PinLimit):
        for i in range(1000):  # each is one small tail and a record
            save(store, ref(str(i)), hashes([i] * 8))
            store.pin(ref(str(i)), True)
    assert store.flush(10)
    assert disk.pinned_bytes <= disk.stats().capacity_bytes / 2
    store.close()


def test_no_tenant_takes_all_pins(store):
    store = open_store([RamTier(1_000_000)])  # half for pins, of which a tenant has half: 250 kB
    for tenant, session in (("t", "a"), ("t", "b"), ("u", "c")):
        save(store, ref(session, tenant), LONG)
    store.pin(ref("a"), True)
    with pytest.raises(PinLimit, match="tenant_pinned_share"):
        store.pin(ref("b"), True)
    store.pin(ref("c", "u"), True)
    store.close()


# ---- nothing comes back


def test_forget_removes_blobs_that_a_restore_brings_near(tmp_path):
    near = FaultyTier(RamTier(1 << 26))
    store = open_store([near, DiskTier(tmp_path, 1 << 26)])
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    near.hanging = "put_many"
    near.go_on.clear()
    store.fetch(ref(), LONG, 0)
    assert near.entered.wait(10)  # the blobs are on their way up
    forgetting = threading.Thread(target=store.forget, args=(ref(),))
    forgetting.start()
    near.go_on.set()
    forgetting.join(10)
    assert store.workers.quiet(10)
    assert near.stats().num_blobs == 0
    store.close()


def test_discard_removes_blobs_that_a_restore_brings_near(tmp_path):
    near = FaultyTier(RamTier(1 << 26))
    store = open_store([near, DiskTier(tmp_path, 1 << 26)])
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
    assert [x.key for x in store.missing(LONG)] == [bad.key]
    store.close()


def what_is_below(store):
    """Blobs as a restore has read them from the slower tier, by key."""
    keys = [x.key for x in store.keys.whole(LONG)]
    return list(zip(keys, store.ledger.stack.find(1, keys), strict=True))


def test_a_restore_that_ends_after_forget_brings_nothing_back(tmp_path):
    store = open_store(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    slow, use = what_is_below(store), store.ledger.promotion.used
    store.forget(ref())
    use(store.ledger.record_key(ref()), [key for key, _ in slow], slow)
    assert [x.num_blobs for x in store.stats().tiers] == [0, 0]
    store.close()


def test_blobs_read_by_content_are_not_brought_back_after_forget(tmp_path):
    store = open_store(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    slow, use = what_is_below(store), store.ledger.promotion.used
    store.forget(ref())
    use(None, [key for key, _ in slow], slow)  # for another session, with the same beginning
    assert [x.num_blobs for x in store.stats().tiers] == [0, 0]
    store.close()


def test_blobs_read_by_content_are_brought_near(tmp_path):
    store = open_store(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.demote(ref(), "disk")
    assert store.fetch(ref("new"), LONG, 0).tier == "disk"
    assert store.workers.quiet(10)
    assert store.fetch(ref("new"), LONG, 0).tier == "ram"
    store.close()


def test_a_tier_that_is_down_deletes_when_it_is_back(tmp_path):
    disk = FaultyTier(DiskTier(tmp_path, 1 << 26))
    store = open_store([RamTier(1 << 26), disk])
    save(store, ref(), LONG)
    assert store.flush(10)
    disk.fails = lambda number, method: method == "delete_many"
    store.forget(ref())
    assert disk.stats().num_blobs
    disk.fails = lambda number, method: False
    store.expire()
    assert disk.stats().num_blobs == 0
    store.close()


# ---- notices


def test_the_listener_hears_of_sessions_that_expired():
    now, gone = [1000.0], []
    store = open_store(ttl_s=60.0, clock=lambda: now[0])
    store.listen(gone.append)
    save(store, ref("old"), LONG)
    save(store, ref("kept"), OTHER)
    store.pin(ref("kept"), True)
    now[0] += 61
    store.expire()
    assert gone == [StoreNotice(ref("old"), "expired")]
    store.close()


def test_the_listener_hears_once_of_sessions_that_were_evicted():
    gone = []
    store = open_store([RamTier(450_000)])  # room for two
    store.listen(gone.append)
    for i, session in enumerate(("first", "second", "third", "fourth")):
        save(store, ref(session), hashes(list(range(1000 * i, 1000 * i + 100))))
    for _ in range(4):
        store.expire()
    assert {x.session.id for x in gone} == {"first", "second"}
    assert len(gone) == 2
    save(store, ref("first"), LONG)
    for _ in range(2):
        store.expire()
    assert [x.session.id for x in gone].count("third") == 1
    store.close()
