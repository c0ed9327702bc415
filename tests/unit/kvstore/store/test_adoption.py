"""Other codecs, adopted while the store runs."""

from __future__ import annotations

import threading

import pytest

from benchmarks.session_bytes import session_bytes
from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.codec_set import CodecSet
from kvstore.codecs.base import RawCodec
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout
from tests.blob_names import key_in
from tests.codec_sessions import (
    BOTH,
    DENSE,
    FAST,
    HISTORY,
    WHOLE,
    codecs_in,
    evict,
    go_on,
    turn,
    wake,
    wear,
)
from tests.kv_sessions import (
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


def test_old_chunks_are_read_and_new_ones_are_packed_by_the_new_codec(tiers, opened):
    store = opened(tiers)
    save(store, ref(), HISTORY)
    store.adopt(CodecSet.one(FAST))
    assert store.codecs.ram is FAST
    assert store.stats().codecs == {"ram": "fast.1", "disk": "fast.1"}
    old = wake(store, ref(), HISTORY)
    assert (old.num_tokens, old.lossy_tokens, set(map(frozenset, wear(old, HISTORY)))) == (
        200,
        0,
        {frozenset({0})},
    )
    longer = [*HISTORY, *tokens(40, 2)]
    turn(store, ref(), longer)
    assert sorted(codecs_in(tiers[0])) == ["fast.1"] * 3 + ["raw.1"] * 12
    again = wake(store, ref(), longer)
    assert (again.num_tokens, again.lossy_tokens) == (240, 240)
    assert wear(again, longer)[:WHOLE] == [{0}] * WHOLE
    record, counted = store.record(ref()), session_bytes(store, ref())
    assert record.packed_bytes == counted.chunks + counted.tail


def test_without_keeping_them_old_blobs_are_a_miss_and_make_room(tiers, opened):
    store = opened(tiers, codecs=CodecSet.one(FAST))
    save(store, ref(), HISTORY)
    store.adopt(CodecSet.one(RawCodec()), keep=False)
    match = store.match(ref(), ref().salt, HISTORY, 200)
    assert (match.num_tokens, match.reason) == (0, "fingerprint")
    assert store.records() == [] and store.record(ref()) is None
    save(store, ref(), HISTORY)  # computed anew
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_part_in_a_codec_that_is_not_known_any_more_is_no_eviction(tmp_path, tiers, opened):
    store = opened(tiers)
    save(store, ref(), HISTORY)
    store.adopt(CodecSet.one(FAST))
    longer = [*HISTORY, *tokens(40, 2)]
    turn(store, ref(), longer)
    store.close()
    near, far = ram(), disk(tmp_path)
    store = opened([near, far], codecs=CodecSet.one(FAST))
    match = store.match(ref(), ref().salt, longer, 300)
    assert (match.num_tokens, match.reason) == (0, "fingerprint")
    assert store.forget(ref())
    assert everything(near) == everything(far) == {}


def test_a_restarted_store_reads_the_codecs_that_it_is_given(tmp_path, tiers, opened):
    store = opened(tiers)
    save(store, ref(), HISTORY)
    store.close()
    store = opened([ram(), disk(tmp_path)], codecs=CodecSet.one(FAST, (RawCodec(),)))
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200


def test_a_codec_that_cannot_take_the_layout_changes_nothing(opened):
    layout = KVLayout("float32", (KVLayer(1, 16, 16),))
    store = opened([ram()], layout=layout)
    with pytest.raises(UnknownCodec):
        store.adopt(CodecSet.one(FAST))
    assert store.codecs.ram.id == "raw.1"
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200


def test_a_pin_holds_new_chunks_in_the_new_codec(tmp_path, opened):
    near, far = ram(), disk(tmp_path)
    store = opened([near, far], codecs=CodecSet.one(FAST))
    save(store, ref(), HISTORY[:100])
    store.pin(ref(), True)
    store.adopt(CodecSet.one(DENSE))
    turn(store, ref(), HISTORY)
    held = near.pins
    assert {key_in(x) for x in held} == {key_in(x) for x in everything(near)}
    store.pin(ref(), False)
    assert near.pins == far.pins == {}


def test_a_blob_in_an_unknown_codec_is_a_miss_and_no_error(tiers, opened):
    """Another server may have put it there under our tag."""
    their_tier = ram()
    theirs = opened([their_tier], codecs=CodecSet.one(WornCodec("theirs.1", 3)))
    save(theirs, ref(), HISTORY)
    foreign = {key_in(x): blob for x, blob in everything(their_tier).items()}
    theirs.close()
    store = opened(tiers, codecs=CodecSet.one(FAST))
    save(store, ref(), HISTORY)
    for tier in tiers:
        name = next(x for x, _ in tier.scan(CHUNK_KIND))
        tier.delete_many([name])
        tier.put_many([(name, foreign[key_in(name)])])
    restored = wake(store, ref(), HISTORY)
    assert (restored.reason, restored.num_tokens < 200) == ("fingerprint", True)
    assert store.stats().counters.get("corrupt", 0) == 0
    save(store, ref(), HISTORY)  # the foreign blob does not keep ours out
    assert wake(store, ref(), HISTORY).num_tokens == 200


def test_engines_with_other_codecs_share_a_disk_without_meeting(tiers):
    shared = tiers[1]
    for codec in (FAST, DENSE):
        store = open_store([ram(), shared], codecs=CodecSet.one(codec))
        assert wake(store, ref(), HISTORY).num_tokens == 0
        save(store, ref(), HISTORY)
        evict(store, 0)
        assert wear(wake(store, ref(), HISTORY), HISTORY)[0] == {codec.wear}
        store.flush(20)
    assert sorted(codecs_in(shared)) == ["dense.1"] * 12 + ["fast.1"] * 12


def test_adopting_while_saving_and_waking(tiers, store):
    stop, failures = threading.Event(), []
    sets = [BOTH, CodecSet.one(FAST), CodecSet.one(DENSE), CodecSet(DENSE, FAST, FAST)]

    def user(number: int) -> None:
        history, session = tokens(30, number % 2), ref(str(number))
        try:
            for i in range(40):
                history = [*history[: max(20, 300 - 17 * i)], *tokens(23, i)][:300]
                restored = wake(store, session, history)
                assert all(x <= {0, 1, 16} and len(x) == 1 for x in wear(restored, history))
                run = go_on(restored, history)
                store.save(session, history, run, lossy_tokens=restored.lossy_tokens)
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
    assert not failures and store.flush(20)
    for i in range(3):
        store.forget(ref(str(i)))
    assert store.flush(20)
    assert everything(tiers[0]) == everything(tiers[1]) == {}
