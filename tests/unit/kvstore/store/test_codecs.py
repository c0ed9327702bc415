"""A codec for each tier."""

from __future__ import annotations

import threading

from benchmarks.session_bytes import session_bytes
from kvstore.blobs.chain import TAIL
from kvstore.blobs.codec_set import CodecSet
from tests.blob_names import key_in
from tests.codec_sessions import (
    BOTH,
    DENSE,
    FAST,
    HISTORY,
    WHOLE,
    codecs_in,
    wake,
    wear,
)
from tests.kv_sessions import (
    CHUNK,
    LAYOUT,
    disk,
    everything,
    kv_of,
    ram,
    ref,
    save,
    tokens,
)
from tests.worn_codec import WornCodec


def test_each_tier_has_its_own_codec_and_rows_are_packed_once_for_each(store, tiers):
    FAST.packed.clear(), DENSE.packed.clear()
    save(store, ref(), HISTORY)
    firsts = list(range(0, WHOLE + 1, CHUNK))  # the tail begins at the last
    assert sorted(FAST.packed) == sorted(DENSE.packed) == firsts
    assert codecs_in(tiers[0]) == ["fast.1"] * 12
    assert codecs_in(tiers[1]) == ["dense.1"] * 12
    assert (codecs_in(tiers[0], TAIL), codecs_in(tiers[1], TAIL)) == (["fast.1"], ["dense.1"])
    assert store.stats().codecs == {"ram": "fast.1", "disk": "dense.1"}
    save(store, ref(), [*HISTORY, *tokens(20, 1)])  # of it the computed rows of the tail only
    assert sorted(FAST.packed) == sorted(DENSE.packed) == [*firsts, WHOLE, WHOLE + CHUNK]


def test_the_fastest_tier_is_read_and_each_copy_is_of_the_first_generation(store):
    save(store, ref(), HISTORY)
    near = wake(store, ref(), HISTORY)
    assert (near.num_tokens, near.tier, near.lossy_tokens) == (200, "ram", 200)
    assert wear(near, HISTORY) == [{1}] * 200
    assert store.demote(ref(), "disk") == "disk"
    far = wake(store, ref(), HISTORY)
    assert (far.num_tokens, far.tier, far.lossy_tokens) == (200, "disk", 200)
    assert wear(far, HISTORY) == [{16}] * 200


def test_blobs_that_were_read_from_disk_are_put_near_as_they_are(store, tiers):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    wake(store, ref(), HISTORY)
    assert store.flush(20)
    near, far = ({key_in(x): blob for x, blob in everything(tier).items()} for tier in tiers)
    assert near.items() <= far.items()
    assert codecs_in(tiers[0]) == ["dense.1"] * 12
    again = wake(store, ref(), HISTORY)
    assert (again.tier, wear(again, HISTORY)[0]) == ("ram", {16})


def test_memory_has_the_session_before_it_is_packed_for_the_disk(tiers, opened):
    gate = threading.Event()

    class Slow(WornCodec):
        def encode(self, run, layout, first_token):
            assert gate.wait(20)
            return super().encode(run, layout, first_token)

    store = opened(tiers, codecs=CodecSet(FAST, Slow("slow.1", 16), DENSE))
    saved = threading.Event()
    store.save(ref(), HISTORY, kv_of(HISTORY), on_done=lambda record: saved.set())
    while wake(store, ref(), HISTORY).num_tokens < 200:
        pass
    assert not saved.is_set()
    assert codecs_in(tiers[1]) == []
    gate.set()
    assert store.flush(20)
    assert saved.is_set() and codecs_in(tiers[1]) == ["slow.1"] * 12


def test_under_pressure_the_disk_gets_copies_of_the_blobs_in_memory(tiers, opened):
    gate, entered = threading.Event(), threading.Event()

    class Gated(WornCodec):
        def encode(self, run, layout, first_token):
            entered.set()
            assert gate.wait(20)
            return super().encode(run, layout, first_token)

    limit = 250 * LAYOUT.bytes_per_token  # one that is being saved, and most of another
    store = opened(
        tiers, codecs=CodecSet(Gated("gated.1", 1), DENSE, DENSE), save_queue_bytes=2 * limit
    )
    store.save(ref("a"), HISTORY, kv_of(HISTORY))
    assert entered.wait(20)
    other = tokens(270, 5)
    assert store.save(ref("b"), other, kv_of(other))
    gate.set()
    assert store.flush(20)
    assert store.stats().counters["saves_copied"] == 1
    found = codecs_in(tiers[1])
    assert (found.count("gated.1"), found.count("dense.1")) == (12, 16)
    for session, history in ((ref("a"), HISTORY), (ref("b"), other)):
        store.demote(session, "disk")
        assert wake(store, session, history).num_tokens == len(history)


def test_a_codec_that_fails_for_the_disk_leaves_the_session_in_memory(tiers, opened):
    class Failing(WornCodec):
        def encode(self, run, layout, first_token):
            raise ValueError("as a defect would")

    store = opened(tiers, codecs=CodecSet(FAST, Failing("failing.1", 16), DENSE))
    store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.flush(20)
    assert wake(store, ref(), HISTORY).num_tokens == 200
    assert codecs_in(tiers[1]) == ["fast.1"] * 12


def test_a_forgotten_session_is_gone_in_every_codec(store, tiers):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    wake(store, ref(), HISTORY)  # memory has it in the disk's codec now
    assert store.flush(20)
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_pinned_session_is_held_in_any_codec(tmp_path, opened):
    near, far = ram(130_000), disk(tmp_path)
    store = opened([near, far], codecs=BOTH, pinned_share=0.9, tenant_pinned_share=1.0)
    save(store, ref(), HISTORY[:64])
    store.demote(ref(), "disk")
    wake(store, ref(), HISTORY[:64])
    assert store.flush(20)
    store.pin(ref(), True)
    for i in range(8):
        save(store, ref(f"other {i}"), tokens(150, i + 1))
    assert codecs_in(near).count("dense.1") == 4
    store.pin(ref(), False)
    assert near.pins == far.pins == {}


def test_after_a_restart_the_disk_is_read_in_its_own_codec(store, tmp_path, tiers, opened):
    save(store, ref(), HISTORY)
    store.close()
    store = opened([ram(), disk(tmp_path)], codecs=BOTH)
    counted = session_bytes(store, ref())
    assert [x.packed_bytes for x in store.records()] == [counted.chunks + counted.tail]
    restored = wake(store, ref(), HISTORY)
    assert (restored.num_tokens, wear(restored, HISTORY)[0]) == (200, {16})
