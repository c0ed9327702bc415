"""The index of sessions: bounded, and hashing the keys of a session once."""

from __future__ import annotations

from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.store.token_keys import TokenRecords
from tests.clock import Clock
from tests.kv_sessions import come_back, ram, ref, save, tokens

HISTORY = tokens(200)


class CountingRecords(TokenRecords):
    num_hashed = 0

    def blob_keys(self, record: SessionRecord) -> list[bytes]:
        self.num_hashed += 1
        return super().blob_keys(record)


def test_keys_are_not_hashed_again_for_every_look(store):
    save(store, ref(), HISTORY)
    record = store.record(ref())
    kind = CountingRecords(store.keys, store.packer)
    counters = Counters()
    stack = TierStack([], counters)
    index = SessionIndex(kind, stack, counters, Clock(), max_bytes=1 << 20, ttl_s=0)
    index.put(record)
    assert len(index.blob_keys(record)) == 13
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
    assert listed(before) == [x.key for x in store.keys.spans(before)] != listed(after)
    assert listed(after) == [x.key for x in store.keys.spans(after)]


def test_the_list_of_sessions_is_bounded_and_loses_the_oldest(opened):
    store = opened([ram()], index_bytes=3000)  # a session of 50 tokens takes about 1,450
    for name in "abc":
        save(store, ref(name), tokens(50, ord(name)))
    assert {x.id for x in store.ledger.index.all()} == {"b", "c"}
    assert come_back(store, ref("a"), tokens(50, ord("a")))[1].num_tokens == 50
