"""No copy of a copy: rows that were packed with loss are never packed with loss again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.packer import RAW, StoreCodecs
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Restored
from kvstore.tiers.base import Tier
from tests.codec_sessions import DENSE, FAST, HISTORY, WHOLE, evict, turn, wake, wear
from tests.kv_sessions import (
    CHUNK,
    MIB,
    Rows,
    SharedRam,
    begin_save,
    chain_of,
    everything,
    kv_of,
    ram,
    ref,
    save,
    tokens,
)
from tests.unit.kvstore.conftest import Opened
from tests.worn_codec import WornCodec


@pytest.fixture
def store(opened: Opened, tiers: list[Tier]) -> ColdStore:
    return opened(tiers, codecs=StoreCodecs(FAST))


def test_a_chunk_is_packed_once_and_its_bytes_rest_in_every_tier(store, tiers):
    FAST.packed.clear()
    save(store, ref(), HISTORY)
    firsts = list(range(0, WHOLE, CHUNK))
    assert FAST.packed == firsts
    assert everything(tiers[0]) == everything(tiers[1])
    save(store, ref(), [*HISTORY, *tokens(20, 1)])
    assert FAST.packed == [*firsts, WHOLE]
    restored = wake(store, ref(), HISTORY)
    assert (restored.num_tokens, restored.lossy_tokens) == (WHOLE, WHOLE)
    assert wear(restored, HISTORY) == [{1}] * WHOLE


def test_a_restored_chunk_whose_copies_are_all_gone_ends_the_chain(store, tiers):
    save(store, ref(), HISTORY)
    restored = wake(store, ref(), HISTORY)
    assert store.flush(200)
    chain = chain_of(store, ref(), HISTORY)
    for tier in tiers:
        tier.delete_many([CHUNK_KIND + chain[4]])
    FAST.packed.clear()
    longer = [*HISTORY, *tokens(40, 3)]
    assert begin_save(store, ref(), longer, restored)
    assert store.flush(200)
    assert FAST.packed == []
    assert store.record(ref()).num_chunks == 4
    assert store.stats().counters["chunks_left_out"] == 15 - 4
    again = turn(store, ref(), longer)  # the next return computes the rest, and that is saved
    assert again.num_tokens == 4 * CHUNK
    assert min(FAST.packed) == 4 * CHUNK and {192, 208, 224} <= {*FAST.packed}
    assert wear(wake(store, ref(), longer), longer) == [{1}] * 240


def test_a_session_of_which_nothing_is_left_is_saved_when_it_is_computed_again(store):
    save(store, ref(), HISTORY)
    restored = wake(store, ref(), HISTORY)
    assert store.flush(200)
    evict(store, 0), evict(store, 1)
    for session in (ref(), ref("other")):
        assert begin_save(store, session, HISTORY, restored)
        assert store.flush(200)
    assert store.stats().counters["chunks_packed"] == 12
    chain = chain_of(store, ref(), HISTORY)
    reasons = [store.match(x, chain).reason for x in (ref(), ref("other"))]
    assert reasons == ["evicted", "never-stored"]
    assert turn(store, ref(), HISTORY).num_tokens == 0
    assert wear(wake(store, ref(), HISTORY), HISTORY) == [{1}] * WHOLE


def test_a_hot_session_that_is_edited_inside_a_restored_chunk_ends_before_it(store):
    """The chunk would have restored rows and new ones."""
    save(store, ref(), HISTORY)
    restored = wake(store, ref(), HISTORY)
    assert store.flush(200)
    edited = [*HISTORY[:40], *tokens(100, 7)]
    run = kv_of(edited)
    for pair, before in zip(run, restored.run, strict=True):
        for array, rows in zip(pair, before, strict=True):
            array[:, :40] = rows[:, :40]
    FAST.packed.clear()
    source = Rows(store, run, (), 40)
    assert store.save(ref(), chain_of(store, ref(), edited), source) and store.flush(200)
    assert FAST.packed == [] and source.packed == []
    assert store.record(ref()).num_tokens == 32
    turn(store, ref(), edited)
    again = wake(store, ref(), edited)
    assert (again.num_tokens, wear(again, edited)) == (128, [{1}] * 128)


# ---- a hundred sleeps


@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_sleeps_at_two_engines_are_one_generation(opened, seed):
    """Two sessions with one beginning; edits inside chunks, hot returns, evictions, adoptions."""
    choose, shared = random.Random(seed), SharedRam(64 * MIB)
    known = [StoreCodecs(x, readable=(FAST, DENSE)) for x in (FAST, DENSE)]
    stores = [opened([ram(), shared], codecs=x) for x in known]
    histories = {"a": HISTORY, "b": [*HISTORY[:90], *tokens(50, 5)]}
    hot: dict[tuple[int, str], tuple[list[int], Restored]] = {}
    num_restored = 0
    for number in range(100):
        at, name = choose.randrange(2), choose.choice("ab")
        store, session = stores[at], ref(name)
        keep = choose.choice([1.0, 1.0, choose.random()])
        if (at, name) in hot and choose.random() < 0.3:
            history, restored = hot[at, name]
            history = history[: int(len(history) * keep)]
            if len(history) < restored.num_tokens:  # edited inside restored rows
                restored = _cut(restored, len(history))
            prompt = [*history, *tokens(choose.randrange(1, 40), number)]
        else:
            history = histories[name]
            prompt = [*history[: int(len(history) * keep)], *tokens(20, number)][:400]
            restored = wake(store, session, prompt)
            assert restored.num_tokens % CHUNK == 0
            seen = wear(restored, prompt)
            assert all(x in ({1}, {16}) for x in seen)
            assert restored.lossy_tokens == len(seen)
            num_restored += len(seen)
        if choose.random() < 0.3:
            evict(store, choose.randrange(2), choose.randrange(1, 4))
        if choose.random() < 0.1:
            store.adopt(choose.choice(known))
        begin_save(store, session, prompt, restored)
        assert store.flush(200)
        histories[name], hot[at, name] = prompt, (prompt, restored)
    assert num_restored > 1000


def _cut(restored: Restored, num_tokens: int) -> Restored:
    run = [(k[:, :num_tokens], v[:, :num_tokens]) for k, v in restored.run]
    return replace(restored, num_tokens=num_tokens, run=run, lossy_tokens=num_tokens)


def test_blobs_of_before_the_first_codec_are_packed_once(tiers, opened):
    """By ``pack_when``; what is restored of them before is exact, and may be saved as it is."""
    store = opened(tiers, codecs=StoreCodecs(RAW))
    save(store, ref(), HISTORY)
    restored = wake(store, ref(), HISTORY)
    store.adopt(StoreCodecs(WornCodec("fast.1", 1)))
    assert restored.lossy_tokens == 0
    assert store.flush(200)
    evict(store, 0), evict(store, 1)
    assert begin_save(store, ref(), HISTORY, restored) and store.flush(200)
    assert wear(wake(store, ref(), HISTORY), HISTORY) == [{1}] * WHOLE
