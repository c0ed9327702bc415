"""Chains whose model has layers that do not keep all tokens: restored only up to a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.blobs.state_tree import StateArray
from kvstore.errors import Corrupt
from kvstore.store.block_store import BlockStore, Fetched
from kvstore.store.records import (
    BlockRecord,
    decode_record,
    encode_record,
)
from kvstore.tiers.ram_tier import RamTier
from tests.blob_names import all_named, named
from tests.block_sessions import BLOCK, LAYOUT, hashes, pack, ram_and_disk, ref

LONG = hashes(list(range(100)))  # 25 blocks: 6 chunks and a tail of one


@pytest.fixture
def tier():
    return RamTier(1 << 26)


@pytest.fixture
def store(opened, tier):
    return opened([tier], has_state=True)


def state_blob(store: BlockStore, chain: Sequence[bytes], num_blocks: int) -> tuple[bytes, bytes]:
    key = store.keys.state(chain, num_blocks).key
    state = StateArray("uint8", np.frombuffer(chain[num_blocks - 1], np.uint8))
    return key, store.packer.pack_snapshot(key, state, LAYOUT.empty(0), num_blocks * BLOCK, 0)


def save(store: BlockStore, chain: Sequence[bytes], states: Sequence[int], session="s"):
    missing = store.missing(chain, states)
    fresh = {x.key: pack(store, chain, x) for x in missing if not x.is_state}
    fresh |= dict(state_blob(store, chain, x.end_block) for x in missing if x.is_state)
    store.commit(ref(session), chain, fresh, states)
    return missing


def check_state(store: BlockStore, chain: Sequence[bytes], fetched: Fetched) -> None:
    """The state is that of the block before the offer's end, and comes first."""
    span, blob = fetched.spans[0]
    assert span.is_state
    assert span.end_block == fetched.end_block
    first = span.end_block * BLOCK
    state = store.packer.unpack_snapshot(blob, span.key, first, 0, LAYOUT.empty(0))
    assert isinstance(state, StateArray)
    assert state.array.tobytes() == chain[span.end_block - 1]


def test_a_session_comes_back_up_to_its_state(store):
    save(store, LONG, [20, 24])
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.tier) == (24, "ram")
    check_state(store, LONG, fetched)
    assert {x.first_block for x, _ in fetched.spans[1:]} == {0, 4, 8, 12, 16, 20}


def test_the_earlier_state_serves_a_prompt_that_leaves_the_session(store):
    save(store, LONG, [20, 24])
    other = hashes([*range(22 * BLOCK), *range(900, 940)])
    fetched = store.fetch(ref(), other, 0)
    assert fetched.end_block == 20
    check_state(store, other, fetched)


def test_nothing_before_the_first_state(store):
    save(store, LONG, [20])
    other = hashes([*range(10 * BLOCK), *range(900, 940)])
    fetched = store.fetch(ref(), other, 0)
    assert (fetched.end_block, fetched.spans) == (0, [])
    assert fetched.reason is not None


def test_a_prompt_that_ends_before_the_first_state_has_a_reason(store):
    save(store, LONG, [20, 24])
    fetched = store.fetch(ref(), LONG[:10], 0)
    assert (fetched.end_block, fetched.spans, fetched.reason) == (0, [], "evicted")


def test_a_state_that_the_engine_is_past(store):
    save(store, LONG, [20])
    assert store.fetch(ref(), LONG, 20).spans == []
    assert store.fetch(ref(), LONG, 19).end_block == 20


def test_another_session_with_the_same_beginning(store):
    save(store, LONG[:24], [16, 24])
    fetched = store.fetch(None, LONG, 0)
    assert fetched.end_block == 24
    check_state(store, LONG, fetched)


@pytest.mark.parametrize("lost", ["state", "chunk"])
def test_a_lost_blob_costs_a_recompute_or_the_earlier_state(store, tier, lost):
    save(store, LONG, [12, 24])
    span = store.keys.state(LONG, 24) if lost == "state" else store.keys.chunks(LONG)[5]
    tier.delete_many([named(span.key)])
    fetched = store.fetch(ref(), LONG, 0)
    assert fetched.end_block == 12
    check_state(store, LONG, fetched)


@pytest.mark.parametrize("damaged", ["state", "chunk"])
def test_damage_costs_a_recompute(store, tier, damaged):
    save(store, LONG, [24])
    span = store.keys.state(LONG, 24) if damaged == "state" else store.keys.chunks(LONG)[5]
    blob = bytearray(tier.get_many([named(span.key)])[0])
    blob[-1] ^= 1
    tier.replace(named(span.key), bytes(blob))
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.spans, fetched.reason) == (0, [], "corrupt")


def test_a_later_turn_replaces_the_states(store, tier):
    save(store, LONG[:20], [16, 20])
    save(store, LONG, [20, 24])
    gone, kept = (store.keys.state(LONG, x).key for x in (16, 20))
    assert tier.contains_many(all_named([gone, kept])) == [False, True]
    assert [x.end_block for x in save(store, LONG, [20, 24])] == []


def test_a_turn_without_states_keeps_those_that_still_hold(store):
    save(store, LONG[:20], [16])
    save(store, LONG, [])
    assert store.fetch(ref(), LONG, 0).end_block == 16
    other = hashes([*range(10 * BLOCK), *range(900, 960)])
    save(store, other, [])
    record = store.record(ref())
    assert record.states == ()


def test_states_go_with_their_session(store, tier):
    save(store, LONG, [20, 24])
    store.forget(ref())
    states = all_named([store.keys.state(LONG, x).key for x in (20, 24)])
    assert tier.contains_many(states) == [False, False]


def test_states_follow_to_the_disk_and_over_a_restart(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path), has_state=True)
    save(store, LONG, [24])
    assert store.demote(ref(), "disk") == "disk"
    store.close()
    again = opened(ram_and_disk(tmp_path), has_state=True)
    fetched = again.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.tier) == (24, "disk")
    check_state(again, LONG, fetched)


def test_their_bytes_count(store):
    save(store, LONG, [])
    without = store.record(ref())
    save(store, LONG, [24])
    record = store.record(ref())
    assert without is not None
    assert record.packed_bytes == without.packed_bytes + record.state_bytes
    assert record.state_bytes == len(state_blob(store, LONG, 24)[1])


@pytest.mark.parametrize("place", [0, -1, 26])
def test_a_record_with_a_state_nowhere(place):
    record = BlockRecord(
        tenant="t", id="s", hashes=b"".join(LONG), block_tokens=4, last_used_s=0.0, states=(place,)
    )
    with pytest.raises(Corrupt):
        decode_record(memoryview(encode_record(record)), BlockRecord)
