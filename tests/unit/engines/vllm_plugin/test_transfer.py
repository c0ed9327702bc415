"""The half inside a worker, on arrays instead of vLLM's blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engines.vllm_plugin.host_blocks import HostBlocks, SpareRuns
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.rank import StagingArea
from engines.vllm_plugin.transfer import Transfer
from kvstore.block_records import BlockRecord
from tests.block_sessions import LAYOUT, hashes, open_store, ref
from tests.unit.engines.vllm_plugin.numpy_blocks import NoStream, NumpyBlocks

CHAIN = hashes(list(range(100)))  # 25 blocks
IDS = list(range(30, 55))


class Rank:
    """A worker half with its store, and what it told."""

    def __init__(self, max_queued_bytes: int = 1 << 30) -> None:
        self.blocks = NumpyBlocks()
        self.store = open_store()
        self.staging = StagingArea()
        self.saved: list[BlockRecord] = []
        blocks = HostBlocks(self.blocks, self.store, NoStream())
        self.transfer = Transfer(blocks, self.store, self.staging, max_queued_bytes)

    def save(self, chain: list[bytes], job: int = 1) -> None:
        self.blocks.compute(chain, IDS[: len(chain)])
        save = Save(job, ref(), chain, IDS[: len(chain)])
        self.transfer.save(save, self.saved.append)
        wait(lambda: self.transfer.queued_bytes == 0)

    def load(self, first: int, ids: list[int], ticket: int = 7) -> tuple[set[str], set[int]]:
        self.transfer.load(Load(ticket, "r", first, ids))
        wait(lambda: bool(self.transfer._loaded))
        return self.transfer.take_loaded(), self.transfer.take_bad_blocks()

    def stage(self, first: int = 0, ticket: int = 7) -> None:
        self.staging.expect(ticket)
        self.staging.put(ticket, self.store.fetch(ref(), CHAIN, first))


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.transfer.close()
    rank.store.close()


def test_what_was_saved_comes_back_into_other_blocks(rank):
    rank.save(CHAIN)
    assert rank.transfer.take_acks() == {1: 1}
    assert [x.num_tokens for x in rank.saved] == [100]
    rank.stage()
    target = list(range(1, 26))
    assert rank.load(0, target) == ({"r"}, set())
    assert rank.blocks.holds(CHAIN, 0, target)


def test_only_the_blocks_that_are_asked_for_are_written(rank):
    rank.save(CHAIN)
    rank.stage(first=6)
    assert rank.load(6, [2, 3, 4, 5, 6]) == ({"r"}, set())  # begins and ends inside chunks
    assert rank.blocks.holds(CHAIN, 6, [2, 3, 4, 5, 6])
    assert not any(page[[1, 7, 8]].any() for sides in rank.blocks.pages for page in sides)


def test_memory_is_decoded_into_again_and_again(rank):
    rank.save(CHAIN)
    target = list(range(1, 26))
    for _ in range(3):
        rank.stage()
        assert rank.load(0, target) == ({"r"}, set())
        assert rank.blocks.holds(CHAIN, 0, target)
        for page in (page for sides in rank.blocks.pages for page in sides):
            page[target] = 0


def test_runs_are_kept_up_to_a_number_and_only_used_where_they_fit():
    runs = SpareRuns(LAYOUT, 2)
    taken = [runs.take(16) for _ in range(3)]
    for run in taken:
        runs.give(run)
    again = [runs.take(16) for _ in range(3)]
    assert [any(x is y for y in taken) for x in again] == [True, True, False]
    runs.give(again[0])
    assert runs.take(8)[0][0].shape[1] == 8


def test_a_second_turn_encodes_only_what_is_new(rank):
    rank.save(CHAIN[:24])
    rank.save(CHAIN, job=2)
    assert rank.store.counters.as_dict()["chunks_encoded"] == 7
    assert rank.transfer.take_acks() == {1: 1, 2: 1}


def test_a_save_too_many_is_skipped_but_acknowledged(rank):
    gate, entered = threading.Event(), threading.Event()
    read = rank.blocks.read

    def slowly(block_ids):
        entered.set()
        assert gate.wait(10)
        return read(block_ids)

    rank.blocks.read = slowly
    rank.transfer._max_queued_bytes = 1
    rank.transfer.save(Save(1, ref("a"), CHAIN, IDS), rank.saved.append)
    assert entered.wait(10)
    rank.transfer.save(Save(2, ref("b"), CHAIN, IDS), rank.saved.append)
    assert rank.transfer.take_acks() == {2: 1}
    gate.set()
    wait(lambda: rank.transfer.queued_bytes == 0)
    assert rank.transfer.take_acks() == {1: 1}
    assert rank.store.counters.as_dict()["saves_skipped"] == 1


def test_who_waits_for_a_save_waits_for_this_sessions_only(rank):
    gate = threading.Event()
    read = rank.blocks.read
    rank.blocks.read = lambda block_ids: read(block_ids) if gate.wait(10) else []
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), rank.saved.append)
    rank.transfer.wait_saved(ref("other"), 10)
    rank.transfer.wait_saved(ref(), 0.01)
    assert rank.saved == []
    gate.set()
    rank.transfer.wait_saved(ref(), 10)
    assert len(rank.saved) == 1


def test_news_end_the_wait_for_them(rank):
    rank.transfer.wait_for_news(60)  # nothing is under way, so nothing can come
    gate = threading.Event()
    read = rank.blocks.read
    rank.blocks.read = lambda block_ids: read(block_ids) if gate.wait(10) else []
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), rank.saved.append)
    rank.transfer.wait_for_news(0.01)
    assert rank.transfer.take_acks() == {}
    gate.set()
    rank.transfer.wait_for_news(60)
    assert rank.transfer.take_acks() == {1: 1}
    rank.transfer.wait_saved(ref(), 10)
    rank.stage()
    rank.transfer.load(Load(7, "r", 0, list(range(1, 26))))
    rank.transfer.wait_for_news(60)
    assert rank.transfer.take_loaded() == {"r"}
    rank.transfer.wait_for_news(60)


def test_a_save_that_fails_still_gives_the_blocks_back(rank, caplog):
    def broken(block_ids):
        raise RuntimeError("the device is gone")

    rank.blocks.read = broken
    rank.transfer.save(Save(1, ref(), CHAIN, IDS), rank.saved.append)
    wait(lambda: rank.transfer.queued_bytes == 0)
    assert rank.transfer.take_acks() == {1: 1}
    assert rank.saved == []
    assert rank.store.counters.as_dict()["saves_failed"] == 1


def test_a_blob_that_cannot_be_decoded_is_reported_and_never_offered_again(rank, monkeypatch):
    rank.save(CHAIN)
    rank.stage()
    bad = rank.store.keys.whole(CHAIN)[0]
    pieces = rank.staging._fetched[7].pieces
    pieces[0] = (pieces[0][0], b"rubbish")
    target = list(range(1, 26))
    assert rank.load(0, target) == ({"r"}, {1, 2, 3, 4})
    assert rank.blocks.holds(CHAIN, 4, target[4:])
    assert rank.store.fetch(ref(), CHAIN, 0).end_block == 0
    assert [x.key for x in rank.store.missing(CHAIN)] == [bad.key]


def test_a_load_of_what_is_not_staged_fails_as_a_whole(rank):
    assert rank.load(0, [1, 2, 3]) == ({"r"}, {1, 2, 3})


def test_a_load_whose_copy_fails_is_still_reported(rank, caplog):
    rank.save(CHAIN)
    rank.stage()

    def broken(block_ids, run, first_block):
        raise RuntimeError("the device is gone")

    rank.blocks.write = broken
    assert rank.load(0, [1, 2, 3]) == ({"r"}, {1, 2, 3})


def test_everything_is_told_once(rank):
    rank.save(CHAIN)
    rank.stage()
    rank.load(0, [1])
    assert rank.transfer.take_loaded() == set()
    rank.transfer.take_acks()
    assert rank.transfer.take_acks() == {}


def test_what_nobody_wants_any_more_is_not_kept():
    staging = StagingArea()
    staging.expect(1)
    assert staging.is_wanted(1)
    staging.take(1)
    staging.put(1, open_store().fetch(None, CHAIN, 0))
    assert staging.take(1) is None
    assert len(staging) == 0
