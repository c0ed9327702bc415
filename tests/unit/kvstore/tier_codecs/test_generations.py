"""No copy of a copy: what was packed with loss is never packed with loss again."""

from __future__ import annotations

import numpy as np

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
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
    CHUNK,
    come_back,
    everything,
    kv_of,
    open_store,
    ref,
    save,
    snapshot,
    tokens,
)


def test_restored_rows_whose_copies_are_all_gone_are_kept_as_they_are(store, tiers):
    save(store, ref(), HISTORY)
    FAST.packed.clear(), DENSE.packed.clear()
    restored = wake(store, ref(), HISTORY)
    assert store.flush(20)
    evict(store, 0), evict(store, 1)
    longer = [*HISTORY, *tokens(40, 3)]
    run = go_on(restored, longer)
    assert store.save(ref(), longer, run, lossy_tokens=restored.lossy_tokens)
    assert store.flush(20)
    assert sorted(FAST.packed) == sorted(DENSE.packed) == [WHOLE + i * CHUNK for i in range(3)]
    assert store.stats().counters["chunks_kept"] == 12
    assert sorted(codecs_in(tiers[1])) == ["dense.1"] * 3 + ["restored16.1"] * 12
    again = wake(store, ref(), longer)
    assert again.num_tokens == 240
    assert wear(again, longer)[:WHOLE] == [{1}] * WHOLE
    assert again.lossy_tokens >= WHOLE  # it still has not been computed again


def test_a_copy_on_disk_is_enough_not_to_pack_a_restored_chunk_again(store, tiers):
    save(store, ref(), HISTORY)
    restored = wake(store, ref(), HISTORY)
    assert store.flush(20)
    evict(store, 0)
    before = everything(tiers[1])
    assert store.save(ref(), HISTORY, restored.run, lossy_tokens=restored.lossy_tokens)
    assert store.flush(20)
    assert {k: x for k, x in everything(tiers[1]).items() if k[:1] == CHUNK_KIND} == {
        k: x for k, x in before.items() if k[:1] == CHUNK_KIND
    }
    assert codecs_in(tiers[0]) == []
    assert wear(wake(store, ref(), HISTORY), HISTORY)[0] == {16}


def test_a_chunk_that_was_left_half_way_is_kept_as_rows(store):
    save(store, ref(), HISTORY)
    edited = [*HISTORY[:40], *tokens(100, 7)]
    restored = turn(store, ref(), edited)
    assert (restored.num_tokens, restored.lossy_tokens) == (40, 40)
    again = wake(store, ref(), edited)
    assert again.num_tokens == 140
    seen = wear(again, edited)
    assert seen[:40] == [{1}] * 40  # once
    assert seen[40:48] == [{0}] * 8  # of the same chunk, and computed
    assert seen[48:128] == [{1}] * 80
    assert store.stats().counters["chunks_kept"] == 1


def test_a_tail_with_restored_rows_stays_one_until_it_is_computed_again(store):
    save(store, ref(), HISTORY)
    edited = [*HISTORY[:10], 1, 2]
    turn(store, ref(), edited)
    tail = wake(store, ref(), edited)
    assert (tail.num_tokens, tail.lossy_tokens) == (12, 12)
    longer = [*edited, *tokens(30, 4)]
    turn(store, ref(), longer)
    again = wake(store, ref(), longer)
    assert again.num_tokens == 42
    assert wear(again, longer)[:10] == [{1}] * 10
    assert wear(again, longer)[10:16] == [{0}] * 6
    assert wear(again, longer)[16:32] == [{1}] * 16


def test_a_state_with_restored_rows_stays_one(tiers):
    store = open_store(tiers, codecs=BOTH, needs_state=True)
    save(store, ref(), HISTORY[:40], [24, 40])
    run = kv_of(HISTORY[:30])
    for array in (x for pair in run for x in pair):
        array[:, :20] += np.uint16(1)  # as if from a lossy copy
    states = [snapshot(HISTORY, 30)]
    assert store.save(ref("b"), HISTORY[:30], run, states, lossy_tokens=20)
    assert store.flush(20)
    restored = wake(store, ref("b"), HISTORY[:30])
    assert (restored.num_tokens, restored.lossy_tokens) == (30, 30)
    store.close()


def test_many_sleeps_are_one_generation(store):
    history = list(HISTORY)
    save(store, ref(), history)
    for i in range(12):
        if i % 3 == 0:
            store.demote(ref(), "disk")
        if i % 4 == 0:
            evict(store, i // 4 % 2)
        history = [*history[: len(history) - 11 * (i % 2)], *tokens(37, i)]
        turn(store, ref(), history)
        assert {frozenset(x) for x in wear(wake(store, ref(), history), history)} <= {
            frozenset({x}) for x in (0, 1, 16)
        }


def test_exact_codecs_have_nothing_to_remember(tiers):
    store = open_store(tiers)
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].lossy_tokens == 0
    store.close()
