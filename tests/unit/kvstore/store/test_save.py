"""Which blobs a save writes, which it leaves alone, and which saves wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest

from benchmarks.stacks.constants import configured
from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import PAGE, RECORD
from kvstore.codecs.base import RawCodec
from kvstore.config import StoreConfig
from kvstore.errors import StoreClosed
from kvstore.ledger.record import PAGE_CHUNKS
from kvstore.shapes import KVLayer, KVLayout, KVRun, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.ram_tier import RamTier
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    CHUNK,
    LAYOUT,
    Rows,
    begin_save,
    chain_of,
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
NARROW = KVLayout("bfloat16", (KVLayer(1, 2, 2),))  # for sessions of very many tokens


class CountingRam(RamTier):
    """Counts the blobs that are written, and their bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.written: list[tuple[bytes, int]] = []

    @property
    def kinds(self) -> list[bytes]:
        return [kind for kind, _ in self.written]

    def put_many(self, items: Sequence[tuple[bytes, bytes]], *more: Any) -> int:
        self.written += [(key[:1], len(blob)) for key, blob in items]
        return super().put_many(items, *more)

    def replace(self, key: bytes, blob: bytes, *more: Any, **named: Any) -> bool:
        self.written.append((key[:1], len(blob)))
        return super().replace(key, blob, *more, **named)


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


@pytest.fixture
def gated() -> Iterator:
    with ExitStack() as stack:

        def open(**config) -> tuple[ColdStore, GatedCodec]:
            codec, settings = GatedCodec(), configured(StoreConfig, num_threads=1, **config)
            model = StoredModel("m", "f", LAYOUT)
            store = ColdStore(settings, model, codec, [ram()], chunk_tokens=CHUNK)
            return stack.enter_context(closing(store)), codec

        yield open


# ---- the work is that of the new tokens


def test_only_new_chunks_and_the_record_are_written(opened):
    tier = CountingRam(1 << 26)
    store = opened([tier])
    save(store, ref(), HISTORY[:100])
    assert store.stats().counters["chunks_packed"] == 6
    tier.written.clear()
    source = save(store, ref(), HISTORY[:140])
    assert [x.first_token for x in source.packed] == [96, 112]
    assert store.stats().counters["chunks_packed"] == 8
    assert tier.kinds == [CHUNK_KIND] * 2 + [RECORD]


def test_a_long_session_that_grows_writes_in_proportion_to_what_is_new(opened):
    """4,437 chunks of 16 tokens, and then six more chunks; and once more over a page's end."""
    tier, long = CountingRam(1 << 28), tokens(4437 * CHUNK + 9)
    store = opened([tier], layout=NARROW)
    save(store, ref(), long)
    assert tier.kinds.count(PAGE) == 4437 // PAGE_CHUNKS == 34
    for more, num_pages in ((6, 0), (PAGE_CHUNKS, 1)):
        tier.written.clear()
        long += tokens(more * CHUNK, more)
        save(store, ref(), long)
        assert tier.kinds.count(CHUNK_KIND) == more
        assert (tier.kinds.count(PAGE), tier.kinds.count(RECORD)) == (num_pages, 1)
        beside_rows = sum(n for kind, n in tier.written if kind != CHUNK_KIND)
        # The names of a page's chunks at most, twice where a page has become full; and the names
        # of all pages. The whole chain has 142,000 bytes.
        assert beside_rows < (1 + num_pages) * PAGE_CHUNKS * 32 + 35 * 35 + 600
    assert store.record(ref()).num_chunks == 4437 + 6 + PAGE_CHUNKS
    assert come_back(store, ref(), long)[1].num_tokens == len(long) // CHUNK * CHUNK


