"""Models whose cache cannot be cut back: restorable only where a snapshot was taken."""

from __future__ import annotations

import pytest

from benchmarks.session_bytes import session_bytes
from kvstore.blobs.chain import SNAPSHOT
from kvstore.shapes import KVLayout
from kvstore.store.cold_store import ColdStore
from tests.kv_sessions import (
    LAYOUT,
    check,
    come_back,
    ram,
    ref,
    save,
    snapshot,
    state_at,
    tokens,
    trees_equal,
)

HISTORY = tokens(200)
ROTATING_ONLY = KVLayout("bfloat16", ())


@pytest.fixture(params=[LAYOUT, ROTATING_ONLY], ids=["hybrid", "no growing layers"])
def store(request, opened):
    return opened([ram()], layout=request.param, needs_state=True)


def num_snapshots(store: ColdStore) -> int:
    return sum(1 for _ in store.ledger.stack.scan(0, SNAPSHOT))


def test_the_end_of_the_turn_comes_back_with_its_state(store):
    save(store, ref(), HISTORY[:100], [100])
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.num_tokens, match.reason) == (100, None)
    assert trees_equal(restored.state, state_at(HISTORY, 100))


@pytest.mark.parametrize("position", [1, 15, 16, 17, 64, 99])
def test_any_position_will_do(store, position):
    save(store, ref(), HISTORY[:100], [position, 100])
    match, restored = come_back(store, ref(), [*HISTORY[:99], 7, 7])
    assert (match.num_tokens, match.reason) == (position, "diverged")
    assert trees_equal(restored.state, state_at(HISTORY, position))


def test_without_a_snapshot_in_reach_there_is_nothing(store):
    save(store, ref(), HISTORY[:100], [90, 100])
    match, restored = come_back(store, ref(), [*HISTORY[:50], 7])
    assert (match.num_tokens, match.reason) == (0, "diverged")
    assert (restored.num_tokens, restored.state) == (0, None)


@pytest.mark.parametrize("session", [None, ref("new")])
def test_another_session_finds_the_state_at_a_boundary(store, session):
    save(store, ref(), HISTORY[:100], [37, 100])
    prompt = [*HISTORY[:60], *tokens(30, 4)]
    assert come_back(store, session, prompt)[0].num_tokens == 0
    match, restored = come_back(store, session, prompt, boundaries=[10, 37, 70, 0, 500])
    assert match.num_tokens == restored.num_tokens == 37
    assert trees_equal(restored.state, state_at(HISTORY, 37))


def test_the_newest_state_and_the_one_before_the_answer_are_kept(store):
    for n in (20, 40, 60, 80, 100, 120):
        save(store, ref(), HISTORY[:n], [10, n - 8, n])
    assert store.record(ref()).snapshots == (112, 120)
    assert num_snapshots(store) == 2
    again = [*HISTORY[:112], 1]  # the answer is generated again
    assert come_back(store, ref(), again)[1].num_tokens == 112
    assert come_back(store, ref(), [*HISTORY[:70], 1])[0].num_tokens == 0


def test_a_beginning_that_sessions_share_keeps_its_state_once(opened):
    store = opened([ram()], needs_state=True)
    system = HISTORY[:40]
    prompts = [[*system, *tokens(60, seed)] for seed in (1, 2, 3)]
    save(store, ref("a"), prompts[0], [37, 90, 100])
    assert come_back(store, ref("b"), prompts[1], boundaries=[37])[0].num_tokens == 0
    save(store, ref("b"), prompts[1], [37, 90, 100])
    match, restored = come_back(store, ref("c"), prompts[2], boundaries=[37])
    assert match.num_tokens == 37
    assert trees_equal(restored.state, state_at(prompts[2], 37))
    save(store, ref("c"), prompts[2], [90, 100])
    longer = [*prompts[1], *tokens(20, 9)]
    save(store, ref("b"), longer, [110, 120])  # it stays while others begin so, too
    found = {x.id: x.snapshots for x in store.records()}
    assert found == {"a": (90, 100), "b": (37, 110, 120), "c": (90, 100)}
    store.forget(ref("a"))
    store.forget(ref("c"))
    save(store, ref("b"), [*longer, 5], [120, 121])
    assert store.record(ref("b")).snapshots == (120, 121)


