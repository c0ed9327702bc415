"""Which blobs a save writes, which it leaves alone, and which saves wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.session_bytes import session_bytes
from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import RECORD, TAIL
from kvstore.codecs.base import RawCodec
from kvstore.config import StoreConfig
from kvstore.shapes import KVLayer, KVLayout, KVRun, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.ram_tier import RamTier
from tests.kv_sessions import CHUNK, LAYOUT, come_back, kv_of, open_store, ram, ref, save, tokens

HISTORY = tokens(200)


class CountingRam(RamTier):
    """Counts the blobs that are written, by kind."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.written: list[bytes] = []

    def put_many(self, items: Sequence[tuple[bytes, bytes]], owner: str = "") -> int:
        self.written += [key[:1] for key, _ in items]
        return super().put_many(items, owner)

    def replace(self, key: bytes, blob: bytes, owner: str = "") -> bool:
        self.written.append(key[:1])
        return super().replace(key, blob, owner)


class GatedCodec(RawCodec):
    """Encodes when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "gate", threading.Event())
        object.__setattr__(self, "entered", threading.Event())

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        self.entered.set()
        assert self.gate.wait(20)
        return super().encode(run, layout, first_token)


@pytest.fixture
def store(opened):
    return opened([ram()])


def gated_store(**config) -> tuple[ColdStore, GatedCodec]:
    codec = GatedCodec()
    settings = StoreConfig(chunk_tokens=CHUNK, num_threads=1, **config)
    return ColdStore(settings, StoredModel("m", "f", LAYOUT), codec, [ram()]), codec


def test_the_work_is_that_of_the_new_tokens(opened):
    tier = CountingRam(1 << 26)
    store = opened([tier])
    save(store, ref(), HISTORY[:100])
    assert store.stats().counters["chunks_encoded"] == 6
    tier.written.clear()
    save(store, ref(), HISTORY[:140])
    assert store.stats().counters["chunks_encoded"] == 8
    assert tier.written == [CHUNK_KIND] * 2 + [TAIL, RECORD]


def test_the_old_tail_goes_and_the_record_stays_one(store):
    for n in (100, 130, 199):
        save(store, ref(), HISTORY[:n])
        assert store.stats().tiers[0].num_blobs == n // CHUNK + 2
    save(store, ref(), HISTORY[:192])  # no tail at all
    assert store.stats().tiers[0].num_blobs == 192 // CHUNK + 1


def test_a_shared_prefix_is_stored_once(store):
    save(store, ref("a"), HISTORY[:100])
    save(store, ref("b"), [*HISTORY[:100], *tokens(20, 5)])
    assert store.stats().counters["chunks_encoded"] == 7
    assert store.stats().tiers[0].num_blobs == 7 + 2 + 2


@pytest.mark.parametrize("codec", ["raw", "tq3"])
def test_a_hundred_cycles_leave_the_same_bytes(codec, opened):
    layout = KVLayout("bfloat16", (KVLayer(2, 64, 64),))
    tier = ram()
    store = opened([tier], codec=codec, layout=layout)
    assert store.save(ref(), HISTORY, kv_of(HISTORY, layout)) and store.flush(20)
    before = dict(tier.scan(CHUNK_KIND)) | dict(tier.scan(TAIL))
    first = store.load(store.prepare(ref())).run
    for _ in range(100):
        restored = store.load(store.prepare(ref()))
        assert store.save(ref(), HISTORY, restored.run) and store.flush(20)
    assert dict(tier.scan(CHUNK_KIND)) | dict(tier.scan(TAIL)) == before
    assert store.stats().counters["chunks_encoded"] == 200 // CHUNK
    for got, want in zip(store.load(store.prepare(ref())).run, first, strict=True):
        assert all(map(np.array_equal, got, want))


def test_a_full_queue_skips_and_counts():
    store, codec = gated_store(save_queue_bytes=1000)
    run = kv_of(HISTORY)
    assert store.save(ref("a"), HISTORY, run)  # one always fits
    assert codec.entered.wait(20)
    assert not store.save(ref("b"), HISTORY, run)
    assert store.stats().counters["saves_skipped"] == 1
    assert store.stats().save_queue_bytes == 200 * LAYOUT.bytes_per_token
    codec.gate.set()
    assert store.flush(20)
    assert store.stats().save_queue_bytes == 0
    assert store.save(ref("b"), HISTORY, run)
    store.close()


def test_only_unsaved_bytes_count(store):
    save(store, ref(), HISTORY[:160])
    job_bytes = store._unsaved_bytes(
        store.keys.space.record_key("t", "s"), np.asarray(HISTORY, np.int32)
    )
    assert job_bytes == 40 * LAYOUT.bytes_per_token


def test_a_newer_save_takes_the_place_of_a_waiting_one():
    store, codec = gated_store()
    done: list[tuple[str, int]] = []

    def listener(name):
        return lambda record: done.append((name, record.num_tokens if record else 0))

    store.save(ref("first"), HISTORY[:40], kv_of(HISTORY[:40]))
    assert codec.entered.wait(20)
    for n in (50, 60, 70):
        assert store.save(ref(), HISTORY[:n], kv_of(HISTORY[:n]), on_done=listener(str(n)))
    assert not store.settled(ref())
    codec.gate.set()
    assert store.flush(20)
    store.close()
    assert store.stats().counters["saves_superseded"] == 2
    assert done == [("50", 70), ("60", 70), ("70", 70)]


def test_settled_says_when_a_save_is_over():
    store, codec = gated_store()
    assert store.settled(ref())
    store.save(ref(), HISTORY, kv_of(HISTORY))
    assert not store.settled(ref())
    codec.gate.set()
    assert store.flush(20)
    assert store.settled(ref())
    store.close()


def test_the_views_are_let_go_once_encoded(opened):
    import weakref

    store = opened([ram()])
    run = kv_of(HISTORY)
    watched = weakref.ref(run[0][0])
    assert store.save(ref(), HISTORY, run)
    del run
    assert store.flush(20)
    assert watched() is None


def test_one_bad_save_does_not_end_the_others(store):
    outcome: list[object] = []
    wrong = [(k[..., :8], v) for k, v in kv_of(HISTORY)]
    assert store.save(ref("bad"), HISTORY, wrong, on_done=outcome.append)
    save(store, ref(), HISTORY)
    assert outcome == [None]
    assert store.stats().counters["saves_failed"] == 1
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    assert store.stats().save_queue_bytes == 0


def test_a_failing_listener_does_not_end_the_saving_thread(store):
    store.save(ref("a"), HISTORY, kv_of(HISTORY), on_done=lambda record: 1 // 0)
    assert store.flush(20)
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200


def test_a_store_without_tiers_saves_nothing(opened):
    store = opened([])
    assert not store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.match(ref(), b"pepper", HISTORY, 100).num_tokens == 0
    assert store.flush(1)


def test_a_closed_store_is_a_store_without_sessions():
    store = open_store([ram()])
    save(store, ref(), HISTORY)
    match = store.match(ref(), b"pepper", HISTORY, 200)
    store.close()
    store.close()
    assert not store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.load(match).reason == "disabled"
    assert store.match(ref(), b"pepper", HISTORY, 200).reason == "disabled"
    assert store.prepare(ref()).num_tokens == 0
    assert (store.record(ref()), store.records(), store.tier_of(ref())) == (None, [], None)
    assert store.demote(ref(), "disk") is None
    assert not store.forget(ref())
    assert not store.flush(1)


def test_all_threads_end_with_the_store():
    before = set(threading.enumerate())
    store = open_store([ram()])
    save(store, ref(), HISTORY)
    come_back(store, ref(), HISTORY)
    mine = {x for x in threading.enumerate() if x not in before}
    assert all(x.name.startswith("kvstore-") for x in mine)
    store.close()
    assert not [x for x in mine if x.is_alive()]


def test_packed_bytes_are_those_of_the_blobs():
    for n in (5, 96, 100):
        store = open_store([ram()])
        save(store, ref(), HISTORY[:n])
        record, counted = store.record(ref()), session_bytes(store, ref())
        assert record is not None and counted is not None
        assert record.packed_bytes == counted.chunks + counted.tail
        assert counted.num_blobs == store.stats().tiers[0].num_blobs
        store.close()
