"""A codec for each tier, others adopted while running, and never one copy of another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.chain import CHUNK as CHUNK_KIND
from kvstore.chain import TAIL
from kvstore.codec_set import CodecSet
from kvstore.codecs.raw import RawCodec
from kvstore.errors import UnknownCodec
from kvstore.format import codec_in
from kvstore.records import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVPair
from kvstore.store import ColdStore, Restored
from kvstore.tiers.base import Tier
from tests.blob_names import key_in
from tests.kv_sessions import (
    CHUNK,
    LAYOUT,
    come_back,
    disk,
    everything,
    kv_of,
    open_store,
    ram,
    ref,
    save,
    snapshot,
    tokens,
)
from tests.worn_codec import WornCodec, wear_of

HISTORY = tokens(200)  # 12 chunks and a tail of 8
WHOLE = 12 * CHUNK
FAST, DENSE = WornCodec("fast.1", 1), WornCodec("dense.1", 16)
BOTH = CodecSet(FAST, DENSE, DENSE)


def codecs_in(tier: Tier, kind: bytes = CHUNK_KIND) -> list[str]:
    return [codec_in(blob).decode() for key, blob in tier.scan(kind)]


def wake(store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> Restored:
    return store.load(store.match(session, session.salt, prompt, len(prompt)))


def wear(restored: Restored, prompt: Sequence[int]) -> list[set[int]]:
    return wear_of(restored.run, kv_of(prompt[: restored.num_tokens]))


def go_on(restored: Restored, prompt: Sequence[int]) -> list[KVPair]:
    """What an engine has after a restore and a prefill of the rest."""
    run = kv_of(prompt)
    for pair, old in zip(run, restored.run, strict=True):
        for array, rows in zip(pair, old, strict=True):
            array[:, : restored.num_tokens] = rows
    return run


def turn(store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> Restored:
    """Wake, compute the rest, save."""
    restored = wake(store, session, prompt)
    run = go_on(restored, prompt)
    assert store.save(session, prompt, run, lossy_tokens=restored.lossy_tokens)
    assert store.flush(20)
    return restored


def evict(store: ColdStore, place: int) -> None:
    names = [name for name, _ in store._stack.scan(place, b"") if name[:1] in (CHUNK_KIND, TAIL)]
    store._stack._tiers[place].delete_many(names)


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [ram(), disk(tmp_path)]


@pytest.fixture
def store(tiers: list[Tier]):
    store = open_store(tiers, codecs=BOTH)
    yield store
    store.close()


# ---- a codec for each tier


def test_each_tier_has_its_own_codec_and_rows_are_packed_once_for_each(store, tiers):
    FAST.packed.clear(), DENSE.packed.clear()
    save(store, ref(), HISTORY)
    firsts = list(range(0, WHOLE, CHUNK))
    assert sorted(FAST.packed) == sorted(DENSE.packed) == firsts
    assert codecs_in(tiers[0]) == ["fast.1"] * 12
    assert codecs_in(tiers[1]) == ["dense.1"] * 12
    assert codecs_in(tiers[0], TAIL) == codecs_in(tiers[1], TAIL) == ["rows16.1"]
    assert store.stats().codecs == {"ram": "fast.1", "disk": "dense.1"}
    save(store, ref(), [*HISTORY, *tokens(20, 1)])  # nothing of it is packed again
    assert sorted(FAST.packed) == sorted(DENSE.packed) == [*firsts, WHOLE]


def test_the_fastest_tier_is_read_and_each_copy_is_of_the_first_generation(store):
    save(store, ref(), HISTORY)
    near = wake(store, ref(), HISTORY)
    assert (near.num_tokens, near.tier, near.lossy_tokens) == (200, "ram", WHOLE)
    assert wear(near, HISTORY) == [{1}] * WHOLE + [{0}] * 8
    assert store.demote(ref(), "disk") == "disk"
    far = wake(store, ref(), HISTORY)
    assert (far.num_tokens, far.tier, far.lossy_tokens) == (200, "disk", WHOLE)
    assert wear(far, HISTORY) == [{16}] * WHOLE + [{0}] * 8


def test_what_was_read_from_disk_is_put_near_as_it_is(store, tiers):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    wake(store, ref(), HISTORY)
    assert store.flush(20)
    near, far = ({key_in(x): blob for x, blob in everything(tier).items()} for tier in tiers)
    assert near.items() <= far.items()
    assert codecs_in(tiers[0]) == ["dense.1"] * 12
    again = wake(store, ref(), HISTORY)
    assert (again.tier, wear(again, HISTORY)[0]) == ("ram", {16})


def test_memory_has_the_session_before_it_is_packed_for_the_disk(tiers):
    gate = threading.Event()

    class Slow(WornCodec):
        def encode(self, run, layout, first_token):
            assert gate.wait(20)
            return super().encode(run, layout, first_token)

    store = open_store(tiers, codecs=CodecSet(FAST, Slow("slow.1", 16), DENSE))
    saved = threading.Event()
    store.save(ref(), HISTORY, kv_of(HISTORY), on_done=lambda record: saved.set())
    while wake(store, ref(), HISTORY).num_tokens < 200:
        pass
    assert not saved.is_set()
    assert codecs_in(tiers[1]) == []
    gate.set()
    assert store.flush(20)
    assert saved.is_set() and codecs_in(tiers[1]) == ["slow.1"] * 12
    store.close()


def test_under_pressure_the_disk_gets_copies_of_what_memory_has(tiers):
    gate, entered = threading.Event(), threading.Event()

    class Gated(WornCodec):
        def encode(self, run, layout, first_token):
            entered.set()
            assert gate.wait(20)
            return super().encode(run, layout, first_token)

    limit = 250 * LAYOUT.bytes_per_token  # one that is being saved, and most of another
    store = open_store(
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
    store.close()


def test_a_codec_that_fails_for_the_disk_leaves_the_session_in_memory(tiers):
    class Failing(WornCodec):
        def encode(self, run, layout, first_token):
            raise ValueError("as a defect would")

    store = open_store(tiers, codecs=CodecSet(FAST, Failing("failing.1", 16), DENSE))
    store.save(ref(), HISTORY, kv_of(HISTORY))
    assert store.flush(20)
    assert wake(store, ref(), HISTORY).num_tokens == 200
    assert codecs_in(tiers[1]) == ["fast.1"] * 12
    store.close()


def test_a_forgotten_session_is_gone_in_every_codec(store, tiers):
    save(store, ref(), HISTORY)
    store.demote(ref(), "disk")
    wake(store, ref(), HISTORY)  # memory has it in the disk's codec now
    assert store.flush(20)
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}


def test_a_pinned_session_is_held_in_whatever_codec_it_is(tmp_path):
    near, far = ram(130_000), disk(tmp_path)
    store = open_store([near, far], codecs=BOTH, pinned_share=0.9, tenant_pinned_share=1.0)
    save(store, ref(), HISTORY[:64])
    store.demote(ref(), "disk")
    wake(store, ref(), HISTORY[:64])
    assert store.flush(20)
    store.pin(ref(), True)
    for i in range(8):
        save(store, ref(f"other {i}"), tokens(150, i + 1))
    assert codecs_in(near).count("dense.1") == 4
    store.pin(ref(), False)
    assert near._index._pins == far._index._pins == {}
    store.close()


def test_after_a_restart_the_disk_is_read_in_its_own_codec(tmp_path, tiers):
    store = open_store(tiers, codecs=BOTH)
    save(store, ref(), HISTORY)
    store.close()
    store = open_store([ram(), disk(tmp_path)], codecs=BOTH)
    counted = store.session_bytes(ref())
    assert [x.packed_bytes for x in store.records()] == [counted.chunks + counted.tail]
    restored = wake(store, ref(), HISTORY)
    assert (restored.num_tokens, wear(restored, HISTORY)[0]) == (200, {16})
    store.close()


# ---- no copy of a copy


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


# ---- others, while it runs


def test_what_was_stored_before_is_read_and_what_comes_is_packed_by_the_new_one(tiers):
    store = open_store(tiers)
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
    record, counted = store.record(ref()), store.session_bytes(ref())
    assert record.packed_bytes == counted.chunks + counted.tail
    store.close()


def test_without_keeping_them_old_blobs_are_a_miss_and_make_room(tiers):
    store = open_store(tiers, codecs=CodecSet.one(FAST))
    save(store, ref(), HISTORY)
    store.adopt(CodecSet.one(RawCodec()), keep=False)
    match = store.match(ref(), ref().salt, HISTORY, 200)
    assert (match.num_tokens, match.reason) == (0, "fingerprint")
    assert store.records() == [] and store.record(ref()) is None
    save(store, ref(), HISTORY)  # computed anew
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    assert store.forget(ref())
    assert everything(tiers[0]) == everything(tiers[1]) == {}
    store.close()


def test_a_part_in_a_codec_that_is_not_known_any_more_is_no_eviction(tmp_path, tiers):
    store = open_store(tiers)
    save(store, ref(), HISTORY)
    store.adopt(CodecSet.one(FAST))
    longer = [*HISTORY, *tokens(40, 2)]
    turn(store, ref(), longer)
    store.close()
    near, far = ram(), disk(tmp_path)
    store = open_store([near, far], codecs=CodecSet.one(FAST))
    match = store.match(ref(), ref().salt, longer, 300)
    assert (match.num_tokens, match.reason) == (0, "fingerprint")
    assert store.forget(ref())
    assert everything(near) == everything(far) == {}
    store.close()


def test_a_restarted_store_reads_what_it_is_told_that_it_may(tmp_path, tiers):
    store = open_store(tiers)
    save(store, ref(), HISTORY)
    store.close()
    store = open_store([ram(), disk(tmp_path)], codecs=CodecSet.one(FAST, (RawCodec(),)))
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    store.close()


def test_a_codec_that_cannot_take_the_layout_changes_nothing():
    layout = KVLayout("float32", (KVLayer(1, 16, 16),))
    store = open_store([ram()], layout=layout)
    with pytest.raises(UnknownCodec):
        store.adopt(CodecSet.one(FAST))
    assert store.codecs.ram.id == "raw.1"
    save(store, ref(), HISTORY)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 200
    store.close()


def test_a_pin_holds_what_comes_in_the_new_codec(tmp_path):
    near, far = ram(), disk(tmp_path)
    store = open_store([near, far], codecs=CodecSet.one(FAST))
    save(store, ref(), HISTORY[:100])
    store.pin(ref(), True)
    store.adopt(CodecSet.one(DENSE))
    turn(store, ref(), HISTORY)
    held = near._index._held
    assert {key_in(x) for x in held} == {key_in(x) for x in everything(near)}
    store.pin(ref(), False)
    assert near._index._pins == far._index._pins == {}
    store.close()


def test_a_blob_in_an_unknown_codec_is_a_miss_and_no_error(tiers):
    """As if somebody had put it there under our mark."""
    theirs = open_store([ram()], codecs=CodecSet.one(WornCodec("theirs.1", 3)))
    save(theirs, ref(), HISTORY)
    foreign = {key_in(x): blob for x, blob in everything(theirs._stack._tiers[0]).items()}
    theirs.close()
    store = open_store(tiers, codecs=CodecSet.one(FAST))
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
    store.close()


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


def test_adopting_while_saving_and_waking(tiers):
    store = open_store(tiers, codecs=BOTH)
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
    store.close()
