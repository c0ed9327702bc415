"""The index of sessions: bounded, and hashing the keys of a session once."""

from __future__ import annotations

from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import PAGE_CHUNKS, Records, SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from tests.clock import Clock
from tests.kv_sessions import (
    CHUNK,
    RenamedRam,
    chain_of,
    come_back,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)


class CountingRecords(Records):
    num_hashed = 0

    def blob_keys(self, record: SessionRecord) -> list[bytes]:
        self.num_hashed += 1
        return super().blob_keys(record)


def test_keys_are_not_hashed_again_for_every_look(store):
    save(store, ref(), HISTORY)
    record = store.record(ref())
    kind = CountingRecords("model", store.packer, store.keys)
    counters = Counters()
    stack = TierStack([], counters)
    index = SessionIndex(kind, stack, counters, Clock(), max_bytes=1 << 20, ttl_s=0)
    index.put(record)
    assert len(index.blob_keys(record)) == 12
    assert list(index.unused([b"x"])) == [b"x"] and not index.unused(index.blob_keys(record))
    index.remove(index.key(record))
    assert index.unused([b"x"]) == [b"x"]
    assert kind.num_hashed == 1


def test_another_history_has_other_keys(store):
    save(store, ref(), HISTORY)
    before = store.record(ref())
    save(store, ref(), [*HISTORY[:150], 1, 2])
    after = store.record(ref())
    listed = store.ledger.index.blob_keys
    assert listed(before) == [x.key for x in store.keys.chunks(before.names)] != listed(after)
    assert listed(after) == [x.key for x in store.keys.chunks(after.names)]


def test_the_list_of_sessions_is_bounded_and_loses_the_oldest(opened):
    store = opened([ram()], index_bytes=2700)  # a session of 50 tokens takes about 1,170
    for name in "abc":
        save(store, ref(name), tokens(50, ord(name)))
    assert {x.id for x in store.ledger.index.all()} == {"b", "c"}
    assert come_back(store, ref("a"), tokens(50, ord("a")))[1].num_tokens == 48


def test_of_two_copies_of_a_record_the_one_whose_pages_are_there_counts(opened):
    near, far = ram(), RenamedRam(1 << 26)
    store = opened([near, far])
    long = tokens((PAGE_CHUNKS + 3) * CHUNK)
    save(store, ref(), long)
    near.delete_many([b"p" + chain_of(store, ref(), long)[PAGE_CHUNKS - 1]])
    store.ledger.index.remove(store.ledger.index.key_of(ref()))
    assert store.record(ref()).num_tokens == len(long)
    again = opened([near, far])
    assert again.record(ref()).num_tokens == len(long)
