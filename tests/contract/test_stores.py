"""The promises that the cold store keeps for the sessions of either engine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore.ledger import record
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.clock import Clock
from tests.contract.store_rig import (
    FORK,
    LONG,
    LONGER,
    MIB,
    Rig,
    Store,
    blobs_of,
    demoting,
    history,
    listed,
    ref,
    resting,
    session_bytes,
)
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import RenamedRam, Rows, chain_of, kv_of

# ---- pins


def test_a_pinned_session_is_not_demoted_and_outlives_pressure(rig: Rig, tmp_path: Path):
    near = RamTier(8 * session_bytes(rig))
    store = rig.open([near, DiskTier(tmp_path / "cold", 64 * MIB)])
    rig.save(store, ref("kept"), LONG)
    store.pin(ref("kept"), True)
    assert store.demote(ref("kept"), "disk") == "ram"
    for i in range(12):
        rig.save(store, ref(f"other{i}"), history(100, 10 + i))
    assert near.stats().evictions
    assert resting(store, "kept") == "ram"


def test_pins_that_fill_a_tier_leave_room_for_others(rig: Rig):
    store = rig.open([RamTier(4 * session_bytes(rig))])
    for number in range(6):
        rig.save(store, ref(f"pinned{number}"), history(100, number))
        store.pin(ref(f"pinned{number}"), True)
    rig.save(store, ref("other"), LONG)
    assert rig.back(store, ref("other"), LONG).num_tokens == 96
    newest = rig.back(store, ref("pinned5"), history(100, 5))
    assert newest.num_tokens == 96  # the longest unused one made way


# ---- the time that sessions are kept


def test_a_session_that_is_not_used_in_time_expires(rig: Rig, tiers: list[Tier]):
    clock, gone = Clock(), []
    store = rig.open(tiers, ttl_s=60.0, clock=clock)
    store.listen(gone.append)
    rig.save(store, ref("old"), LONG)
    rig.save(store, ref("kept"), FORK)
    store.pin(ref("kept"), True)
    clock.now += 61
    rig.save(store, ref("new"), history(100, 3))
    for _ in range(2):  # before and after it is removed
        assert listed(store) == {"kept", "new"}
        assert rig.back(store, ref("old"), history(20, 9)).reason == "ttl"
        store.expire()
    assert [(x.session.tenant, x.session.id, x.why) for x in gone] == [("t", "old", "expired")]


def test_a_session_that_is_used_does_not_lapse(rig: Rig, tiers: list[Tier]):
    clock = Clock()
    store = rig.open(tiers, ttl_s=60.0, clock=clock)
    rig.save(store, ref(), LONG)
    clock.now += 50
    assert rig.back(store, ref(), LONG).num_tokens == 96
    clock.now += 50
    store.expire()
    assert listed(store) == {"s"}


def expiring(store: Store) -> threading.Thread:
    """A running ``expire``, which waits for the claim on the session ``s``."""
    thread = threading.Thread(target=store.expire)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    return thread


@pytest.fixture
def lapsed(rig: Rig, tiers: list[Tier]) -> Store:
    """A store whose session ``s`` has been unused for longer than it is kept."""
    clock = Clock()
    store = rig.open(tiers, ttl_s=60.0, clock=clock)
    rig.save(store, ref(), LONG)
    clock.now += 61
    return store


def test_a_session_that_is_used_while_it_lapses_is_kept(rig: Rig, lapsed: Store):
    key = lapsed.ledger.index.key_of(ref())
    with lapsed.ledger.claims.claim(key):
        looking = expiring(lapsed)
        lapsed.ledger.index.use(key)
    looking.join(20)
    assert rig.back(lapsed, ref(), LONG).num_tokens == 96


def test_a_session_whose_save_waits_does_not_lapse(rig: Rig, lapsed: Store):
    with lapsed.ledger.claims.claim(lapsed.ledger.index.key_of(ref())):
        looking = expiring(lapsed)
        done: list[object] = []
        source = Rows(lapsed, kv_of(LONGER))
        assert lapsed.save(ref(), chain_of(lapsed, ref(), LONGER), source, on_done=done.append)
    looking.join(20)
    assert lapsed.flush(200)
    assert len(done) == 1 and done[0] is not None
    assert rig.back(lapsed, ref(), LONGER).num_tokens == 112


# ---- demotion


def test_demoted_it_rests_below_and_a_return_brings_it_near(rig, store, tiers):
    rig.save(store, ref(), LONG)
    assert store.demote(ref(), "disk") == "disk"
    assert blobs_of(tiers[0]) == {}
    assert listed(store) == {"s"}
    assert rig.back(store, ref(), LONG).tier == "disk"
    assert resting(store) == "ram"
    assert rig.back(store, ref(), LONG).tier == "ram"
    assert store.stats().counters["promoted_blobs"] == 6


def test_what_another_session_needs_stays_near(rig: Rig, store: Store):
    rig.save(store, ref("a"), LONG)
    rig.save(store, ref("b"), FORK)
    assert store.demote(ref("a"), "disk") == "disk"
    assert resting(store, "b") == "ram"


@pytest.mark.parametrize("tier", ["ram", "redis"])
def test_upwards_or_to_a_tier_that_is_off_nothing_moves(rig: Rig, store: Store, tier: str):
    rig.save(store, ref(), LONG)
    assert store.demote(ref(), tier) == "ram"
    assert store.demote(ref("unknown"), "disk") is None


def test_a_session_that_the_lower_tier_cannot_take_stays(rig: Rig):
    store = rig.open([RamTier(64 * MIB), RenamedRam(4000)])
    rig.save(store, ref(), LONG)
    assert store.demote(ref(), "disk") == "ram"
    assert rig.back(store, ref(), LONG).num_tokens == 96


def test_a_save_during_a_demotion_keeps_its_own_copy_near(rig: Rig):
    below = FaultyTier(RenamedRam(64 * MIB))
    store = rig.open([RamTier(64 * MIB), below])
    rig.save(store, ref(), LONG)
    with demoting(store, below):
        saving = threading.Thread(target=rig.save, args=(store, ref(), LONGER))
        saving.start()
        saving.join(0.5)
    saving.join(20)
    assert rig.back(store, ref(), LONGER).num_tokens == 112


# ---- forgetting


def test_forgotten_means_that_no_tier_holds_anything(rig: Rig, store: Store, tiers: list[Tier]):
    rig.save(store, ref(), LONG)
    rig.save(store, ref(), FORK)  # leaves a branch
    assert store.forget(ref())
    assert blobs_of(tiers[0]) == blobs_of(tiers[1]) == {}
    assert (listed(store), store.record(ref())) == (set(), None)
    back = rig.back(store, ref(), LONG)
    assert (back.num_tokens, back.reason) == (0, "never-stored")
    assert not store.forget(ref())


def test_abandoned_chunks_are_remembered_up_to_a_bound_and_deleted_beyond(rig, monkeypatch):
    monkeypatch.setattr(record, "MAX_LEFT_BEHIND", 3)
    tier = RamTier(64 * MIB)
    store = rig.open([tier])
    rig.save(store, ref("b"), LONG[:32])  # two chunks that both have
    rig.save(store, ref(), LONG)
    rig.save(store, ref(), history(100, 5))
    abandoned = 3  # remembered, the first of the branch; two of them the other session needs
    assert sum(x.startswith(b"c") for x in blobs_of(tier)) == 6 + abandoned
    assert rig.back(store, ref("b"), [*LONG[:32], *history(20, 9)]).num_tokens == 32
    store.forget(ref())
    assert sum(x.startswith(b"c") for x in blobs_of(tier)) == 2
    store.forget(ref("b"))
    assert tier.stats().num_blobs == 0


def test_forgetting_leaves_what_others_use(rig: Rig, store: Store, tiers: list[Tier]):
    rig.save(store, ref("a"), LONG)
    rig.save(store, ref("b"), FORK)
    assert store.forget(ref("a"))
    assert rig.back(store, ref("b"), FORK).num_tokens == 96
    assert rig.back(store, None, LONG).num_tokens == 32
    assert store.forget(ref("b"))
    assert blobs_of(tiers[0]) == blobs_of(tiers[1]) == {}


def test_a_session_that_is_no_longer_listed_is_still_found_and_forgotten(rig: Rig):
    tier = RamTier(64 * MIB)
    store = rig.open([tier], index_bytes=1)
    rig.save(store, ref("a"), LONG)
    rig.save(store, ref("b"), history(100, 4))
    assert listed(store) == {"b"}
    assert rig.back(store, ref("a"), LONG).num_tokens == 96
    assert store.forget(ref("a")) and not store.forget(ref("a"))
    assert store.forget(ref("b"))
    assert blobs_of(tier) == {}
    assert not store.ledger.index._users


def test_a_tier_that_was_down_gets_the_deletion_when_it_is_back(rig: Rig, tmp_path: Path):
    disk = FaultyTier(DiskTier(tmp_path / "cold", 64 * MIB))
    store = rig.open([RamTier(64 * MIB), disk])
    rig.save(store, ref(), LONG)
    disk.fails = lambda number, method: method == "delete_many"
    store.forget(ref())
    assert disk.stats().num_blobs
    disk.fails = lambda number, method: False
    store.expire()
    assert disk.stats().num_blobs == 0


def test_what_a_return_brings_near_is_not_left_by_forget(rig: Rig, tmp_path: Path):
    near = FaultyTier(RamTier(64 * MIB))
    store = rig.open([near, DiskTier(tmp_path / "cold", 64 * MIB)])
    rig.save(store, ref(), LONG)
    store.demote(ref(), "disk")
    near.hanging = "put_many"
    near.go_on.clear()
    returning = threading.Thread(target=rig.back, args=(rig, store, ref(), LONG)[1:])
    returning.start()
    assert near.entered.wait(10)  # the blobs are on their way up
    forgetting = threading.Thread(target=store.forget, args=(ref(),))
    forgetting.start()
    near.go_on.set()
    forgetting.join(20)
    returning.join(20)
    assert store.flush(200)
    assert near.stats().num_blobs == 0