def test_two_sessions_share_the_pages_of_their_beginning(opened, tiers):
    store = opened(tiers, layout=NARROW)
    beginning = tokens((2 * PAGE_CHUNKS + 3) * CHUNK)
    longer = [*beginning, *tokens(PAGE_CHUNKS * CHUNK, 2)]
    save(store, ref("a"), beginning)
    save(store, ref("b"), longer)
    names = [key for key in everything(tiers[0]) if key[:1] == PAGE]
    assert len(names) == 3
    assert store.forget(ref("a"))
    assert len([key for key in everything(tiers[1]) if key[:1] == PAGE]) == 3
    assert store.prepare(ref("b"))[0].num_tokens == len(longer)
    assert store.forget(ref("b"))
    assert everything(tiers[0]) == everything(tiers[1]) == {}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_page_costs_the_rest_of_the_chain_until_the_next_save(tmp_path, opened, lost):
    far = disk(tmp_path)
    store = opened([far], layout=NARROW)
    long = tokens((2 * PAGE_CHUNKS + 3) * CHUNK)
    save(store, ref(), long)
    chain = chain_of(store, ref(), long)
    far.delete_many([PAGE + chain[(lost + 1) * PAGE_CHUNKS - 1]])
    store.close()
    store = opened([disk(tmp_path)], layout=NARROW)
    assert store.record(ref()).num_chunks == lost * PAGE_CHUNKS
    assert store.prepare(ref())[0].num_chunks == lost * PAGE_CHUNKS
    match, restored = come_back(store, ref(), long)  # a prompt finds all by its names
    assert (match.num_chunks, restored.num_tokens) == (2 * PAGE_CHUNKS + 3, len(long))
    source = save(store, ref(), long)
    assert source.packed == []
    store.close()
    store = opened([disk(tmp_path)], layout=NARROW)
    assert store.record(ref()).num_tokens == len(long)


def test_a_shared_prefix_is_stored_once(store):
    save(store, ref("a"), HISTORY[:100])
    save(store, ref("b"), [*HISTORY[:100], *tokens(20, 5)])
    assert store.stats().counters["chunks_packed"] == 7
    assert store.stats().tiers[0].num_blobs == 7 + 2


def test_a_note_is_kept_as_far_as_the_chain_is(opened):
    store = opened([ram()])
    assert begin_save(store, ref(), HISTORY, note=b"".join(b"%03d" % i for i in range(12)))
    assert store.flush(200)
    assert store.record(ref()).note[-6:] == b"010011"
    lossy = Rows(store, kv_of(HISTORY), restored_tokens=96)
    other = ref("other", salt=b"x")  # none of its chunks is stored
    chain = chain_of(store, other, HISTORY)
    assert store.save(other, chain, lossy, note=bytes(12)) and store.flush(200)
    assert store.record(other) is None


# ---- too short to be saved


@pytest.mark.parametrize("num_tokens", [0, 1, CHUNK - 1])
def test_less_than_a_chunk_is_not_saved_and_the_reason_says_so(store, num_tokens):
    assert not begin_save(store, ref(), HISTORY[:num_tokens])
    assert store.record(ref()) is None
    assert store.prepare(ref())[0].reason == "too-short"
    assert come_back(store, ref(), HISTORY)[0].reason == "too-short"
    assert come_back(store, ref("other"), HISTORY)[0].reason == "never-stored"
    assert store.stats().counters["saves_skipped"] == 0
    save(store, ref(), HISTORY)
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.reason, restored.num_tokens) == (None, 192)


# ---- the queue


def test_a_full_queue_skips_and_counts(gated):
    store, codec = gated(save_queue_bytes=1000)
    assert begin_save(store, ref("a"), HISTORY)  # one always fits
    assert codec.entered.wait(20)
    source = Rows(store, kv_of(HISTORY))
    assert not store.save(ref("b"), chain_of(store, ref(), HISTORY), source)
    assert source.is_released
    assert store.stats().counters["saves_skipped"] == 1
    assert store.stats().save_queue_bytes == 192 * LAYOUT.bytes_per_token
    codec.gate.set()
    assert store.flush(200)
    assert store.stats().save_queue_bytes == 0
    assert begin_save(store, ref("b"), HISTORY)


def test_only_unsaved_bytes_count(gated):
    store, codec = gated()
    codec.gate.set()
    save(store, ref(), HISTORY[:160])
    codec.gate.clear()
    assert begin_save(store, ref("other"), HISTORY)
    assert store.stats().save_queue_bytes == 32 * LAYOUT.bytes_per_token
    codec.gate.set()


def test_a_newer_save_takes_the_place_of_a_waiting_one(gated):
    store, codec = gated()
    done: list[tuple[str, int]] = []

    def listener(name):
        return lambda record: done.append((name, record.num_tokens if record else 0))

    begin_save(store, ref("first"), HISTORY[:40])
    assert codec.entered.wait(20)
    older = Rows(store, kv_of(HISTORY[:50]))
    chain = chain_of(store, ref(), HISTORY[:50])
    assert store.save(ref(), chain, older, on_done=listener("50"))
    for n in (60, 70):
        assert begin_save(store, ref(), HISTORY[:n], on_done=listener(str(n)))
    assert older.is_released and not store.wait_saved(ref(), 0.0)
    codec.gate.set()
    assert store.flush(200)
    store.close()
    assert store.stats().counters["saves_superseded"] == 2
    assert done == [("50", 64), ("60", 64), ("70", 64)]


