"""The worker side, on arrays instead of vLLM's blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engines.vllm_plugin.blocks.host_blocks import SPARE_BYTES, RunPool
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea
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
from tests.unit.engines.vllm_plugin.worker.rank_rig import CHAIN, ELSEWHERE, IDS, Rank
from tests.waiting import until

BLOCK_BYTES = BLOCK * LAYOUT.bytes_per_token


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    """A parameter is the number of bytes that may wait to be saved."""
    rank = Rank(save_queue_bytes=getattr(request, "param", 1 << 30))
    yield rank
    rank.close()


bounded = pytest.mark.parametrize("rank", [1], indirect=True, ids=["one save at a time"])


def test_a_saved_session_comes_back_into_other_blocks(rank):
    rank.save()
    assert rank.transfer.pop_ended().jobs == {1: False}
    assert rank.ended == [(1, True)]
    assert rank.store.record(ref()).num_tokens == 24 * BLOCK
    rank.stage()
    assert rank.load(0, ELSEWHERE) == ({"r"}, set())
    assert rank.pages.holds(CHAIN, 0, ELSEWHERE)


def test_only_the_blocks_that_are_asked_for_are_written(rank):
    rank.save()
    rank.stage()
    assert rank.load(7, [2, 3, 4, 5]) == ({"r"}, set())  # begins and ends inside chunks
    assert rank.pages.holds(CHAIN, 7, [2, 3, 4, 5])
    assert not any(page[[1, 6, 7]].any() for sides in rank.pages.pages for page in sides)


def test_the_thread_that_fills_blocks_decodes_blobs_that_no_codec_thread_has_begun(rank):
    """They are all busy here, with saves of others perhaps."""
    rank.save()
    rank.stage()
    gate = threading.Event()
    workers = rank.store.workers
    busy = [workers.codec(gate.wait, 20) for _ in range(workers.num_threads)]
    try:
        assert rank.load(0, ELSEWHERE) == ({"r"}, set())
        assert not any(x.done() for x in busy)
    finally:
        gate.set()
    assert rank.pages.holds(CHAIN, 0, ELSEWHERE)


def test_runs_are_kept_up_to_so_many_and_so_many_bytes_and_only_used_where_they_fit():
    size = 16 * LAYOUT.bytes_per_token
    runs = RunPool(LAYOUT, 4, 3 * size + size // 2)
    taken = [runs.take(16) for _ in range(5)]
    for number, run in enumerate(taken, 1):
        runs.give(run)
        assert runs.nbytes == min(number, 3) * size
    runs.give(LAYOUT.empty(8))  # a smaller one has room yet
    runs.give(LAYOUT.empty(0))  # and there are four by now
    assert runs.nbytes == 3 * size + size // 2
    assert runs.take(8)[0][0].shape[1] == 8
    again = [runs.take(16) for _ in range(4)]
    assert [any(x is y for y in taken) for x in again] == [True] * 3 + [False]
    assert runs.nbytes == 0


@pytest.mark.parametrize("spare_bytes", [SPARE_BYTES, 0])
def test_load_after_load_fills_blocks_with_and_without_memory_to_spare(spare_bytes):
    rank = Rank(spare_bytes=spare_bytes)
    rank.save()
    for ticket in (7, 8, 9):
        rank.stage(ticket=ticket)
        assert rank.load(0, ELSEWHERE, ticket) == ({"r"}, set())
        assert rank.pages.holds(CHAIN, 0, ELSEWHERE)
        for page in (page for sides in rank.pages.pages for page in sides):
            page[ELSEWHERE] = 0
    rank.close()


@bounded
def test_a_save_too_many_is_skipped_but_acknowledged(rank):
    gate, entered = rank.pages.hold_reads()
    rank.begin(Save(1, ref("a"), CHAIN, IDS))
    assert entered.wait(10)
    rank.begin(Save(2, ref("b"), CHAIN, IDS))
    assert rank.transfer.pop_ended().jobs == {2: True}
    rank.begin(Save(3, ref("b"), CHAIN, IDS, waits=True))
    assert rank.transfer.pop_ended().jobs == {}
    gate.set()
    until(lambda: rank.ended == [(2, False), (1, True), (3, True)])
    assert rank.transfer.pop_ended().jobs == {1: False, 3: False}
    assert rank.store.counters.as_dict()["saves_skipped"] == 1


@pytest.mark.parametrize("rank", [12 * BLOCK_BYTES], indirect=True, ids=["12 blocks"])
def test_long_turns_of_stored_sessions_that_end_together_are_all_saved(rank):
    """Blocks that are stored already do not count as waiting, although vLLM holds them all."""
    chains = {x: hashes(tokens_of(24, first=i)) for i, x in enumerate("abc")}
    for job, (session, chain) in enumerate(chains.items()):
        rank.begin(Save(job, ref(session), chain[:20], IDS[:20]))
        assert rank.store.wait_saved(ref(session), 10)
    gate, _ = rank.pages.hold_reads()
    for job, (session, chain) in enumerate(chains.items(), 3):
        rank.begin(Save(job, ref(session), chain, IDS))
    assert rank.store.stats().save_queue_bytes == 12 * BLOCK_BYTES
    gate.set()
    assert rank.store.wait_all_saved(200)
    assert rank.ended == [(job, True) for job in range(6)]
    assert all(num_blocks_in(fetch(rank.store, x)) == 24 for x in chains.values())


def test_evicted_blocks_are_charged_once_the_eviction_is_known(rank):
    rank.save()
    for piece in rank.store.keys.chunks(chain_of(rank.store, CHAIN)):
        rank.store.discard(piece.key)
    gate, entered = rank.pages.hold_reads()
    rank.begin(Save(2, ref(), CHAIN, IDS))
    assert entered.wait(10)
    assert rank.store.stats().save_queue_bytes == 24 * BLOCK_BYTES
    gate.set()
    assert rank.store.wait_saved(ref(), 10)
    assert num_blocks_in(fetch(rank.store, CHAIN)) == 24


def broken(*args: object) -> Any:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("fails", ["reading", "packing", "no tier", "no room"])
def test_a_save_that_fails_is_acknowledged_once(fails, caplog):
    rank = Rank([RamTier(10 if fails == "no room" else 1 << 26)], codec="tq3")
    if fails == "reading":
        rank.pages.read = broken
    if fails == "packing":
        rank.store.packer.pack_rows = broken
    if fails == "no tier":
        rank.tiers[0].put_many = broken
    rank.save()
    assert rank.transfer.pop_ended().jobs == {1: False}
    counters = rank.store.counters.as_dict()
    assert (counters.get("saves", 0), counters["saves_failed"]) == (0, 1)
    rank.close()
    assert rank.ended == [(1, False)]
    assert rank.transfer.pop_ended().jobs == {}


def test_a_save_that_a_store_always_refuses_is_not_made_up_for_again_and_again(rank):
    rank.store.close()
    rank.begin(Save(1, ref(), CHAIN, IDS))
    rank.begin(Save(2, ref(), CHAIN, IDS, waits=True))
    assert rank.ended == [(1, False), (2, False)]
    assert rank.transfer.pop_ended().jobs == {1: True, 2: False}
    assert rank.transfer.is_settled


def test_a_superseded_save_acknowledges_its_job_and_ends_with_the_newer_one(rank):
    gate, _ = rank.pages.hold_reads()
    rank.begin(Save(1, ref("other"), CHAIN, IDS))
    rank.begin(Save(2, ref(), CHAIN[:8], IDS[:8]))
    rank.begin(Save(3, ref(), CHAIN, IDS))
    assert rank.transfer.pop_ended().jobs == {2: False}
    gate.set()
    assert rank.store.wait_all_saved(200)
    assert rank.transfer.pop_ended().jobs == {1: False, 3: False}
    assert rank.ended == [(1, True), (2, True), (3, True)]
    assert rank.transfer.is_settled


def test_a_save_of_a_session_that_is_forgotten_acknowledges_its_job_at_once(rank):
    gate, entered = rank.pages.hold_reads()
    rank.begin(Save(1, ref("other"), CHAIN, IDS))
    assert entered.wait(10)
    rank.begin(Save(2, ref(), CHAIN, IDS))
    rank.store.forget(ref())
    assert rank.transfer.pop_ended().jobs == {2: False}
    gate.set()
    assert rank.store.wait_all_saved(200)
    assert rank.transfer.pop_ended().jobs == {1: False}


def test_news_end_the_wait_for_them(rank):
    assert rank.transfer.pop_ended(60).jobs == {}  # nothing is under way, so nothing can come
    gate, _ = rank.pages.hold_reads()
    rank.begin(Save(1, ref(), CHAIN, IDS))
    assert rank.transfer.pop_ended(0.01).jobs == {}
    gate.set()
    assert rank.transfer.pop_ended(60).jobs == {1: False}
    rank.store.wait_saved(ref(), 10)
    rank.stage()
    rank.transfer.load(Load(7, "r", 0, ELSEWHERE))
    assert rank.transfer.pop_ended(60).loads == {"r": set()}
    assert rank.transfer.pop_ended(60).loads == {}


@pytest.mark.parametrize("numbers", [[0], [1], [0, 2, 3], [5]])
def test_blobs_that_cannot_be_decoded_are_reported_and_never_offered_again(rank, numbers):
    """However many of those that are copied together."""
    rank.save()
    blobs = rank.stage().blobs
    for n in numbers:
        read, blob = blobs[n]
        blobs[n] = (read, blob._replace(payload=blob.payload[:-1]))
    lost = {ELSEWHERE[i] for n in numbers for i in range(n * PER_CHUNK, (n + 1) * PER_CHUNK)}
    assert rank.load(0, ELSEWHERE) == ({"r"}, lost)
    for i, block in enumerate(ELSEWHERE):
        assert rank.pages.holds(CHAIN, i, [block]) == (block not in lost)
    assert fetch(rank.store, CHAIN).num_chunks == numbers[0]
    rank.save(job=2)
    # What continued the first lost chunk went with it.
    assert rank.store.counters.as_dict()["chunks_packed"] == 24 - numbers[0]


def test_a_load_of_unstaged_blocks_fails_as_a_whole(rank):
    assert rank.load(0, [1, 2, 3]) == ({"r"}, {1, 2, 3})


def test_a_load_whose_copy_fails_is_still_reported(rank, caplog):
    rank.save()
    rank.stage()

    rank.pages.write = broken
    assert rank.load(0, [1, 2, 3]) == ({"r"}, {1, 2, 3})


def test_blobs_that_are_no_longer_wanted_are_not_kept():
    staging = StagingArea()
    staging.expect(1)
    assert staging.is_wanted(1)
    staging.take(1)
    staging.put(1, StagedBlobs(fetch(open_store(), CHAIN), CHAIN))
    assert staging.take(1) is None
    assert len(staging) == 0
