"""Models whose cache cannot be cut back: restorable only where a state was taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.blobs.chain import STATE
from kvstore.blobs.packer import RAW, StoreCodecs
from kvstore.blobs.state_tree import MatrixArray, StateArray, StateTree
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.shapes import KVLayout
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import StateAt
from tests.codec_sessions import FAST, wake
from tests.faulty_tier import FaultyTier, within
from tests.kv_sessions import (
    CHUNK,
    LAYOUT,
    RenamedRam,
    Rows,
    chain_of,
    check,
    come_back,
    disk,
    everything,
    kv_of,
    ram,
    ref,
    save,
    state_at,
    tokens,
    trees_equal,
)

HISTORY = tokens(208)
ROTATING_ONLY = KVLayout("bfloat16", ())


@pytest.fixture(params=[LAYOUT, ROTATING_ONLY], ids=["hybrid", "no growing layers"])
def store(request, opened):
    return opened([ram()], layout=request.param, needs_state=True)


def num_states(store: ColdStore) -> int:
    return sum(1 for _ in store.ledger.stack.scan(0, STATE))


def states_of(store: ColdStore, session_id: str = "s") -> tuple[int, ...]:
    """Positions in tokens."""
    record = store.record(ref(session_id))
    assert record is not None
    return tuple(x * CHUNK for x in record.states)


def lose_state(store: ColdStore, position: int) -> None:
    chain = chain_of(store, ref(), HISTORY)
    store.ledger.stack.delete(0, [store.keys.state(chain, position // CHUNK).key])


@pytest.mark.parametrize("position", [16, 32, 80])
def test_the_end_of_any_chunk_will_do(store, position):
    save(store, ref(), HISTORY[:96], [position, 96])
    match, restored = come_back(store, ref(), [*HISTORY[:95], 7, 7])
    assert (match.num_tokens, match.reason) == (position, "diverged")
    assert trees_equal(restored.state, state_at(HISTORY, position))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([*HISTORY[:50], *[7] * 30], "diverged"), (HISTORY[:70], "evicted")],
    ids=["it leaves the history", "it ends before"],
)
def test_a_prompt_with_no_state_in_reach_finds_nothing(store, prompt, reason):
    save(store, ref(), HISTORY[:100], [80, 96])
    match, restored = come_back(store, ref(), prompt)
    assert (match.num_tokens, match.reason) == (0, reason)
    assert (restored.num_tokens, restored.state) == (0, None)


@pytest.mark.parametrize("session", [None, ref("new")])
def test_another_session_with_the_same_beginning_finds_the_state(store, session):
    save(store, ref(), HISTORY[:100], [48, 96])
    match, restored = come_back(store, session, [*HISTORY[:60], *tokens(30, 4)])
    assert match.num_tokens == restored.num_tokens == 48
    assert trees_equal(restored.state, state_at(HISTORY, 48))


def test_a_state_that_the_engine_is_past_is_not_read(store):
    save(store, ref(), HISTORY[:96], [80])
    chain = chain_of(store, ref(), HISTORY)
    assert store.match(ref(), chain, 5).reads == ()
    match = store.match(ref(), chain, 4)
    assert store.fetch(match).num_chunks == match.num_chunks == 5


def test_the_newest_state_and_the_one_before_the_answer_are_kept(store):
    for n in (32, 64, 80, 112, 128):
        save(store, ref(), HISTORY[:n], [16, n - 16, n])
    assert states_of(store) == (112, 128)
    assert num_states(store) == 2
    again = [*HISTORY[:112], 1]  # the answer is generated again
    assert come_back(store, ref(), again)[1].num_tokens == 112
    assert come_back(store, ref(), [*HISTORY[:70], 1])[0].num_tokens == 0


def test_a_beginning_that_sessions_share_keeps_its_state_once(opened):
    store = opened([ram()], needs_state=True)
    system = HISTORY[:40]
    prompts = [[*system, *tokens(72, seed)] for seed in (1, 2, 3)]
    save(store, ref("a"), prompts[0], [32, 96, 112])
    assert come_back(store, ref("b"), prompts[1])[0].num_tokens == 0
    save(store, ref("b"), prompts[1], [32, 96, 112])
    match, restored = come_back(store, ref("c"), prompts[2])
    assert match.num_tokens == 32
    assert trees_equal(restored.state, state_at(prompts[2], 32))
    save(store, ref("c"), prompts[2], [96, 112])
    longer = [*prompts[1], *tokens(32, 9)]
    save(store, ref("b"), longer, [128, 144])  # it stays while others begin so, too
    kept = {"a": (96, 112), "b": (32, 128, 144), "c": (96, 112)}
    assert {x: states_of(store, x) for x in "abc"} == kept
    store.forget(ref("a"))
    store.forget(ref("c"))
    longest = [*longer, *tokens(16, 5)]
    save(store, ref("b"), longest, [144, 160])
    assert states_of(store, "b") == (144, 160)


def test_states_of_an_abandoned_branch_go(store):
    save(store, ref(), HISTORY[:96], [32, 96])
    other = [*HISTORY[:50], *tokens(46, 8)]
    save(store, ref(), other, [80])
    assert states_of(store) == (32, 80)
    assert num_states(store) == 2
    assert come_back(store, ref(), [*other, 1])[1].num_tokens == 80


def test_a_turn_without_states_keeps_those_that_still_hold(store):
    save(store, ref(), HISTORY[:96], [80])
    save(store, ref(), HISTORY[:160])
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 80
    save(store, ref(), [*HISTORY[:40], *tokens(100, 8)])
    assert states_of(store) == () and num_states(store) == 0


def test_a_state_that_another_session_uses_stays(store):
    save(store, ref("a"), HISTORY[:48], [32, 48])
    save(store, ref("b"), [*HISTORY[:40], *tokens(10, 5)], [32, 48])
    save(store, ref("a"), tokens(64, 3), [64])
    assert come_back(store, ref("b"), [*HISTORY[:40], *tokens(9, 6)])[1].num_tokens == 32
    assert store.forget(ref("b"))
    assert num_states(store) == 1


def test_a_lost_state_is_an_eviction_and_a_lower_one_helps(store):
    save(store, ref(), HISTORY[:96], [32, 96])
    lose_state(store, 96)
    match, _ = come_back(store, ref(), HISTORY)
    assert (match.num_tokens, match.reason) == (32, "evicted")


def test_a_lost_state_is_left_out_of_the_next_record(store):
    save(store, ref(), HISTORY[:96], [32, 96])
    lose_state(store, 32)
    save(store, ref(), HISTORY[:128], [128])
    assert states_of(store) == (96, 128)


def test_a_lost_chunk_takes_the_states_after_it(opened):
    store = opened([ram()], needs_state=True)
    save(store, ref(), HISTORY[:96], [32, 96])
    store.ledger.stack.delete(0, [b"c" + chain_of(store, ref(), HISTORY)[3]])
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.num_tokens, match.reason) == (32, "evicted")
    assert restored.num_tokens == 32


@pytest.mark.parametrize("lost", [0, -1])
def test_a_run_without_the_state_at_its_end_is_not_returned(store, lost):
    save(store, ref(), HISTORY[:96], [96])
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    store.ledger.stack.delete(0, [match.reads[lost].key])
    restored = store.restore(match)
    assert (restored.num_tokens, restored.state, restored.reason) == (0, None, "evicted")
    check(store, restored, HISTORY)


def test_a_session_rests_where_its_newest_state_does(opened):
    """A return reads nothing of the slower tier that has the older state."""
    store = opened([ram(), RenamedRam(1 << 26)], needs_state=True)
    save(store, ref(), HISTORY, [128, 208])
    lose_state(store, 128)
    assert (num_states(store), store.tier_of(ref())) == (1, "ram")
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 208
    lose_state(store, 208)
    assert store.tier_of(ref()) == "disk"


@pytest.mark.parametrize("kind", [b"s", b"c"])
def test_a_damaged_state_or_chunk_costs_a_recompute(opened, kind):
    tier = ram()
    store = opened([tier], needs_state=True)
    save(store, ref(), HISTORY[:96], [96])
    (name, blob), *_ = tier.scan(kind)
    bad = bytearray(blob)
    bad[-1] ^= 1
    assert tier.replace(name, bytes(bad))
    match, restored = come_back(store, ref(), HISTORY)
    assert (restored.num_tokens, restored.reason) == (0, "corrupt")


def test_nothing_of_the_tokens_after_the_last_chunk_is_stored(opened):
    tier = ram()
    store = opened([tier], needs_state=True)
    save(store, ref(), HISTORY[:100], [96])
    sizes = {x: [len(blob) for _, blob in tier.scan(x)] for x in (b"c", b"s")}
    assert store.stats().tiers[0].num_blobs == 6 + 1 + 1
    record = store.record(ref())
    assert record.packed_bytes == sum(sizes[b"c"]) + sum(sizes[b"s"])


def test_states_follow_to_the_disk_and_over_a_restart(tmp_path, opened):
    store = opened([ram(), disk(tmp_path)], needs_state=True)
    save(store, ref(), HISTORY[:96], [96])
    assert store.demote(ref(), "disk") == "disk"
    store.close()
    again = opened([ram(), disk(tmp_path)], needs_state=True)
    match, restored = come_back(again, ref(), HISTORY)
    assert (match.tier, restored.num_tokens) == ("disk", 96)
    again.forget(ref())
    assert all(everything(x) == {} for x in again.ledger.stack.tiers)


def test_models_that_can_be_cut_keep_no_states(opened):
    store = opened([ram()])
    save(store, ref(), HISTORY[:96], [48, 96])
    assert num_states(store) == 0
    assert come_back(store, ref(), HISTORY)[1].state is None


def test_a_restored_state_is_not_packed_again(opened):
    """A source that restored it says so; the state after newer tokens is a new one."""
    store = opened([ram()], needs_state=True)
    tree = StateArray("uint8", np.zeros(16, np.uint8))
    states, chain = [StateAt(64, tree), StateAt(96, tree)], chain_of(store, ref(), HISTORY[:96])

    def continued() -> Rows:
        source = Rows(store, kv_of(HISTORY[:96]), states, restored_tokens=64)
        assert store.save(ref(), chain, source, states=[4, 6]) and store.flush(200)
        return source

    continued()
    assert store.record(ref()) is None  # of restored rows none is held anywhere
    save(store, ref(), HISTORY[:96])
    assert [x.first_token for x in continued().packed] == [96]
    assert states_of(store) == (96,)


def test_restored_states_and_rows_are_reported_as_lossy(opened):
    store = opened([ram()], needs_state=True, codecs=StoreCodecs(FAST))
    save(store, ref(), HISTORY[:96], [96])
    restored = wake(store, ref(), HISTORY)
    assert (restored.num_tokens, restored.lossy_tokens) == (96, 96)
    assert trees_equal(restored.state, state_at(HISTORY, 96))


PACKED = StoreCodecs(RAW, SessionCodec(RAW, None, matrix_codec("state8")))


def save_matrices(store: ColdStore) -> None:
    tree: StateTree = [MatrixArray("float32", np.ones((1, 2, 32, 32), np.float32))]
    source = Rows(store, kv_of(HISTORY[:96]), [StateAt(96, tree)])
    chain = chain_of(store, ref(), HISTORY[:96])
    assert store.save(ref(), chain, source, states=[6], state_bytes=8192)
    assert store.flush(200)


def test_a_local_state_in_an_unknown_codec_is_a_miss_and_makes_room(opened, tmp_path: Path):
    store = opened([disk(tmp_path)], codecs=PACKED, needs_state=True)
    save_matrices(store)
    assert wake(store, ref(), HISTORY).num_tokens == 96
    store.close()
    store = opened([disk(tmp_path)], needs_state=True)
    fetched = store.fetch(store.match(ref(), chain_of(store, ref(), HISTORY)))
    assert (fetched.num_chunks, fetched.reason) == (0, "fingerprint")
    assert num_states(store) == 0
    save_matrices(store)
    assert wake(store, ref(), HISTORY).num_tokens == 96


def test_a_state_in_an_unknown_codec_costs_no_more_than_the_deadline(opened, tmp_path: Path):
    store = opened([disk(tmp_path)], codecs=PACKED, needs_state=True)
    save_matrices(store)
    store.close()
    tier = FaultyTier(disk(tmp_path))
    store = opened([tier], needs_state=True, restore_deadline_s=60.0)
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    tier.hang("lengths")  # by which a profile is looked for
    assert within(10, lambda: store.restore(match, 0.5).num_tokens, tier.go_on) == 0
