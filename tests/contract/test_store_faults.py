"""The promises that the cold store keeps when tiers evict, damage, fail or are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.contract.store_rig import (
    LONG,
    LONGER,
    MIB,
    WHOLE,
    Rig,
    Store,
    blobs_of,
    damage,
    demoting,
    history,
    listed,
    ref,
    resting,
    session_bytes,
)
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import RenamedRam, save

# ---- eviction


def test_a_session_that_outgrows_a_tier_loses_its_end_first(rig: Rig):
    store = rig.open([RamTier(session_bytes(rig) * 3 // 2)])
    rig.save(store, ref("first"), LONG)
    rig.save(store, ref("second"), history(100, 6))
    left = rig.back(store, ref("first"), LONG)
    assert 0 < left.num_tokens < 96 and left.num_tokens % 16 == 0
    assert left.reason == "evicted"
    assert rig.back(store, ref("second"), history(100, 6)).num_tokens == 96


def test_each_evicted_session_is_reported_once(rig: Rig):
    gone: list[str] = []
    store = rig.open([RamTier(session_bytes(rig) * 22 // 10)])
    store.listen(lambda left: gone.append(left.session.id))
    names = ("first", "second", "third", "fourth")
    for number, name in enumerate(names):
        rig.save(store, ref(name), history(100, 20 + number))
    for _ in range(4):
        store.expire()
    assert sorted(gone) == sorted(x for x in names if resting(store, x) is None)
    assert gone and "fourth" not in gone
    again = names.index(gone[0])
    rig.save(store, ref(gone[0]), history(100, 20 + again))  # and takes the place of another one
    for _ in range(2):
        store.expire()
    assert len(gone) == len(set(gone))


# ---- damage and outages


def test_a_damaged_record_is_as_good_as_none_and_is_removed(rig: Rig, tmp_path: Path):
    first = rig.open([DiskTier(tmp_path / "cold", 64 * MIB)])
    rig.save(first, ref(), LONG)
    first.close()
    disk = DiskTier(tmp_path / "cold", 64 * MIB)
    assert damage(disk, lambda name: name[:1] == b"r") == 1
    store = rig.open([disk])
    assert listed(store) == set()
    assert rig.back(store, ref(), LONG).num_tokens == 96  # by content
    assert not [name for name in blobs_of(disk) if name[:1] == b"r"]


def test_a_tier_that_is_down_costs_nothing_that_another_one_has(rig: Rig):
    below = FaultyTier(RenamedRam(64 * MIB))
    store = rig.open([RamTier(64 * MIB), below])
    below.fails = lambda number, method: True
    rig.save(store, ref(), LONG, is_down=True)
    assert store.demote(ref(), "disk") == "ram"
    assert rig.back(store, ref(), LONG, is_down=True).num_tokens == 96
    below.fails = lambda number, method: False
    assert store.flush(200)  # the missed blobs are written again
    assert store.demote(ref(), "disk") == "disk"
    assert rig.back(store, ref(), LONG).num_tokens == 96


def test_a_damaged_chunk_is_mended_from_another_tier_and_what_continues_it_stays(rig, tmp_path):
    near, far = RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)
    store = rig.open([near, far])
    rig.save(store, ref(), LONG)
    whole, third = blobs_of(near), store.ledger.index.blob_keys(store.record(ref()))[2]
    assert damage(near, lambda name: name == third) == 1
    assert rig.back(store, ref(), LONGER).num_tokens == WHOLE
    assert blobs_of(near) == whole
    assert store.counters.as_dict()["corrupt"] == 1


# ---- what happens while something else does


class WhenDeleting(RamTier):
    """Calls ``look`` before anything is deleted."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.look: Callable[[], object] = lambda: None

    def delete_many(self, keys: Iterable[bytes]) -> int:
        self.look()
        return super().delete_many(keys)


def test_a_session_that_is_looked_up_while_it_is_forgotten_is_gone(rig: Rig):
    near = WhenDeleting(64 * MIB)
    far = WhenDeleting(64 * MIB)
    far_tier = FaultyTier(far, "disk")
    store = rig.open([near, far_tier])
    rig.save(store, ref(), LONG)
    near.look = lambda: store.record(ref())
    assert store.forget(ref())
    near.look = lambda: None
    assert blobs_of(near) == blobs_of(far) == {}
    assert rig.back(store, None, LONG).num_tokens == 0


def test_what_a_failed_write_should_have_removed_is_removed_later(rig: Rig):
    below = FaultyTier(RenamedRam(64 * MIB))
    store = rig.open([RamTier(64 * MIB), below], needs_state=True)
    save(store, ref(), LONG, [80, 96])
    below.fails = lambda number, method: method in ("put_many", "replace")
    save(store, ref(), LONGER, [96, 112])
    below.fails = lambda number, method: False
    save(store, ref(), [*LONGER, *history(20, 8)], [112, 128])
    assert len([x for x in blobs_of(below.inner) if x[:1] == b"s"]) == 2
    assert store.forget(ref())
    assert blobs_of(below.inner) == {}


def test_a_deletion_that_is_owed_spares_a_session_that_came_back(rig: Rig):
    below = FaultyTier(RenamedRam(64 * MIB))
    store = rig.open([RamTier(64 * MIB), below])
    rig.save(store, ref(), LONG)
    below.fails = lambda number, method: method == "delete_many"
    assert store.forget(ref())
    below.fails = lambda number, method: False
    rig.save(store, ref(), LONG)
    store.expire()
    assert store.demote(ref(), "disk") == "disk"
    assert rig.back(store, ref(), LONG).num_tokens == 96


def test_a_pin_is_not_undone_by_a_demotion_that_began_before(rig: Rig, tmp_path: Path):
    disk = FaultyTier(DiskTier(tmp_path / "cold", 64 * MIB))
    store = rig.open([RamTier(64 * MIB), disk])
    rig.save(store, ref(), LONG)
    with demoting(store, disk):
        store.pin(ref(), True)
    assert store.flush(200)
    store.close()
    again = rig.open([RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)])
    assert again.record(ref()).pinned


@pytest.mark.redis
def test_a_session_that_only_the_server_has_can_be_demoted_and_pinned(rig, server):
    def engine() -> Store:
        return rig.open([RamTier(64 * MIB), RedisTier(server.url, deadline_s=5.0)])

    tokens = history(100, 40)
    first = engine()
    rig.save(first, ref("far"), tokens)
    assert first.demote(ref("far"), "redis") == "redis"
    first.close()
    again = engine()
    record = again.record(ref("far"))
    assert record is not None and again.tier_of(record) == "redis"
    again.pin(ref("far"), True)
    assert again.record(ref("far")).pinned
    again.pin(ref("far"), False)
    assert again.demote(ref("far"), "redis") == "redis"
    assert again.forget(ref("far"))
