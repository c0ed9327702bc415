"""Rows of sliding windows: chunks beside states, which the states of a session share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.blobs.chain import RECORD, STATE, WINDOW
from kvstore.blobs.packer import RAW, StoreCodecs
from kvstore.blobs.state_tree import StateArray, StateTree, WindowArray, arrays_of
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import EXACT_STATES
from kvstore.errors import Mismatch
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVPair
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Restored
from kvstore.store.states import StateAt, TakenState
from tests.kv_sessions import (
    CHUNK,
    Rows,
    chain_of,
    disk,
    everything,
    kv_of,
    ram,
    ref,
    tokens,
)
from tests.worn_codec import WornCodec, wear_of

HISTORY = tokens(208)
WINDOWS = KVLayout("bfloat16", (KVLayer(1, 16, 16), KVLayer(2, 8, 8)))
ALIGNED, INSIDE = 3 * CHUNK, 40  # tokens of a window, which begins inside a chunk
WORN = SessionCodec(RAW, WornCodec("window.1", 1), EXACT_STATES)
OURS = ref()
MODEL = {"needs_state": True, "windows": WINDOWS}


def window_at(token_ids: Sequence[int], position: int, window_tokens: int) -> list[KVPair]:
    """Rows of the layers with windows as they are computed."""
    first = max(position - window_tokens, 0)
    return [(k[:, first:], v[:, first:]) for k, v in kv_of(token_ids[:position], WINDOWS)]


def tree_of(run: Sequence[KVPair], position: int) -> StateTree:
    arrays = [x for pair in run for x in pair]
    marked = [WindowArray("bfloat16", x[None], i) for i, x in enumerate(arrays)]
    return [("Rotating", (*marked[:2], position)), ("Rotating", (*marked[2:], position))]


def save(
    store: ColdStore,
    token_ids: Sequence[int],
    positions: Sequence[int],
    session: SessionRef = OURS,
    restored: Restored | None = None,
) -> Rows:
    """Save with states; rows up to ``restored`` are those that came back."""
    reach, count = store.model.window_tokens, restored.num_tokens if restored else 0
    states = []
    for position in positions:
        run = window_at(token_ids, position, reach)
        first = max(position - reach, 0)
        if restored and count > first:
            begun = max(count - reach, 0)
            for pair, old in zip(run, rows_in(restored.state), strict=True):
                for array, rows in zip(pair, old, strict=True):
                    array[:, : count - first] = rows[:, first - begun :]
        states.append(StateAt(position, tree_of(run, position)))
    source = Rows(store, kv_of(token_ids), states, restored.lossy_tokens if restored else 0)
    chain = chain_of(store, session, token_ids)
    assert store.save(session, chain, source, states=[x // CHUNK for x in positions])
    assert store.flush(200)
    return source


def rows_in(state: StateTree) -> list[KVPair]:
    arrays = [x.array[0] for x in arrays_of(state)]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def back(store: ColdStore, prompt: Sequence[int], session: SessionRef = OURS) -> Restored:
    restored = store.restore(store.match(session, chain_of(store, session, prompt)))
    assert store.flush(200)
    return restored


def wear(store: ColdStore, restored: Restored, prompt: Sequence[int]) -> list[set[int]]:
    """By token of the windows: how often it was packed."""
    exact = window_at(prompt, restored.num_tokens, store.model.window_tokens)
    return wear_of(rows_in(restored.state), exact)


def window_blobs(store: ColdStore) -> int:
    return sum(1 for _ in store.ledger.stack.scan(0, WINDOW))


@pytest.mark.parametrize("reach", [ALIGNED, INSIDE, 1, CHUNK, 500])
@pytest.mark.parametrize("position", [16, 48, 96, 208])
def test_a_state_comes_back_with_the_rows_of_its_windows(opened, reach, position):
    store = opened([ram()], window_tokens=reach, **MODEL)
    save(store, HISTORY[:position], [position])
    restored = back(store, HISTORY)
    assert (restored.num_tokens, restored.lossy_tokens) == (position, 0)
    assert wear(store, restored, HISTORY) == [{0}] * min(position, reach)
    assert not any(isinstance(x, WindowArray) for x in arrays_of(restored.state))
    first = max(position - reach, 0) // CHUNK
    assert window_blobs(store) == position // CHUNK - first
    assert store.forget(ref())
    assert everything(store.ledger.stack.tiers[0]) == {}


@pytest.mark.parametrize("reach", [ALIGNED, INSIDE])
def test_two_states_share_the_rows_that_both_reach(opened, reach):
    store = opened([ram()], window_tokens=reach, **MODEL)
    source = save(store, HISTORY, [192, 208])
    packed = [x for x in source.packed if x.is_window]
    assert len(packed) == len({x.key for x in packed}) == window_blobs(store)
    assert window_blobs(store) == (4 if reach == ALIGNED else 5)  # of 6
    for position in (192, 208):
        restored = back(store, HISTORY[:position])
        assert restored.num_tokens == position
        assert wear(store, restored, HISTORY) == [{0}] * reach
    record = store.record(ref())
    blobs = everything(store.ledger.stack.tiers[0])
    assert record.packed_bytes == sum(len(x) for key, x in blobs.items() if key[:1] != RECORD)


def test_the_next_turn_packs_the_windows_new_rows_only_and_old_ones_go(opened):
    store = opened([ram()], window_tokens=ALIGNED, **MODEL)
    save(store, HISTORY[:96], [80, 96])
    source = save(store, HISTORY[:112], [96, 112])
    assert [x.first_token for x in source.packed if x.is_window] == [96]
    assert [x.first_token for x in source.packed if x.is_state] == [112]
    chain = chain_of(store, ref(), HISTORY)
    held = {x[1:] for x in everything(store.ledger.stack.tiers[0]) if x[:1] == WINDOW}
    assert held == set(chain[3:7])  # windows before 48 are of no state
    assert back(store, HISTORY[:112]).num_tokens == 112


def test_a_window_that_begins_inside_a_chunk_can_be_read_from_the_whole_chunk(opened):
    """The whole chunk was stored beside an earlier state."""
    store = opened([ram()], window_tokens=INSIDE, **MODEL)
    save(store, HISTORY, [192, 208])
    chain = chain_of(store, ref(), HISTORY)
    part, *rest = store.keys.windows(chain, 13)
    assert (part.first_token, part.num_tokens, len(rest)) == (168, 8, 2)
    store.ledger.stack.delete(0, [part.key])
    restored = back(store, HISTORY)
    assert restored.num_tokens == 208
    assert wear(store, restored, HISTORY) == [{0}] * INSIDE
    store.ledger.stack.delete(0, [WINDOW + chain[10]])
    assert back(store, HISTORY).num_tokens == 0  # nor has the state before it its rows


@pytest.mark.parametrize("reach", [ALIGNED, INSIDE])
def test_lost_rows_of_a_window_cost_its_states(opened, reach):
    store = opened([ram()], window_tokens=reach, **MODEL)
    save(store, HISTORY, [96, 208])
    store.ledger.stack.delete(0, [WINDOW + chain_of(store, ref(), HISTORY)[12]])
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    assert (match.num_tokens, match.reason) == (96, "evicted")
    restored = back(store, HISTORY)
    assert wear(store, restored, HISTORY) == [{0}] * reach


def test_damaged_rows_of_a_window_cost_a_recompute(tmp_path, opened):
    near, far = ram(), disk(tmp_path)
    store = opened([near, far], window_tokens=INSIDE, **MODEL)
    save(store, HISTORY, [208])
    (name, blob), *_ = near.scan(WINDOW)
    bad = bytearray(blob)
    bad[-1] ^= 1
    assert near.replace(name, bytes(bad))
    restored = back(store, HISTORY)  # from the disk
    assert (restored.num_tokens, restored.tier) == (208, "disk")
    near.delete_many([name])
    assert near.put_many([(name, bytes(bad))]) and far.replace(name, bytes(bad))
    restored = back(store, HISTORY)
    assert (restored.num_tokens, restored.state, restored.reason) == (0, None, "corrupt")


def test_a_window_of_another_length_than_the_models_is_refused():
    run = window_at(HISTORY, 96, 30)
    with pytest.raises(Mismatch):
        TakenState(StateAt(96, tree_of(run, 96)), WINDOWS, 40)
    TakenState(StateAt(96, tree_of(run, 96)), WINDOWS, 30)
    TakenState(StateAt(96, tree_of(run, 96)), None, 0)


def test_a_model_whose_windows_are_not_stored_apart_keeps_them_in_its_states(opened):
    store = opened([ram()], needs_state=True)
    state = tree_of(window_at(HISTORY, 96, INSIDE), 96)
    source = Rows(store, kv_of(HISTORY[:96]), [StateAt(96, state)])
    chain = chain_of(store, ref(), HISTORY[:96])
    assert store.save(ref(), chain, source, states=[6]) and store.flush(200)
    assert window_blobs(store) == 0
    found = rows_in(back(store, HISTORY).state)
    assert wear_of(found, window_at(HISTORY, 96, INSIDE)) == [{0}] * INSIDE


# ---- packed with loss


def worn_store(opened, reach: int) -> ColdStore:
    codecs = StoreCodecs(RAW, WORN)
    return opened([ram()], codecs=codecs, window_tokens=reach, **MODEL)


def test_a_state_whose_restored_rows_are_gone_is_left_out(opened):
    store = worn_store(opened, ALIGNED)
    save(store, HISTORY[:96], [96])
    restored = back(store, HISTORY)
    chain = chain_of(store, ref(), HISTORY)
    store.ledger.stack.delete(0, [WINDOW + chain[5]])
    source = save(store, HISTORY[:128], [128], restored=restored)
    assert not any(x.is_window or x.is_state for x in source.packed)
    record = store.record(ref())
    assert (record.num_tokens, record.states) == (128, (6,))
    assert back(store, HISTORY).num_tokens == 0
    save(store, HISTORY[:128], [128])  # computed again
    assert wear(store, back(store, HISTORY), HISTORY) == [{1}] * ALIGNED


@pytest.mark.parametrize("reach", [ALIGNED, INSIDE])
@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_sleeps_of_windows_are_one_generation(opened, reach, seed):
    store, choose = worn_store(opened, reach), random.Random(seed)
    tier = store.ledger.stack.tiers[0]
    beginning = tokens(50, 77)
    histories = {x: [*beginning, *tokens(30, ord(x))] for x in "ab"}
    reused = 0
    for number in range(100):
        session = ref(choose.choice("ab"))
        history = histories[session.id]
        if choose.random() < 0.2:
            history = history[: choose.randrange(20, len(history))]
        prompt = [*history[:300], *tokens(choose.randrange(1, 40), number)]
        restored = back(store, prompt, session)
        reused += restored.num_tokens
        if restored.num_tokens:
            assert all(x in ({0}, {1}) for x in wear(store, restored, prompt))
        ends = range(CHUNK, len(prompt) + 1, CHUNK)
        positions = [x for x in ends if x > restored.num_tokens][-2:]
        if choose.random() < 0.2:
            names = [name for name, _ in tier.scan(choose.choice((WINDOW, STATE)))]
            tier.delete_many(choose.sample(names, len(names) // 3))
        save(store, prompt, positions, session, restored if restored.num_tokens else None)
        histories[session.id] = prompt
    assert reused > 3000
    assert store.stats().counters.get("saves_failed", 0) == 0


def test_exact_windows_are_packed_once_a_codec_is_adopted(opened):
    store = opened([ram()], window_tokens=INSIDE, **MODEL)
    save(store, HISTORY[:96], [96])
    store.adopt(StoreCodecs(RAW, WORN))
    restored = back(store, HISTORY)
    assert (restored.lossy_tokens, wear(store, restored, HISTORY)) == (0, [{0}] * INSIDE)
    save(store, HISTORY[:128], [128], restored=restored)
    again = back(store, HISTORY)
    # Rows 88..96 are of a chunk that the window has reached whole; the codec packs them now.
    assert wear(store, again, HISTORY) in ([{1}] * INSIDE, [{0}] * 8 + [{1}] * 32)
    assert isinstance(next(iter(arrays_of(again.state))), StateArray)
