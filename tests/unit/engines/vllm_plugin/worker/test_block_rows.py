"""A session's rows and states in blocks, as the store saves them and gives them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.vllm_plugin.blocks.blocks import RestoredBlocks
from engines.vllm_plugin.blocks.host_blocks import HostBlocks
from engines.vllm_plugin.blocks.stateful_blocks import StatefulBlocks
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.block_rows import BlockRows, RankBlocks
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea
from engines.vllm_plugin.worker.transfer import Transfer
from kvstore.blobs.chain import CHUNK, STATE, WINDOW
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import StoreCodecs
from kvstore.blobs.state_tree import StateArray, StateTree, WindowArray
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.shapes import KVLayer, KVLayout
from kvstore.tiers.base import Tier
from tests.block_sessions import (
    BLOCK,
    PER_CHUNK,
    chain_of,
    fetch,
    hashes,
    open_store,
    ram_and_disk,
    ref,
    tokens_of,
)
from tests.kv_sessions import everything
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NoStream, NumpyBlocks
from tests.unit.engines.vllm_plugin.worker.test_transfer import CHAIN, ELSEWHERE, IDS, ended_loads

TQ3, TQ4 = codec_by_name("tq3"), codec_by_name("tq4")
WINDOWS = KVLayout("float32", (KVLayer(2, 64, 64),))
ODD, EVEN = 3, 4  # blocks of a window, which begins in the middle of a chunk, or where one does
STATE_IDS = [25, 26, 27, 28, 29]  # of the recurrent layer, and of the window
OTHER_IDS = [55, 56, 57, 58, 59]


class NumpyStates:
    """Stands in for ``state_layers.StateBlocks``: a recurrent layer, and one with a window."""

    def __init__(self, window_blocks: int) -> None:
        self._window_blocks = window_blocks
        random = np.random.default_rng(7)
        self.recurrent = random.standard_normal((64, 5)).astype(np.float32)
        self.windows = [random.standard_normal((64, 2, BLOCK, 64), np.float32) for _ in "kv"]

    def numbers(self, boundary: int) -> list[int]:
        return [boundary - 1, *range(max(boundary - self._window_blocks, 0), boundary)]

    def in_windows(self, boundary: int) -> list[bool]:
        return [i > 0 for i, _ in enumerate(self.numbers(boundary))]

    def read(self, boundary: int, block_ids: Sequence[int]) -> StateTree:
        rows = [np.concatenate([x[i] for i in block_ids[1:]], axis=1) for x in self.windows]
        recurrent = StateArray("float32", self.recurrent[block_ids[:1]].copy())
        return [[recurrent], [WindowArray("float32", x[None], i) for i, x in enumerate(rows)]]

    def write(self, boundary: int, block_ids: Sequence[int], tree: StateTree) -> None:
        (recurrent,), windows = tree
        self.recurrent[block_ids[0]] = recurrent.array[0]
        for target, rows in zip(self.windows, windows, strict=True):
            for n, i in enumerate(block_ids[1:]):
                target[i] = rows.array[0][:, n * BLOCK : (n + 1) * BLOCK]

    def bits(self, block_ids: Sequence[int]) -> list[bytes]:
        rows = [x[i].tobytes() for x in self.windows for i in block_ids[1:]]
        return [self.recurrent[block_ids[0]].tobytes(), *rows]


class Rank:
    """A worker side whose store packs with loss."""

    def __init__(self, tiers: Sequence[Tier], **options: Any) -> None:
        self.pages, self.tiers = NumpyBlocks(), tiers
        window = options.get("window_tokens", 0) // BLOCK
        self.states = NumpyStates(window) if window else None
        self.store = open_store(tiers, **({"codecs": StoreCodecs(TQ3)} | options))
        self.staging = StagingArea()
        blocks, stateful = HostBlocks(self.pages, self.store, NoStream()), None
        if self.states is not None:
            stateful = StatefulBlocks(self.states, self.store, NoStream(), BLOCK)
        self.access = RankBlocks(blocks, stateful, self.store, BLOCK)
        self.transfer = Transfer(self.access, self.staging)
        self.ended: list[tuple[int, bool]] = []  # job, and whether it was kept
        self.pages.compute(CHAIN, IDS)

    def save(
        self,
        ids: Sequence[int] = IDS,
        chain: Sequence[bytes] = CHAIN,
        states: dict[int, list[int]] | None = None,
    ) -> None:
        self.begin(Save(1, ref(), list(chain), list(ids[: len(chain)]), states or {}))
        assert self.store.flush(120)  # the first one may compile loops

    def begin(self, save: Save) -> None:
        self.transfer.save(save, lambda save, kept: self.ended.append((save.job, kept)))

    def restore(
        self,
        ids: Sequence[int],
        chain: Sequence[bytes] = CHAIN,
        first: int = 0,
        state_ids: Sequence[int] = (),
    ) -> int:
        """Load the chain from block ``first`` on; the number of blocks that were stored."""
        self.staging.expect(7)
        fetched = fetch(self.store, chain, ref(), first // PER_CHUNK)
        self.staging.put(7, StagedBlobs(fetched, list(chain)))
        end = fetched.num_chunks * PER_CHUNK
        self.transfer.load(Load(7, "r", first, list(ids[first:end]), list(state_ids)))
        assert ended_loads(self.transfer) == {"r"} and not self.transfer.pop_bad_blocks()
        return end

    def codecs_in(self, tier: int, kind: bytes = CHUNK) -> list[str]:
        """Codecs of the blobs of this kind in the RAM tier (0) or on disk (1)."""
        return sorted(codec_in(blob).decode() for _, blob in self.tiers[tier].scan(kind))

    def evict(self, *numbers: int) -> None:
        """Lose these chunks in every tier."""
        keys = [x.key for x in self.store.keys.chunks(chain_of(self.store, CHAIN))]
        for tier in self.tiers:
            tier.delete_many([keys[x] for x in numbers])

    def evict_kinds(self, *kinds: bytes) -> None:
        for tier in self.tiers:
            tier.delete_many([key for kind in kinds for key, _ in tier.scan(kind)])

    def counted(self, name: str) -> int:
        return self.store.counters.as_dict().get(name, 0)

    def close(self) -> None:
        self.transfer.close()
        self.store.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(ram_and_disk(tmp_path))
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
    rank = Rank(ram_and_disk(tmp_path), codec="raw", codecs=None)
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


# ---- blocks are released


def held(rank: Rank, released: list[str]) -> BlockRows:
    save = Save(1, ref(), CHAIN, IDS)
    return BlockRows(save, rank.access, None, lambda: released.append("released"))


def offer(rank: Rank, rows: BlockRows) -> bool:
    return rank.store.save(ref(), chain_of(rank.store, CHAIN), rows)


def broken(*args: object) -> Any:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("fails", ["nothing", "reading", "packing", "no tier", "closed"])
def test_blocks_are_released_once_whatever_fails(tmp_path, fails, caplog):
    rank, released = Rank(ram_and_disk(tmp_path)), list[str]()
    rows = held(rank, released)
    if fails == "reading":
        rank.pages.read = broken
    if fails == "packing":
        rank.store.packer.pack_rows = broken
    if fails == "no tier":
        for tier in rank.tiers:
            tier.put_many = broken
    if fails == "closed":
        rank.store.close()
    assert offer(rank, rows) == (fails != "closed")
    assert rank.store.wait_all_saved(200)
    rank.close()
    rows.release()
    assert released == ["released"]


def test_blocks_of_a_save_that_is_dropped_or_superseded_are_released_once(rank):
    gate, entered = rank.pages.hold_reads()
    rank.begin(Save(1, ref("other"), CHAIN, IDS))
    assert entered.wait(10)
    releases: list[list[str]] = [[], [], []]
    rows = [held(rank, x) for x in releases]
    assert offer(rank, rows[0]) and offer(rank, rows[1])
    assert releases == [["released"], [], []]
    rank.store.forget(ref())
    assert releases == [["released"], ["released"], []]
    assert offer(rank, rows[2])
    gate.set()
    assert rank.store.wait_all_saved(200)
    assert releases == [["released"]] * 3


def test_a_superseded_save_acknowledges_its_job_and_ends_with_the_newer_one(rank):
    gate, _ = rank.pages.hold_reads()
    rank.begin(Save(1, ref("other"), CHAIN, IDS))
    rank.begin(Save(2, ref(), CHAIN[:8], IDS[:8]))
    rank.begin(Save(3, ref(), CHAIN, IDS))
    assert rank.transfer.pop_acks() == {2: 1}
    assert rank.transfer.pop_skipped([2]) == set()
    gate.set()
    assert rank.store.wait_all_saved(200)
    assert rank.transfer.pop_acks() == {1: 1, 3: 1}
    assert rank.ended == [(1, True), (2, True), (3, True)]
    assert rank.transfer.is_settled


# ---- states with windows


def with_states(folder: Path, window_blocks: int, **options: Any) -> Rank:
    tokens = window_blocks * BLOCK
    tiers = ram_and_disk(folder)
    return Rank(tiers, needs_state=True, windows=WINDOWS, window_tokens=tokens, **options)


@pytest.fixture
def stateful(tmp_path: Path) -> Iterator[Rank]:
    codec = SessionCodec(TQ3, TQ4, matrix_codec("state8"))
    rank = with_states(tmp_path, EVEN, codecs=StoreCodecs(TQ3, codec))
    yield rank
    rank.close()


@pytest.mark.parametrize("window", [ODD, EVEN])
def test_a_state_comes_back_with_its_windows_rows(tmp_path, window):
    rank = with_states(tmp_path, window, codec="raw", codecs=None)
    own, other = STATE_IDS[: 1 + window], OTHER_IDS[: 1 + window]
    rank.save(states={24: own})
    before = rank.states.bits(own)
    assert rank.restore(ELSEWHERE, state_ids=other) == 24
    assert rank.states.bits(other) == before
    assert rank.pages.holds(CHAIN, 0, ELSEWHERE)
    rank.close()


def test_a_load_that_ends_elsewhere_than_the_state_fails(tmp_path):
    """It happens when another rank has less: no more is offered than every rank has."""
    rank = with_states(tmp_path, EVEN)
    rank.save(states={24: STATE_IDS})
    rank.staging.expect(7)
    rank.staging.put(7, StagedBlobs(fetch(rank.store, CHAIN), CHAIN))
    before = rank.states.bits(OTHER_IDS)
    rank.transfer.load(Load(7, "r", 0, ELSEWHERE[:20], OTHER_IDS))
    loaded = ended_loads(rank.transfer)
    assert rank.transfer.pop_failed(loaded) == {"r"}
    assert rank.transfer.pop_bad_blocks() == {*OTHER_IDS}
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
