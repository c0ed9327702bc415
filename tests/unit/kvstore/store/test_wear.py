"""No copy of a copy: rows that were packed with loss are never packed with loss again."""

from __future__ import annotations

import numpy as np

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import TAIL
from kvstore.blobs.codec_set import CodecSet
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
    ref,
    save,
    snapshot,
    tokens,
)
from tests.worn_codec import ThinCodec

THIN = ThinCodec("thin.1", 1)


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
    packed = [200, WHOLE + CHUNK, WHOLE + 2 * CHUNK]  # after the restored rows
    assert sorted(FAST.packed) == sorted(DENSE.packed) == packed
    assert store.stats().counters["chunks_kept"] == 13
    kept = ["dense.1"] * 2 + ["restored16.1"] * 12 + ["segments.1"]
    assert sorted(codecs_in(tiers[1])) == kept
    again = wake(store, ref(), longer)
    assert again.num_tokens == 240
    assert wear(again, longer) == [{1}] * 240
    assert again.lossy_tokens == 240


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


def test_a_chunk_that_was_left_half_way_goes_on_as_it_was_packed(store, tiers):
    save(store, ref(), HISTORY)
    edited = [*HISTORY[:40], *tokens(100, 7)]
    restored = turn(store, ref(), edited)
    assert (restored.num_tokens, restored.lossy_tokens) == (40, 40)
    again = wake(store, ref(), edited)
    assert (again.num_tokens, again.lossy_tokens) == (140, 140)
    assert wear(again, edited) == [{1}] * 140
    assert store.stats().counters["chunks_kept"] == 1
    assert codecs_in(tiers[0]).count("segments.1") == codecs_in(tiers[1]).count("segments.1") == 1
    store.demote(ref(), "disk")
    far = wear(wake(store, ref(), edited), edited)
    assert far[:32] == [{16}] * 32 and far[40:] == [{16}] * 100
    assert far[32:40] == [{1}] * 8  # this codec's half of a chunk is larger than these rows


def test_a_tail_goes_on_as_it_was_packed_until_it_is_a_chunk(store, tiers):
    save(store, ref(), HISTORY[:36])
    history = list(HISTORY[:36])
    FAST.packed.clear()
    for more in (2, 3, 4, 5):  # tails of 6, 9 and 13 tokens, then a chunk and a tail of 2
        history += tokens(more, more)
        turn(store, ref(), history)
        again = wake(store, ref(), history)
        assert (again.num_tokens, again.lossy_tokens) == (len(history), len(history))
        assert wear(again, history) == [{1}] * len(history)
    assert FAST.packed == [36, 38, 41, 45, 48]  # each time the new rows
    assert codecs_in(tiers[0], TAIL) == ["fast.1"]
    store.demote(ref(), "disk")
    assert wear(wake(store, ref(), history), history) == [{16}] * len(history)


def test_rows_that_a_shorter_prompt_left_of_a_tail_are_taken_over(store):
    save(store, ref(), HISTORY[:46])  # a tail of 14
    shorter = [*HISTORY[:43], *tokens(3, 1)]
    restored = turn(store, ref(), shorter)
    assert (restored.num_tokens, restored.lossy_tokens) == (43, 43)
    again = wake(store, ref(), shorter)
    assert (again.num_tokens, wear(again, shorter)) == (46, [{1}] * 46)


def test_rows_that_an_edit_dropped_of_a_tail_never_come_back(tiers, opened):
    store = opened(tiers, codecs=CodecSet(THIN, THIN, THIN))
    save(store, ref(), HISTORY[:46])  # a tail of 14
    history = [*HISTORY[:40], *tokens(3, 1)]
    for more in range(2, 6):
        turn(store, ref(), history)  # the first takes over all 14, and uses 8 of them
        again = wake(store, ref(), history)
        assert (again.num_tokens, wear(again, history)) == (len(history), [{1}] * len(history))
        history += tokens(3, more)


def test_of_a_tail_that_is_gone_the_restored_rows_are_kept_and_the_others_packed(store, tiers):
    save(store, ref(), HISTORY[:40])
    restored = wake(store, ref(), HISTORY[:40])
    assert store.flush(20)
    longer = [*HISTORY[:40], *tokens(5, 4)]
    run = go_on(restored, longer)
    for tier in tiers:
        tier.delete_many([x for x in everything(tier) if x[:1] == TAIL])
    assert store.save(ref(), longer, run, lossy_tokens=restored.lossy_tokens)
    assert store.flush(20)
    again = wake(store, ref(), longer)
    assert (again.num_tokens, wear(again, longer)) == (45, [{1}] * 45)
    assert codecs_in(tiers[0], TAIL) == ["segments.1"]


def test_a_state_with_restored_rows_stays_one(tiers, opened):
    store = opened(tiers, codecs=BOTH, needs_state=True)
    save(store, ref(), HISTORY[:40], [24, 40])
    run = kv_of(HISTORY[:30])
    for array in (x for pair in run for x in pair):
        array[:, :20] += np.uint16(1)  # as if from a lossy copy
    states = [snapshot(HISTORY, 30)]
    assert store.save(ref("b"), HISTORY[:30], run, states, lossy_tokens=20)
    assert store.flush(20)
    restored = wake(store, ref("b"), HISTORY[:30])
    assert (restored.num_tokens, restored.lossy_tokens) == (30, 30)


def test_rows_beside_states_are_of_one_generation(tiers, opened):
    store = opened(tiers, codecs=BOTH, needs_state=True)
    history = list(HISTORY[:25])
    save(store, ref(), history, [25])
    for i, more in enumerate((3, 2, 7, 20, 5)):
        history += tokens(more, i)
        restored = wake(store, ref(), history)
        assert restored.num_tokens == len(history) - more
        states = [snapshot(history, len(history))]
        run = go_on(restored, history)
        lossy = restored.lossy_tokens
        assert store.save(ref(), history, run, states, lossy_tokens=lossy)
        assert store.flush(20)
    again = wake(store, ref(), history)
    assert (again.num_tokens, wear(again, history)) == (62, [{1}] * 62)
    store.demote(ref(), "disk")
    assert wear(wake(store, ref(), history), history) == [{16}] * 62


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


def test_exact_codecs_have_nothing_to_remember(tiers, opened):
    store = opened(tiers)
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].lossy_tokens == 0
