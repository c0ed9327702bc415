"""Other codecs, adopted while the store runs or when it starts again."""

from __future__ import annotations

import threading

import pytest

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import PAGE
from kvstore.blobs.packer import RAW, StoreCodecs
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from tests.codec_sessions import DENSE, FAST, HISTORY, WHOLE, codecs_in, evict, turn, wake, wear
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    CHUNK,
    SharedRam,
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
from tests.worn_codec import WornCodec


def bytes_of(store: ColdStore, session_id: str = "s") -> int:
    """Bytes of the session's blobs, besides its record and pages."""
    record = store.record(ref(session_id))
    assert record is not None
    keys = [x.key for x in store.ledger.records.pieces(record) if x.key[:1] != PAGE]
    return sum(len(x or b"") for x in store.ledger.stack.find(0, keys))


def test_old_chunks_are_read_and_new_ones_are_packed_by_the_new_codec(tiers, opened):
    store = opened(tiers)
    save(store, ref(), HISTORY)
    store.adopt(StoreCodecs(FAST))
    assert store.codecs.rows is FAST
    assert store.stats().codec == "fast.1"
    old = wake(store, ref(), HISTORY)
    assert (old.num_tokens, old.lossy_tokens, wear(old, HISTORY)) == (WHOLE, 0, [{0}] * WHOLE)
    longer = [*HISTORY, *tokens(40, 2)]
    turn(store, ref(), longer)
    assert codecs_in(tiers[0]) == ["fast.1"] * 3 + ["raw.1"] * 12
    again = wake(store, ref(), longer)
    assert (again.num_tokens, again.lossy_tokens) == (240, 240)
    assert wear(again, longer)[:WHOLE] == [{0}] * WHOLE
    assert store.record(ref()).packed_bytes == bytes_of(store)


def test_without_keeping_them_old_blobs_are_a_miss_and_make_room(tiers, opened):
    store = opened(tiers, codecs=StoreCodecs(FAST))
    save(store, ref(), HISTORY)
    store.adopt(StoreCodecs(RAW), keep=False)
    restored = wake(store, ref(), HISTORY)
    assert (restored.num_tokens, restored.reason) == (0, "fingerprint")
    for _ in range(12):  # each return finds one that it cannot read, and makes room for it
        save(store, ref(), HISTORY)
        wake(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == WHOLE
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_chunk_in_a_codec_that_is_not_known_any_more_ends_what_comes_back(
    tmp_path, tiers, opened
):
    store = opened(tiers)
    save(store, ref(), HISTORY)
    store.adopt(StoreCodecs(FAST))
    longer = [*HISTORY, *tokens(40, 2)]
    turn(store, ref(), longer)
    store.close()
    near, far = ram(), disk(tmp_path)
    store = opened([near, far], codecs=StoreCodecs(RAW))
    restored = wake(store, ref(), longer)
    assert (restored.num_tokens, restored.reason) == (WHOLE, "fingerprint")
    assert store.stats().counters.get("corrupt", 0) == 0
    save(store, ref(), longer)
    assert store.forget(ref())
    assert everything(near) == everything(far) == {}


def test_a_codec_that_cannot_take_the_layout_changes_nothing(opened):
    layout = KVLayout("float32", (KVLayer(1, 16, 16),))
    store = opened([ram()], layout=layout)
    with pytest.raises(UnknownCodec):
        store.adopt(StoreCodecs(FAST))
    assert store.codecs.rows.id == "raw.1"
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == WHOLE


def test_a_local_blob_in_an_unknown_codec_is_a_miss_and_makes_room(tiers, opened):
    """It was brought from a tier that another server shares, under the same name."""
    theirs = open_store([their_tier := ram()], codecs=StoreCodecs(WornCodec("theirs.1", 3)))
    save(theirs, ref(), HISTORY)
    foreign = everything(their_tier)
    theirs.close()
    store = opened(tiers, codecs=StoreCodecs(FAST))
    save(store, ref(), HISTORY)
    name = CHUNK_KIND + chain_of(store, ref(), HISTORY)[2]
    for tier in tiers:
        assert tier.replace(name, foreign[name])
    restored = wake(store, ref(), HISTORY)
    assert (restored.reason, restored.num_tokens) == ("fingerprint", 2 * CHUNK)
    assert store.stats().counters.get("corrupt", 0) == 0
    assert [tier.contains_many([name]) for tier in tiers] == [[False]] * len(tiers)
    save(store, ref(), HISTORY)
    assert wake(store, ref(), HISTORY).num_tokens == WHOLE


def test_while_a_tier_that_may_have_the_profile_is_down_nothing_is_dropped(tmp_path, tiers, opened):
    store = opened(tiers, codecs=StoreCodecs(FAST))
    save(store, ref(), HISTORY)
    store.close()
    shared, far = FaultyTier(SharedRam(1 << 26)), disk(tmp_path)
    shared.fails = lambda number, method: True
    store = opened([ram(), far, shared])
    assert wake(store, ref(), HISTORY).reason == "fingerprint"
    assert codecs_in(far) == ["fast.1"] * 12


def test_on_a_shared_tier_what_another_engine_can_read_is_left_to_it(opened):
    shared = SharedRam(1 << 26)
    theirs = opened([ram(), shared], codecs=StoreCodecs(DENSE))
    save(theirs, ref(), HISTORY)
    ours = opened([ram(), shared], codecs=StoreCodecs(FAST))
    assert wake(ours, ref(), HISTORY).reason == "fingerprint"
    assert codecs_in(shared) == ["dense.1"] * 12
    evict(theirs, 0)
    assert wear(wake(theirs, ref(), HISTORY), HISTORY) == [{16}] * WHOLE


def test_adopting_while_saving_and_waking(tiers: list[Tier], opened):
    store = opened(tiers, codecs=StoreCodecs(FAST))
    stop, failures = threading.Event(), []
    sets = [StoreCodecs(x, readable=(FAST, DENSE, RAW)) for x in (FAST, DENSE, RAW)]

    def user(number: int) -> None:
        history, session = tokens(30, number % 2), ref(str(number))
        try:
            for i in range(40):
                history = [*history[: max(20, 300 - 17 * i)], *tokens(23, i)][:300]
                restored = wake(store, session, history)
                assert all(x in ({0}, {1}, {16}) for x in wear(restored, history))
                begin_save(store, session, history, restored)
                if i % 7 == 0:
                    store.demote(session, "disk")
        except BaseException as error:
            failures.append(error)

    def switch() -> None:
        i = 0
        while not stop.wait(0.002):
            store.adopt(sets[i % len(sets)])
            i += 1

    threads = [threading.Thread(target=user, args=(i,)) for i in range(3)]
    switching = threading.Thread(target=switch)
    for thread in (*threads, switching):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    switching.join(10)
    assert not failures and store.flush(200)
    for i in range(3):
        store.forget(ref(str(i)))
    assert store.flush(200)
    assert everything(tiers[0]) == everything(tiers[1]) == {}
