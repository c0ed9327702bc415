"""Where sessions rest, and moving, pinning, forgetting and outliving them."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from kvstore.chain import KeySpace
from kvstore.errors import PinLimit
from kvstore.revision import MAX_LEFT_BEHIND
from kvstore.session_keys import KeyMaker
from kvstore.tiers.ram_tier import RamTier
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import CHUNK, MIB, come_back, disk, kv_of, open_store, ram, ref, save, tokens

HISTORY = tokens(200)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def tiers(tmp_path):
    return [ram(), disk(tmp_path)]


@pytest.fixture
def store(tiers):
    store = open_store(tiers)
    yield store
    store.close()


def everything(tier) -> dict[bytes, bytes]:
    return {key: bytes(blob) for key, blob in tier.scan(b"")}


# ---- demote and promote


def test_a_saved_session_is_in_every_tier(store, tiers):
    save(store, ref(), HISTORY)
    assert everything(tiers[0]) == everything(tiers[1])
    assert store.tier_of(ref()) == "ram"


def test_demoted_it_rests_below_and_comes_back_promoted(store, tiers):
    save(store, ref(), HISTORY)
    assert store.demote(ref(), "disk") == "disk"
    assert everything(tiers[0]) == {}
    assert store.tier_of(ref()) == "disk"
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.tier, restored.tier, restored.num_tokens) == ("disk", "disk", 200)
    assert store.flush(10)
    assert store.tier_of(ref()) == "ram"
    assert come_back(store, ref(), HISTORY)[1].tier == "ram"
    assert store.stats().counters["promoted_blobs"] == 13


def test_a_demotion_waits_for_the_save_before_it(store, tiers):
    assert store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.demote(ref(), "disk") == "disk"
    assert everything(tiers[0]) == {}


def test_chunks_of_another_session_stay_near(store, tiers):
    save(store, ref("a"), HISTORY[:100])
    save(store, ref("b"), HISTORY[:70])
    assert store.demote(ref("a"), "disk") == "disk"
    assert store.tier_of(ref("b")) == "ram"


@pytest.mark.parametrize("tier", ["ram", "redis"])
def test_upwards_or_to_a_tier_that_is_off_nothing_moves(store, tier):
    save(store, ref(), HISTORY)
    assert store.demote(ref(), tier) == "ram"


def test_nobody_knows_the_session(store):
    assert store.demote(ref("new"), "disk") is None


def test_a_session_that_the_lower_tier_cannot_take_stays(tmp_path):
    store = open_store([ram(), RenamedRam(4000)])
    save(store, ref(), HISTORY)
    assert store.demote(ref(), "disk") == "ram"
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    store.close()


class RenamedRam(RamTier):
    name = "disk"


def test_half_of_it_near_and_half_far(store, tiers):
    save(store, ref(), HISTORY)
    keys = store._keys.listed(store.record(ref()))
    tiers[0].delete_many(keys[5:])
    assert store.tier_of(ref()) == "disk"
    tiers[1].delete_many(keys[:3])
    assert store.tier_of(ref()) == "disk"
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.tier, restored.num_tokens) == ("disk", 200)


# ---- pin


def test_pinned_sessions_survive_what_evicts_the_others():
    store = open_store([ram(200_000)])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    for i in range(10):
        save(store, ref(f"other {i}"), tokens(200, 50 + i))
    assert store.stats().tiers[0].evictions > 0
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    record = store.record(ref())
    assert record is not None and record.pinned
    store.pin(ref(), False)
    for i in range(10):
        save(store, ref(f"other {i}"), tokens(200, 80 + i))
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 0
    store.close()


def test_what_a_pinned_session_grows_by_is_pinned_and_its_old_tail_is_not(store, tiers):
    save(store, ref(), HISTORY[:100])
    store.pin(ref(), True)
    save(store, ref(), HISTORY)
    keys = [store._keys.record_key(store.record(ref())), *store._keys.listed(store.record(ref()))]
    assert sorted(store._pins._pinned[keys[0]].keys) == sorted(keys)
    assert tiers[0]._index._pins == dict.fromkeys(keys, 1)
    store.pin(ref(), False)
    assert tiers[0]._index._pins == {}


def test_a_pin_outlives_a_restart(tmp_path):
    store = open_store([disk(tmp_path)])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    store.close()
    again = disk(tmp_path)
    store = open_store([again])
    record = store.record(ref())
    assert record is not None and record.pinned
    assert len(again._index._pins) == 14
    store.close()


def num_pinned(tier) -> int:
    return len(tier._index._pins)


def test_a_pin_beyond_the_share_is_refused_and_says_what_to_do():
    store = open_store([ram(400_000), RenamedRam(200_000)])  # a session is about 46 kB
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
    store.close()


def test_others_always_have_room_beside_the_pinned():
    store = open_store([ram(200_000)])
    for i in range(12):
        save(store, ref(str(i)), tokens(200, i))
        with suppress(PinLimit):
            store.pin(ref(str(i)), True)
    save(store, ref("last"), HISTORY)
    assert come_back(store, ref("last"), HISTORY)[1].num_tokens == 200
    assert sum(x.pinned for x in store._index.all()) == 2
    store.close()


def test_what_a_pinned_session_grows_by_beyond_the_share_is_not_pinned():
    tier = ram(200_000)
    store = open_store([tier])
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert num_pinned(tier) == 14
    long = [*HISTORY, *tokens(500, 1)]
    save(store, ref(), long)
    assert store.record(ref()).pinned
    assert num_pinned(tier) == 13  # record and chunks; the tail of then is gone
    for i in range(8):
        save(store, ref(str(i)), tokens(200, i))
    assert 192 <= come_back(store, ref(), long)[1].num_tokens < 700
    store.pin(ref(), False)
    assert num_pinned(tier) == 0 and store._pins._nbytes == 0
    store.close()


def test_with_a_smaller_share_after_a_restart_the_newest_pins_stay(tmp_path):
    store = open_store([disk(tmp_path)])
    for name in "abc":
        save(store, ref(name), tokens(200, ord(name)))
        store.pin(ref(name), True)
    store.close()
    again = disk(tmp_path)
    share = 100_000 / again.stats().capacity_bytes
    store = open_store([again], pinned_share=share)
    newest = [store._keys.record_key(store.record(ref(x))) for x in "bc"]
    assert set(store._pins._pinned) == set(newest) and num_pinned(again) == 28
    store.close()


def test_a_pinned_session_is_not_demoted(store):
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert store.demote(ref(), "disk") == "ram"


def test_a_pin_waits_for_the_first_save(store):
    store.save(ref(), HISTORY, kv_of(HISTORY))
    store.pin(ref(), True)
    record = store.record(ref())
    assert record is not None and record.pinned
    store.pin(ref("new"), True)
    assert store.record(ref("new")) is None


# ---- forget


def test_forgotten_means_no_tier_holds_anything(store, tiers):
    save(store, ref(), HISTORY)
    save(store, ref(), [*HISTORY[:40], *tokens(90, 2)])  # leaves a branch behind
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}
    assert (store.records(), store.record(ref())) == ([], None)
    assert come_back(store, ref(), HISTORY)[0].reason == "never-stored"
    assert not store.forget(ref())


def test_what_others_use_stays(store, tiers):
    save(store, ref("a"), [*HISTORY[:100], 1])
    save(store, ref("b"), [*HISTORY[:70], 2])
    only_b = set(everything(tiers[0]))
    assert store.forget(ref("a"))
    assert come_back(store, ref("b"), [*HISTORY[:70], 2])[1].num_tokens == 71
    assert come_back(store, None, HISTORY)[1].num_tokens == 64
    assert set(everything(tiers[0])) < only_b
    assert store.forget(ref("b"))
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_branch_left_behind_stays_while_another_session_is_on_it(store, tiers):
    save(store, ref("a"), HISTORY[:100])
    save(store, ref("b"), HISTORY[:90])
    save(store, ref("a"), tokens(50, 7))
    assert store.forget(ref("a"))
    assert come_back(store, ref("b"), HISTORY)[1].num_tokens == 90


def test_forgetting_takes_a_save_that_waits_along(store, tiers):
    for _ in range(20):
        store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


@pytest.mark.parametrize("place", [0, 1])
def test_forgetting_waits_for_blobs_on_their_way_to_a_tier(place):
    tiers = [FaultyTier(ram()), FaultyTier(ram(), "disk")]
    store = open_store(tiers)
    if place == 0:  # a promotion after a restore
        save(store, ref(), HISTORY)
        store.demote(ref(), "disk")
    tiers[place].hanging = "put_many"
    tiers[place].go_on.clear()
    if place == 0:
        store.load(store.prepare(ref()))
    else:  # write-behind after a save
        store.save(ref(), HISTORY, kv_of(HISTORY))
    assert tiers[place].entered.wait(10)
    forgetting = threading.Thread(target=store.forget, args=(ref(),))
    forgetting.start()
    forgetting.join(0.05)
    tiers[place].go_on.set()
    forgetting.join(20)
    assert store.flush(20)
    assert everything(tiers[0]) == everything(tiers[1]) == {}
    store.close()


def test_forgetting_needs_no_salt_that_still_fits(store, tiers):
    save(store, ref(), HISTORY)
    assert store.forget(ref(salt=b"rotated"))
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_pin_does_not_protect_from_forgetting(store, tiers):
    save(store, ref(), HISTORY)
    store.pin(ref(), True)
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}
    assert tiers[0]._index._pins == {}


def test_abandoned_chunks_are_remembered_up_to_a_bound(store, tiers):
    long = tokens((MAX_LEFT_BEHIND + 10) * CHUNK)
    save(store, ref(), long)
    save(store, ref(), [*long[:CHUNK], 1, 2, 3])
    record = store.record(ref())
    assert record is not None and len(record.left_behind) == MAX_LEFT_BEHIND * 32
    assert len(everything(tiers[1])) == 1 + MAX_LEFT_BEHIND + 2  # shared; tail and record
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


# ---- time


def test_sessions_nobody_came_back_to_expire(tmp_path):
    clock = Clock()
    tiers = [ram(), disk(tmp_path)]
    store = open_store(tiers, clock=clock, ttl_s=100.0)
    save(store, ref("old"), HISTORY)
    save(store, ref("pinned"), tokens(30, 4))
    store.pin(ref("pinned"), True)
    clock.now += 90
    save(store, ref("new"), tokens(30, 3))
    clock.now += 20
    assert store.match(ref("old"), ref().salt, HISTORY, 200).reason == "ttl"
    assert {x.id for x in store.records()} == {"new", "pinned"}
    store._upkeep.expire()
    assert store.match(ref("old"), ref().salt, HISTORY, 200).reason == "ttl"
    assert len(everything(tiers[1])) == (1 + 1 + 1) * 2
    store.close()


def test_whoever_listens_hears_of_sessions_whose_time_ran_out():
    clock = Clock()
    store = open_store([ram()], clock=clock, ttl_s=100.0)
    gone = []
    store.listen(gone.append)
    save(store, ref("old"), HISTORY)
    store._upkeep.expire()
    assert gone == []
    clock.now += 110
    for _ in range(3):
        store._upkeep.expire()
    assert gone == [ref("old", salt=b"")]
    store.close()


def test_whoever_listens_hears_once_of_sessions_that_were_evicted():
    store = open_store([ram(100_000)])
    gone = []
    store.listen(gone.append)
    for i in range(10):
        save(store, ref(str(i)), tokens(100, i))
    kept = {x.id for x in store.records() if store.tier_of(x)}
    assert 0 < len(kept) < 10
    for _ in range(4):
        store._upkeep.expire()
    assert sorted(x.id for x in gone) == sorted({str(i) for i in range(10)} - kept)
    first = gone[0].id
    save(store, ref(first), tokens(100, int(first)))
    store._upkeep.expire()
    assert [x.id for x in gone].count(first) == 1
    store.close()


def test_nobody_is_said_to_be_gone_while_a_tier_is_down():
    below = FaultyTier(ram(), "disk")
    store = open_store([ram(100_000), below])
    gone = []
    store.listen(gone.append)
    for i in range(10):
        save(store, ref(str(i)), tokens(100, i))
    below.fails = lambda number, method: True
    for _ in range(3):
        store._upkeep.expire()
    assert gone == []
    store.close()


def test_a_listener_that_fails_does_not_keep_others_from_expiring():
    clock = Clock()
    store = open_store([ram()], clock=clock, ttl_s=100.0)

    def fails(session):
        raise ValueError("the listener fell down")

    store.listen(fails)
    save(store, ref("a"), HISTORY)
    save(store, ref("b"), HISTORY)
    clock.now += 110
    store._upkeep.expire()
    assert store.records() == [] and everything(store._stack._tiers[0]) == {}
    store.close()


class CountingSpace(KeySpace):
    num_chains = 0

    def chain(self, root, tokens):
        self.num_chains += 1
        return super().chain(root, tokens)


def test_keys_are_not_hashed_again_for_every_look(store):
    save(store, ref(), HISTORY)
    record = store.record(ref())
    keys = KeyMaker(CountingSpace("f1", "raw", CHUNK, "model"), growing=True, needs_state=False)
    assert len(keys.listed(record)) == 13
    assert keys.listed(record) == keys.listed(record)
    assert keys.space.num_chains == 1


def test_another_session_or_history_has_other_keys(store):
    save(store, ref(), HISTORY)
    before = store.record(ref())
    save(store, ref(), [*HISTORY[:150], 1, 2])
    after = store.record(ref())
    listed = store._keys.listed
    assert listed(before) == store._keys.of(before).in_order(CHUNK) != listed(after)
    assert listed(after) == store._keys.of(after).in_order(CHUNK)


def test_coming_back_starts_the_time_again():
    clock = Clock()
    store = open_store([ram()], clock=clock, ttl_s=100.0)
    save(store, ref(), HISTORY)
    clock.now += 90
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    assert store.flush(10)
    clock.now += 90
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    store.close()


def test_a_clock_that_jumps_back_expires_nothing():
    clock = Clock()
    store = open_store([ram()], clock=clock, ttl_s=100.0)
    save(store, ref(), HISTORY)
    clock.now -= 86400
    store._upkeep.expire()
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    store.close()


def test_who_came_back_last_is_evicted_last():
    store = open_store([ram(170_000)])
    for name in "abc":
        save(store, ref(name), tokens(200, ord(name)))
    assert store.stats().tiers[0].evictions == 0
    assert come_back(store, ref("a"), tokens(200, ord("a")))[1].num_tokens == 200
    assert store.flush(10)
    save(store, ref("d"), tokens(200, 1))
    held = {x: store.match(ref(x), ref().salt, tokens(200, ord(x)), 200).num_tokens for x in "abc"}
    assert held["a"] == held["c"] == 200 and held["b"] < 200
    store.close()


# ---- the list


def test_the_list_of_sessions_is_bounded_and_loses_the_oldest():
    store = open_store([ram()], index_bytes=2 * (512 + 4 * 50))
    for name in "abc":
        save(store, ref(name), tokens(50, ord(name)))
    assert {x.id for x in store._index.all()} == {"b", "c"}
    assert come_back(store, ref("a"), tokens(50, ord("a")))[1].num_tokens == 50
    store.close()


def test_sessions_whose_record_was_evicted_are_not_listed():
    store = open_store([ram(100_000)])
    for i in range(20):
        save(store, ref(str(i)), tokens(100, i))
    listed = {x.id for x in store.records()}
    assert "19" in listed and len(listed) < 20
    store.close()


def test_ram_off_and_disk_off(tmp_path):
    for tiers in ([disk(tmp_path)], [ram(MIB)]):
        store = open_store(tiers)
        save(store, ref(), HISTORY)
        assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
        assert store.tier_of(ref()) == tiers[0].name
        assert store.forget(ref())
        store.close()