def test_settled_says_when_a_save_is_over(gated):
    store, codec = gated()
    assert store.wait_saved(ref(), 0.0) and store.is_saved
    begin_save(store, ref(), HISTORY)
    assert not store.wait_saved(ref(), 0.0) and not store.is_saved
    assert not store.wait_saved(ref(), 0.01)
    codec.gate.set()
    assert store.wait_saved(ref(), 200) and store.wait_all_saved(200)
    assert store.wait_saved(ref(), 0.0) and store.is_saved


def test_the_rows_are_released_once_packed(gated):
    store, codec = gated()
    source = Rows(store, kv_of(HISTORY))
    assert store.save(ref(), chain_of(store, ref(), HISTORY), source)
    assert codec.entered.wait(20) and not source.is_released
    codec.gate.set()
    assert store.flush(200)
    assert source.is_released


# ---- what goes wrong


def test_one_bad_save_does_not_end_the_others(store):
    outcome: list[object] = []
    wrong = Rows(store, [(k[..., :8], v) for k, v in kv_of(HISTORY)])
    chain = chain_of(store, ref("bad"), HISTORY)
    assert store.save(ref("bad"), chain, wrong, on_done=outcome.append)
    save(store, ref(), HISTORY)
    assert outcome == [None] and wrong.is_released
    assert store.stats().counters["saves_failed"] == 1
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 192
    assert store.stats().save_queue_bytes == 0


def test_a_failing_listener_does_not_end_the_saving_thread(store):
    begin_save(store, ref("a"), HISTORY, on_done=lambda record: 1 // 0)
    assert store.flush(200)
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 192


def test_all_is_saved_only_once_every_listener_was_called(store):
    go_on = threading.Event()
    begin_save(store, ref(), HISTORY, on_done=lambda record: go_on.wait(30))
    assert store.wait_saved(ref(), 20)  # the session is free before its listeners are called
    assert not store.wait_all_saved(0.05)
    go_on.set()
    assert store.wait_all_saved(200)


def test_a_session_that_no_tier_takes_is_not_saved(opened):
    full = FaultyTier(RamTier(1 << 26))
    store = opened([full])
    save(store, ref(), HISTORY[:80])
    full.fails = lambda number, method: True
    begin_save(store, ref(), HISTORY)
    store.flush(200)
    full.fails = lambda number, method: False
    assert store.record(ref()).num_tokens == 80  # unchanged
    counters = store.counters.as_dict()
    assert (counters["saves"], counters["saves_failed"]) == (1, 1)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 80


def test_a_slower_tier_may_still_take_it(tmp_path, opened):
    full = FaultyTier(RamTier(1 << 26))
    store = opened([full, disk(tmp_path)])
    full.fails = lambda number, method: method in {"put_many", "replace"}
    save(store, ref(), HISTORY)
    assert store.tier_of(ref()) == "disk"
    assert store.counters.as_dict()["saves"] == 1


def test_a_store_without_tiers_saves_nothing(opened):
    store = opened([])
    assert not begin_save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[0].num_tokens == 0
    assert store.flush(1)


def test_a_listener_that_fails_keeps_no_tier_open(gated):
    store, codec = gated()
    called: list[object] = []

    def fails(record: object) -> None:
        called.append(record)
        raise RuntimeError("of the listener")

    sources = [Rows(store, kv_of(HISTORY)) for _ in range(3)]
    for number, source in enumerate(sources):
        session = ref(f"s{number}")
        store.save(session, chain_of(store, session, HISTORY), source, on_done=fails)
    assert codec.entered.wait(20)
    assert store.forget(ref("s1")) and sources[1].is_released and not sources[2].is_released
    codec.gate.set()
    store.close()
    assert called[0] is None and len(called) == 3
    assert all(x.is_released for x in sources)
    assert store.match(ref("s0"), chain_of(store, ref("s0"), HISTORY)).reason == "disabled"


def test_a_closed_store_is_a_store_without_sessions():
    store = open_store([ram()])
    save(store, ref(), HISTORY)
    chain = chain_of(store, ref(), HISTORY)
    match = store.match(ref(), chain)
    store.close()
    store.close()
    assert not begin_save(store, ref(), HISTORY)
    assert store.restore(match).reason == "disabled"
    with pytest.raises(StoreClosed):
        store.fetch(match)
    assert store.match(ref(), chain).reason == "disabled"
    assert store.prepare(ref())[0].num_tokens == 0
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
