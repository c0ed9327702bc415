"""A session's rows and states in blocks, as the store saves them and gives them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.vllm_plugin.blocks.blocks import RestoredBlocks
from engines.vllm_plugin.plan import Load
from kvstore.blobs.chain import STATE, WINDOW
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.shapes import KVLayer, KVLayout
from tests.block_sessions import (
    BLOCK,
    PER_CHUNK,
    chain_of,
    hashes,
    ram_and_disk,
    ref,
    tokens_of,
)
from tests.kv_sessions import everything
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NumpyBlocks
from tests.unit.engines.vllm_plugin.worker.rank_rig import (
    CHAIN,
    ELSEWHERE,
    IDS,
    NumpyStates,
    Rank,
)

TQ3, TQ4 = codec_by_name("tq3"), codec_by_name("tq4")
WINDOWS = KVLayout("float32", (KVLayer(2, 64, 64),))
ODD, EVEN = 3, 4  # blocks of a window, which begins in the middle of a chunk, or where one does
STATE_IDS = [25, 26, 27, 28, 29]  # of the recurrent layer, and of the window
OTHER_IDS = [55, 56, 57, 58, 59]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(ram_and_disk(tmp_path), codecs=StoreCodecs(TQ3))
    yield rank
    rank.close()


def test_a_chunk_is_packed_once_and_every_tier_gets_these_bytes(rank):
    rank.save()
    rank.save()
    assert rank.counted("chunks_packed") == 12
    found = everything(rank.tiers[0])
    assert found == everything(rank.tiers[1])
    for piece in rank.store.keys.chunks(chain_of(rank.store, CHAIN)):
        first = piece.first_token // BLOCK
        run = rank.pages.read(IDS[first : first + PER_CHUNK])
        assert found[piece.key] == rank.store.packer.pack_rows(piece, run)


# ---- nothing is packed with loss twice


def test_a_restored_chunk_whose_copies_are_gone_is_not_saved_again(rank):
    rank.save()
    assert rank.restore(ELSEWHERE) == 24
    rank.evict(3, 4, 9)
    rank.save(ELSEWHERE)
    assert rank.counted("chunks_packed") == 12
    assert rank.counted("chunks_left_out") == 9
    assert rank.store.record(ref()).num_chunks == 3
    assert rank.restore(IDS) == 6


def test_a_chunk_with_one_restored_block_counts_as_restored(rank):
    """vLLM has the first seven blocks, so a load begins in the middle of the fourth chunk."""
    rank.save()
    rank.pages.compute(CHAIN[:7], ELSEWHERE)
    assert rank.restore(ELSEWHERE, first=7) == 24
    assert rank.pages.holds(CHAIN, 0, ELSEWHERE[:7])
    rank.evict(2, 3)
    rank.save(ELSEWHERE)
    assert rank.counted("chunks_packed") == 13  # the third again, whose blocks were computed
    assert rank.store.record(ref()).num_chunks == 3


def test_blocks_that_were_computed_since_are_packed(rank):
    rank.save()
    rank.restore(ELSEWHERE)
    rank.evict(*range(12))
    rank.save()  # the engine still has the blocks that it computed
    assert rank.codecs_in(0) == [TQ3.id] * 12
    other = hashes(tokens_of(24, first=5000))
    rank.pages.compute(other, ELSEWHERE)  # the same blocks, another session's now
    rank.save(ELSEWHERE, other)
    assert rank.codecs_in(0) == [TQ3.id] * 24


def test_after_an_edit_in_the_middle_of_a_chunk_only_computed_chunks_are_packed(rank):
    rank.save()
    edited = hashes([*tokens_of(5), *tokens_of(7, first=9000)])
    assert rank.restore(ELSEWHERE, edited) == 4  # two whole chunks
    run = NumpyBlocks()
    run.compute(edited, ELSEWHERE)
    rank.pages.write(ELSEWHERE[4:12], run.read(ELSEWHERE[4:12]), 0)
    rank.save(ELSEWHERE, edited)
    assert rank.counted("chunks_packed") == 12 + 4
    assert rank.store.record(ref()).num_chunks == 6


def test_exact_copies_are_saved_again(tmp_path):
    rank = Rank(ram_and_disk(tmp_path), codec="raw")
    rank.save()
    rank.restore(ELSEWHERE)
    rank.evict(3, 4)  # and all that continues them
    rank.save(ELSEWHERE)
    assert rank.counted("chunks_packed") == 21
    assert rank.restore(IDS) == 24
    rank.close()


def test_the_record_of_a_block_goes_with_its_hash():
    blocks = RestoredBlocks()
    blocks.note([1, 2], [b"a", b"b"], lossy=True)
    assert blocks.has_any([5, 1], [b"x", b"a"])
    assert not blocks.has_any([2], [b"c"])
    blocks.note([2], [b"b"], lossy=False)
    assert not blocks.has_any([2], [b"b"])


# ---- states with windows


def with_states(folder: Path, window_blocks: int, **options: Any) -> Rank:
    window = {"windows": WINDOWS, "window_tokens": window_blocks * BLOCK}
    states = NumpyStates(window_blocks)
    return Rank(ram_and_disk(folder), states, needs_state=True, **window, **options)


@pytest.fixture
def stateful(tmp_path: Path) -> Iterator[Rank]:
    codec = SessionCodec(TQ3, TQ4, matrix_codec("state8"))
    rank = with_states(tmp_path, EVEN, codecs=StoreCodecs(TQ3, codec))
    yield rank
    rank.close()


@pytest.mark.parametrize("window", [ODD, EVEN])
def test_a_state_comes_back_with_its_windows_rows(tmp_path, window):
    rank = with_states(tmp_path, window, codec="raw")
    own, other = STATE_IDS[: 1 + window], OTHER_IDS[: 1 + window]
    rank.save(states={24: own})
    before = rank.states.bits(own)
    assert rank.restore(ELSEWHERE, state_ids=other) == 24
    assert rank.states.bits(other) == before
    assert rank.pages.holds(CHAIN, 0, ELSEWHERE)
    rank.close()


def test_a_load_that_ends_elsewhere_than_the_state_fails(tmp_path):
    """It happens when another rank has less: no more is offered than every rank has."""
    rank = with_states(tmp_path, EVEN, codecs=StoreCodecs(TQ3))
    rank.save(states={24: STATE_IDS})
    rank.stage()
    before = rank.states.bits(OTHER_IDS)
    rank.transfer.load(Load(7, "r", 0, ELSEWHERE[:20], OTHER_IDS))
    assert rank.ended_load() == ({"r"}, {*OTHER_IDS})
    assert rank.states.bits(OTHER_IDS) == before
    rank.close()


def test_two_states_share_the_rows_that_both_windows_reach(stateful):
    stateful.save(states={22: OTHER_IDS, 24: STATE_IDS})
    assert stateful.counted("states_packed") == 2
    assert len(stateful.codecs_in(0, WINDOW)) == 3  # of the chunks 9 and 10, and 10 and 11
    assert stateful.store.record(ref()).states == (11, 12)


def test_a_state_that_came_back_with_loss_is_not_packed_again(stateful):
    stateful.save(states={24: STATE_IDS})
    assert stateful.restore(ELSEWHERE, state_ids=OTHER_IDS) == 24
    stateful.evict_kinds(STATE, WINDOW)
    stateful.save(ELSEWHERE, states={24: OTHER_IDS})
    assert stateful.codecs_in(0, STATE) == stateful.codecs_in(0, WINDOW) == []
    assert stateful.store.record(ref()).states == ()
    stateful.save(states={24: STATE_IDS})  # that which was computed
    assert stateful.restore(IDS, state_ids=OTHER_IDS) == 24


def test_a_later_state_beside_windows_rows_that_came_back_packs_only_its_own(stateful):
    stateful.save(states={22: STATE_IDS}, chain=CHAIN[:22])
    assert stateful.restore(ELSEWHERE, CHAIN[:22], state_ids=OTHER_IDS) == 22
    windows = dict(stateful.tiers[0].scan(WINDOW))
    stateful.pages.write(ELSEWHERE[22:], stateful.pages.read(IDS[22:]), 0)
    # A chunk further: the older half of its window came back, the newer one is computed.
    stateful.save(ELSEWHERE, states={24: [60, *OTHER_IDS[3:], 61, 62]})
    assert stateful.store.record(ref()).states == (11, 12)
    after = dict(stateful.tiers[0].scan(WINDOW))
    assert len(after) == len(windows) + 1
    assert all(after[key] == blob for key, blob in windows.items())
    assert stateful.restore(IDS, state_ids=STATE_IDS) == 24
