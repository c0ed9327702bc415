"""The index of sessions: bounded, and right about which blobs they share."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstore.blobs.chain import NAME_BYTES, ChainKeys, ChainMaker, as_tokens, joined
from kvstore.blobs.packer import Packer
from kvstore.codecs.presets import codec_by_name
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import PAGE_CHUNKS, Records, SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.shapes import StoredModel
from kvstore.stats import Counters
from tests.clock import Clock
from tests.kv_sessions import (
    CHUNK,
    LAYOUT,
    RenamedRam,
    chain_of,
    come_back,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)
TEMPLATE = SessionRecord(
    tenant="t", id="", fingerprint="f", chunk_tokens=CHUNK, chain=b"", last_used_s=0.0
)


def new_index() -> SessionIndex:
    counters = Counters()
    packer = Packer(codec_by_name("raw"), StoredModel("m", "f", LAYOUT))
    records = Records("m", packer, ChainKeys(CHUNK, window_tokens=2 * CHUNK))
    stack = TierStack([], counters)
    return SessionIndex(records, stack, counters, Clock(), max_bytes=1 << 30, ttl_s=0)


def names(branch_at: int, length: int, branch: str) -> list[bytes]:
    """A chain that all with the same ``branch``, and all up to ``branch_at``, share."""
    ids = [0 if i < branch_at * CHUNK else ord(branch) for i in range(length * CHUNK)]
    return ChainMaker("f", CHUNK).of_tokens(b"salt", as_tokens(ids))


@given(st.data())
def test_blobs_count_as_if_each_session_listed_all_of_its_own(data: st.DataObject) -> None:
    """Sessions grow, shrink, branch and go."""
    index, kept = new_index(), dict[str, SessionRecord]()
    for _ in range(data.draw(st.integers(1, 8))):
        name, branch = data.draw(st.sampled_from("abc")), data.draw(st.sampled_from("xy"))
        chain = names(data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6)), branch)
        states = tuple(sorted(data.draw(st.sets(st.integers(1, len(chain)), max_size=2))))
        record = replace(TEMPLATE, id=name, chain=joined(chain), states=states)
        if data.draw(st.booleans()):
            kept[name] = record
            index.put(record)
        else:
            kept.pop(name, None)
            index.remove(index.key(record))
        users = Counter(x for record in kept.values() for x in index.blob_keys(record))
        known = [*index.blob_keys(record), *users]
        assert index.unused(known) == [x for x in known if not users[x]]
        for own in kept.values():
            mine = {*index.blob_keys(own)}
            expected = [x for x in known if users[x] <= (x in mine)]
            assert index.unshared(known, index.key(own)) == expected


def test_a_chunk_takes_no_more_memory_than_it_is_charged_for() -> None:
    index, num_chunks = new_index(), 4437  # of 142,000 tokens
    rng = np.random.default_rng(1)
    chains = [rng.bytes(num_chunks * NAME_BYTES) for _ in range(10)]
    tracemalloc.start()
    for i, chain in enumerate(chains):
        index.put(replace(TEMPLATE, id=f"s{i}", chain=bytes(bytearray(chain))))  # a copy
    taken = tracemalloc.get_traced_memory()[0] / (len(chains) * num_chunks)
    tracemalloc.stop()
    charged = index._nbytes / (len(chains) * num_chunks)
    assert taken <= charged <= 150


def test_the_list_of_sessions_is_bounded_and_loses_the_oldest(opened):
    store = opened([ram()], index_bytes=2200)  # a session of 50 tokens takes about 920
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