def test_states_of_an_abandoned_branch_go(store):
    save(store, ref(), HISTORY[:100], [30, 100])
    other = [*HISTORY[:50], *tokens(40, 8)]
    save(store, ref(), other, [90])
    assert store.record(ref()).snapshots == (30, 90)
    assert num_snapshots(store) == 2
    assert come_back(store, ref(), [*other, 1])[1].num_tokens == 90


def test_a_state_that_another_session_uses_stays(store):
    save(store, ref("a"), HISTORY[:50], [30, 50])
    save(store, ref("b"), [*HISTORY[:40], 1, 2], [30, 42])
    save(store, ref("a"), tokens(60, 3), [60])
    assert come_back(store, ref("b"), [*HISTORY[:40], 9])[1].num_tokens == 30
    assert store.forget(ref("b"))
    assert num_snapshots(store) == 1


def test_a_lost_state_is_an_eviction_and_a_lower_one_helps(store):
    save(store, ref(), HISTORY[:100], [30, 100])
    chain = store.keys.chain(store.record(ref()))
    store.ledger.stack.delete(0, [chain.snapshot_key(100)])
    match, _ = come_back(store, ref(), HISTORY)
    assert (match.num_tokens, match.reason) == (30, "evicted")


def test_a_lost_state_is_left_out_of_the_next_record(store):
    save(store, ref(), HISTORY[:100], [30, 100])
    chain = store.keys.chain(store.record(ref()))
    store.ledger.stack.delete(0, [chain.snapshot_key(30)])
    save(store, ref(), HISTORY[:120], [120])
    assert store.record(ref()).snapshots == (100, 120)


def test_a_lost_chunk_takes_the_chunks_after_it(opened):
    store = opened([ram()], needs_state=True)
    save(store, ref(), HISTORY[:100], [30, 100])
    chunks = store.keys.chain(store.record(ref())).chunk_keys
    store.ledger.stack.delete(0, [chunks[3]])
    match, restored = come_back(store, ref(), HISTORY)
    assert (match.num_tokens, match.reason) == (30, "evicted")
    assert restored.num_tokens == 30


def test_a_run_without_the_state_at_its_end_is_not_handed_out(store):
    save(store, ref(), HISTORY[:100], [100])
    match = store.match(ref(), ref().salt, HISTORY, 200)
    store.ledger.stack.delete(0, [match.reads[-1].key])
    restored = store.load(match)
    assert (restored.num_tokens, restored.state, restored.reason) == (0, None, "evicted")
    check(store, restored, HISTORY)


def test_there_is_no_tail_of_its_own(opened):
    store = opened([ram()], needs_state=True)
    save(store, ref(), HISTORY[:100], [100])
    assert store.stats().tiers[0].num_blobs == 6 + 1 + 1
    counted = session_bytes(store, ref())
    record = store.record(ref())
    assert counted is not None and record is not None
    assert counted.tail == 0
    assert record.packed_bytes == counted.chunks + counted.snapshots


def test_positions_outside_the_tokens_are_not_kept(store):
    run = store.layout.empty(50)
    states = [snapshot(HISTORY, x) for x in (60, 50)] + [snapshot(HISTORY, 1).__class__(0, None)]
    assert store.save(ref(), HISTORY[:50], run, states)
    assert store.flush(10)
    assert store.record(ref()).snapshots == (50,)


def test_models_that_can_be_cut_keep_no_states(opened):
    store = opened([ram()])
    save(store, ref(), HISTORY[:100], [50, 100])
    assert num_snapshots(store) == 0
    assert come_back(store, ref(), HISTORY)[1].state is None
