"""The worker side, on arrays instead of vLLM's blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from engines.vllm_plugin.blocks.host_blocks import SPARE_BYTES, HostBlocks, RunPool
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.block_rows import RankBlocks
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea
from engines.vllm_plugin.worker.transfer import Transfer
from kvstore.blobs.format import VerifiedBlob
from kvstore.store.planner import BlobRead
from kvstore.tiers.base import Tier
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import (
    BLOCK,
    LAYOUT,
    PER_CHUNK,
    chain_of,
    fetch,
    hashes,
    num_blocks_in,
    open_store,
    ref,
    tokens_of,
)
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NoStream, NumpyBlocks
from tests.waiting import until

CHAIN = hashes(tokens_of(24))  # twelve chunks
IDS = list(range(30, 54))
ELSEWHERE = list(range(1, 25))
BLOCK_BYTES = BLOCK * LAYOUT.bytes_per_token


class Rank:
    """A worker side with its store, and its reports."""

    def __init__(
        self,
        max_queued_bytes: int = 1 << 30,
        tiers: Sequence[Tier] = (),
        spare_bytes: int = SPARE_BYTES,
    ) -> None:
        self.blocks = NumpyBlocks()
        self.store = open_store(tiers, save_queue_bytes=max_queued_bytes)
        self.staging = StagingArea()
        self.ended: list[tuple[int, bool]] = []  # job, and whether it was kept
        blocks = HostBlocks(self.blocks, self.store, NoStream(), spare_bytes)
        self.transfer = Transfer(RankBlocks(blocks, None, self.store, BLOCK), self.staging)

    def save(self, chain: list[bytes], job: int = 1) -> None:
        self.blocks.compute(chain, IDS[: len(chain)])
        save = Save(job, ref(), chain, IDS[: len(chain)])
        self.transfer.save(save, self.on_ended)
        assert self.store.wait_saved(ref(), 10)

    def on_ended(self, save: Save, kept: bool) -> None:
        self.ended.append((save.job, kept))

    def load(self, first: int, ids: list[int], ticket: int = 7) -> tuple[set[str], set[int]]:
        self.transfer.load(Load(ticket, "r", first, ids))
        return ended_loads(self.transfer), self.transfer.pop_bad_blocks()

    def stage(self, ticket: int = 7) -> list[tuple[BlobRead, VerifiedBlob]]:
        """Stage the session for a load; a test may change the staged blobs."""
        fetched = fetch(self.store, CHAIN, ref())
        self.staging.expect(ticket)
        self.staging.put(ticket, StagedBlobs(fetched, CHAIN))
        return fetched.blobs

    def close(self) -> None:
        self.transfer.close()
        self.store.close()


def ended_loads(transfer: Transfer) -> set[str]:
    """The requests that are reported as loaded next."""
    loaded: set[str] = set()
    until(lambda: loaded.update(transfer.pop_loaded()) or bool(loaded))
    return loaded


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    """A parameter is the number of bytes that may wait to be saved."""
    rank = Rank(getattr(request, "param", 1 << 30))
    yield rank
    rank.close()


bounded = pytest.mark.parametrize("rank", [1], indirect=True, ids=["one save at a time"])


def test_a_saved_session_comes_back_into_other_blocks(rank):
    rank.save(CHAIN)
    assert rank.transfer.pop_acks() == {1: 1}
    assert rank.ended == [(1, True)]
    assert rank.store.record(ref()).num_tokens == 24 * BLOCK
    rank.stage()
    assert rank.load(0, ELSEWHERE) == ({"r"}, set())
    assert rank.blocks.holds(CHAIN, 0, ELSEWHERE)


def test_only_the_blocks_that_are_asked_for_are_written(rank):
    rank.save(CHAIN)
    rank.stage()
    assert rank.load(7, [2, 3, 4, 5]) == ({"r"}, set())  # begins and ends inside chunks
    assert rank.blocks.holds(CHAIN, 7, [2, 3, 4, 5])
    assert not any(page[[1, 6, 7]].any() for sides in rank.blocks.pages for page in sides)


def test_memory_is_decoded_into_again_and_again(rank):
    rank.save(CHAIN)
    for _ in range(3):
        rank.stage()
        assert rank.load(0, ELSEWHERE) == ({"r"}, set())
        assert rank.blocks.holds(CHAIN, 0, ELSEWHERE)
        for page in (page for sides in rank.blocks.pages for page in sides):
            page[ELSEWHERE] = 0


def test_the_thread_that_fills_blocks_decodes_blobs_that_no_codec_thread_has_begun(rank):
    """They are all busy here, with saves of others perhaps."""
    rank.save(CHAIN)
    rank.stage()
    gate = threading.Event()
    workers = rank.store.workers
    busy = [workers.codec(gate.wait, 20) for _ in range(workers.num_threads)]
    try:
        assert rank.load(0, ELSEWHERE) == ({"r"}, set())
        assert not any(x.done() for x in busy)
    finally:
        gate.set()
    assert rank.blocks.holds(CHAIN, 0, ELSEWHERE)


def test_runs_are_kept_up_to_a_number_and_only_used_where_they_fit():
    runs = RunPool(LAYOUT, 2, 1 << 30)
    taken = [runs.take(16) for _ in range(3)]
    for run in taken:
        runs.give(run)
    again = [runs.take(16) for _ in range(3)]
    assert [any(x is y for y in taken) for x in again] == [True, True, False]
    runs.give(again[0])
    assert runs.take(8)[0][0].shape[1] == 8


def test_runs_are_kept_up_to_so_many_bytes():
    size = 16 * LAYOUT.bytes_per_token
    runs = RunPool(LAYOUT, 10, 3 * size + size // 2)
    taken = [runs.take(16) for _ in range(5)]
    for number, run in enumerate(taken, 1):
        runs.give(run)
        assert runs.nbytes == min(number, 3) * size
    runs.give(LAYOUT.empty(8))  # a smaller one has room yet
    assert runs.nbytes == 3 * size + size // 2
    runs.take(8)
    runs.take(16)
    assert runs.nbytes == 2 * size
    for _ in range(4):
        runs.take(16)
    assert runs.nbytes == 0


def test_loads_go_on_where_there_is_no_room_for_spare_runs():
    rank = Rank(spare_bytes=0)
    rank.save(CHAIN)
    for ticket in (7, 8):
        rank.stage(ticket=ticket)
        assert rank.load(0, ELSEWHERE, ticket) == ({"r"}, set())
        assert rank.blocks.holds(CHAIN, 0, ELSEWHERE)
    rank.close()


@bounded
def test_a_save_too_many_is_skipped_but_acknowledged(rank):
    gate, entered = rank.blocks.hold_reads()
    rank.transfer.save(Save(1, ref("a"), CHAIN, IDS), rank.on_ended)
    assert entered.wait(10)
    rank.transfer.save(Save(2, ref("b"), CHAIN, IDS), rank.on_ended)
    assert rank.transfer.pop_acks() == {2: 1}
    assert rank.transfer.pop_skipped([1, 2]) == {2}
    assert rank.transfer.pop_skipped([1, 2]) == set()
    rank.transfer.save(Save(3, ref("b"), CHAIN, IDS, waits=True), rank.on_ended)
    assert rank.transfer.pop_acks() == {}
    gate.set()
    until(lambda: rank.ended == [(2, False), (1, True), (3, True)])
    assert rank.transfer.pop_acks() == {1: 1, 3: 1}
    assert rank.store.counters.as_dict()["saves_skipped"] == 1


@pytest.mark.parametrize("rank", [12 * BLOCK_BYTES], indirect=True, ids=["12 blocks"])
def test_long_turns_of_stored_sessions_that_end_together_are_all_saved(rank):
    """Blocks that are stored already do not count as waiting, although vLLM holds them all."""
    chains = {x: hashes(tokens_of(24, first=i)) for i, x in enumerate("abc")}
    for job, (session, chain) in enumerate(chains.items()):
        rank.transfer.save(Save(job, ref(session), chain[:20], IDS[:20]), rank.on_ended)
        assert rank.store.wait_saved(ref(session), 10)
    gate, _ = rank.blocks.hold_reads()
    for job, (session, chain) in enumerate(chains.items(), 3):
        rank.transfer.save(Save(job, ref(session), chain, IDS), rank.on_ended)
    assert rank.store.stats().save_queue_bytes == 12 * BLOCK_BYTES
    gate.set()
    assert rank.store.wait_all_saved(200)
    assert rank.ended == [(job, True) for job in range(6)]
    assert all(num_blocks_in(fetch(rank.store, x)) == 24 for x in chains.values())


@bounded
def test_a_save_of_stored_blocks_is_never_one_too_many(rank):
    rank.save(CHAIN)
    gate, _ = rank.blocks.hold_reads()
    other = hashes(tokens_of(24, first=500))
    rank.transfer.save(Save(2, ref("new"), other, IDS), rank.on_ended)
    rank.transfer.save(Save(3, ref(), CHAIN, IDS), rank.on_ended)
    rank.transfer.save(Save(4, ref("branch"), CHAIN, IDS), rank.on_ended)
    gate.set()
    assert rank.store.wait_saved(ref("branch"), 10)
    assert rank.ended == [(1, True), (2, True), (3, True), (4, True)]
    assert rank.store.counters.as_dict().get("saves_skipped", 0) == 0


def test_evicted_blocks_are_charged_once_the_eviction_is_known(rank):
    rank.save(CHAIN)
    for piece in rank.store.keys.chunks(chain_of(rank.store, CHAIN)):
        rank.store.discard(piece.key)
    gate, entered = rank.blocks.hold_reads()
    rank.transfer.save(Save(2, ref(), CHAIN, IDS), rank.on_ended)
    assert entered.wait(10)
    assert rank.store.stats().save_queue_bytes == 24 * BLOCK_BYTES
    gate.set()
    assert rank.store.wait_saved(ref(), 10)
    assert num_blocks_in(fetch(rank.store, CHAIN)) == 24


def test_a_save_that_no_tier_takes_is_reported_as_failed():
    rank = Rank(tiers=[RamTier(10)])
    rank.save(CHAIN)
    assert rank.ended == [(1, False)]
    assert rank.transfer.pop_acks() == {1: 1}
    counters = rank.store.counters.as_dict()
    assert (counters.get("saves", 0), counters["saves_failed"]) == (0, 1)
    rank.close()


def test_a_save_that_a_store_always_refuses_is_not_made_up_for_again_and_again(rank):
    rank.store.close()
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), rank.on_ended)
    rank.transfer.save(Save(2, ref(), CHAIN, IDS, waits=True), rank.on_ended)
    assert rank.ended == [(1, False), (2, False)]
    assert rank.transfer.pop_acks() == {1: 1, 2: 1}
    assert rank.transfer.pop_skipped([1, 2]) == {1}
    assert rank.transfer.is_settled


def test_who_waits_for_a_save_waits_for_this_sessions_only(rank):
    gate, _ = rank.blocks.hold_reads()
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), rank.on_ended)
    rank.store.wait_saved(ref("other"), 10)
    rank.store.wait_saved(ref(), 0.01)
    assert rank.ended == []
    gate.set()
    rank.store.wait_saved(ref(), 10)
    assert rank.ended == [(1, True)]


def test_news_end_the_wait_for_them(rank):
    rank.transfer.wait_for_news(60)  # nothing is under way, so nothing can come
    gate, _ = rank.blocks.hold_reads()
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), rank.on_ended)
    rank.transfer.wait_for_news(0.01)
    assert rank.transfer.pop_acks() == {}
    gate.set()
    rank.transfer.wait_for_news(60)
    assert rank.transfer.pop_acks() == {1: 1}
    rank.store.wait_saved(ref(), 10)
    rank.stage()
    rank.transfer.load(Load(7, "r", 0, ELSEWHERE))
    rank.transfer.wait_for_news(60)
    assert (rank.transfer.pop_loaded(), rank.transfer.pop_loaded()) == ({"r"}, set())
    rank.transfer.wait_for_news(60)


@pytest.mark.parametrize("numbers", [[0], [1], [0, 2, 3], [5]])
def test_blobs_that_cannot_be_decoded_are_reported_and_never_offered_again(rank, numbers):
    """However many of those that are copied together."""
    rank.save(CHAIN)
    blobs = rank.stage()
    for n in numbers:
        read, blob = blobs[n]
        blobs[n] = (read, blob._replace(payload=blob.payload[:-1]))
    lost = {ELSEWHERE[i] for n in numbers for i in range(n * PER_CHUNK, (n + 1) * PER_CHUNK)}
    assert rank.load(0, ELSEWHERE) == ({"r"}, lost)
    for i, block in enumerate(ELSEWHERE):
        assert rank.blocks.holds(CHAIN, i, [block]) == (block not in lost)
    assert fetch(rank.store, CHAIN).num_chunks == numbers[0]
    rank.save(CHAIN, job=2)
    # What continued the first lost chunk went with it.
    assert rank.store.counters.as_dict()["chunks_packed"] == 24 - numbers[0]


def test_a_load_of_unstaged_blocks_fails_as_a_whole(rank):
    assert rank.load(0, [1, 2, 3]) == ({"r"}, {1, 2, 3})


def test_a_load_whose_copy_fails_is_still_reported(rank, caplog):
    rank.save(CHAIN)
    rank.stage()

    def broken(block_ids, run, first_block):
        raise RuntimeError("the device is gone")

    rank.blocks.write = broken
    assert rank.load(0, [1, 2, 3]) == ({"r"}, {1, 2, 3})


def test_blobs_that_are_no_longer_wanted_are_not_kept():
    staging = StagingArea()
    staging.expect(1)
    assert staging.is_wanted(1)
    staging.take(1)
    staging.put(1, StagedBlobs(fetch(open_store(), CHAIN), CHAIN))
    assert staging.take(1) is None
    assert len(staging) == 0
