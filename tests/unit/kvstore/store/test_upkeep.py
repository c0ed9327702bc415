"""Where sessions rest, moving them, and the list of them."""

from __future__ import annotations

from tests.blob_names import all_named
from tests.kv_sessions import (
    MIB,
    come_back,
    disk,
    everything,
    kv_of,
    open_store,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)


def test_a_saved_session_is_in_every_tier(store, tiers):
    save(store, ref(), HISTORY)
    assert everything(tiers[0]) == everything(tiers[1])
    assert store.tier_of(ref()) == "ram"


def test_a_demotion_waits_for_the_save_before_it(store, tiers):
    assert store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.demote(ref(), "disk") == "disk"
    assert everything(tiers[0]) == {}


def test_half_of_it_near_and_half_far(store, tiers):
    save(store, ref(), HISTORY)
    keys = all_named(store.ledger.index.blob_keys(store.record(ref())))
    tiers[0].delete_many(keys[5:])
    assert store.tier_of(ref()) == "disk"
    tiers[1].delete_many(keys[:3])
    assert store.tier_of(ref()) == "disk"
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.tier, restored.num_tokens) == ("disk", 200)


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
        assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
        assert store.tier_of(ref()) == tiers[0].name
        assert store.forget(ref())
        store.close()
