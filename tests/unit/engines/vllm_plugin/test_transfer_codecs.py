"""The half inside a worker, with lossy codecs: one for each tier, and never one copy of another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from engines.vllm_plugin.checked_blocks import CheckedBlocks
from engines.vllm_plugin.host_blocks import HostBlocks
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.rank import StagingArea
from engines.vllm_plugin.restored_blocks import RestoredBlocks
from engines.vllm_plugin.transfer import Filling, Packing, Transfer
from kvstore.block_store import BlockStore
from kvstore.chain import CHUNK, TAIL
from kvstore.codec_set import CodecSet
from kvstore.codecs.presets import codec_by_name
from kvstore.format import codec_in
from kvstore.records import SessionRef
from tests.block_sessions import BLOCK, LAYOUT, hashes, open_store, ram_and_disk, ref
from tests.unit.engines.vllm_plugin.numpy_blocks import NoStream, NumpyBlocks

TOKENS = list(range(100))
CHAIN = hashes(TOKENS)  # 25 blocks: 6 chunks and a tail of one block
IDS = list(range(30, 55))
ELSEWHERE = list(range(1, 26))
TQ3, TQ4 = codec_by_name("tq3"), codec_by_name("tq4")
BOTH = CodecSet(TQ3, TQ4, TQ4)


class Rank:
    def __init__(self, store: BlockStore, max_queued_bytes: int = 1 << 30) -> None:
        self.pages = NumpyBlocks()
        self.store = store
        self.staging = StagingArea()
        blocks = HostBlocks(self.pages, store, NoStream())
        self.transfer = Transfer(blocks, store, self.staging, max_queued_bytes)

    def save(self, chain: Sequence[bytes], ids: Sequence[int], session: SessionRef) -> None:
        save = Save(1, session, list(chain), list(ids[: len(chain)]))
        self.transfer.save(save, lambda save, kept: None)
        assert self.transfer.wait_saved(session, 20) and self.store.flush(20)

    def restore(self, chain: Sequence[bytes], ids: Sequence[int]) -> int:
        """Into these blocks; how many of them were."""
        self.staging.expect(7)
        fetched = self.store.fetch(ref(), chain, 0)
        self.staging.put(7, fetched)
        self.transfer.load(Load(7, "r", 0, list(ids[: fetched.end_block])))
        wait(lambda: bool(self.transfer._loaded))
        assert self.transfer.take_loaded() == {"r"} and not self.transfer.take_bad_blocks()
        return fetched.end_block

    def codecs_in(self, place: int, kind: bytes = CHUNK) -> list[str]:
        blobs = [codec_in(blob).decode() for _, blob in self.store._stack.scan(place, kind)]
        return sorted(blobs)

    def evict(self) -> None:
        for place in range(2):
            names = [x for x, _ in self.store._stack.scan(place, b"") if x[:1] in (CHUNK, TAIL)]
            self.store._stack._tiers[place].delete_many(names)


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(open_store(ram_and_disk(tmp_path), codecs=BOTH))
    rank.pages.compute(CHAIN, IDS)
    yield rank
    rank.transfer.close()
    rank.store.close()


def test_each_tier_gets_its_own_codec_from_the_same_rows(rank):
    rank.save(CHAIN, IDS, ref())
    assert rank.codecs_in(0) == ["tq3.2"] * 6
    assert rank.codecs_in(1) == ["tq4.2"] * 6
    assert rank.codecs_in(0, TAIL) == rank.codecs_in(1, TAIL) == ["rows16.1"]
    for piece in rank.store.keys.whole(CHAIN)[:6]:
        blob = rank.store._stack.find(1, [piece.key])[0]
        run = rank.pages.read(IDS[piece.first_block : piece.end_block])
        first = piece.first_block * BLOCK
        assert blob == rank.store.packer.pack_chunk(piece.key, run, first, TQ4)
    rank.save(CHAIN, IDS, ref())
    assert rank.store.counters.as_dict()["chunks_encoded"] == 7  # with the tail, once


def test_it_wakes_from_either(rank):
    rank.save(CHAIN, IDS, ref())
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    assert rank.store.demote(ref(), "disk") == "disk"
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    assert rank.store.flush(10)
    assert rank.codecs_in(0) == ["tq4.2"] * 6  # as it was read


def test_under_pressure_slower_tiers_get_copies(tmp_path):
    rank = Rank(open_store(ram_and_disk(tmp_path), codecs=BOTH), max_queued_bytes=2)
    rank.pages.compute(CHAIN, IDS)
    rank.transfer._charges[99] = 2  # as if of another save
    rank.transfer._max_queued_bytes = 1 << 30
    rank.save(CHAIN[:8], IDS, ref("a"))
    assert rank.codecs_in(1) == ["tq4.2"] * 2
    rank.transfer._charges[99] = 1 << 29 | 1
    rank.save(CHAIN, IDS, ref())
    assert rank.codecs_in(1) == ["tq3.2"] * 4 + ["tq4.2"] * 2
    assert rank.store.counters.as_dict()["saves_copied"] == 1
    rank.transfer.close()
    rank.store.close()


def test_restored_blocks_are_not_packed_again(rank):
    rank.save(CHAIN, IDS, ref())
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    assert rank.store.flush(10)
    rank.evict()
    rank.save(CHAIN, ELSEWHERE, ref())
    assert rank.codecs_in(0) == rank.codecs_in(1) == ["restored16.1"] * 6
    assert rank.codecs_in(0, TAIL) == ["rows16.1"]  # a tail of exact rows is one still
    assert rank.store.counters.as_dict()["chunks_kept"] == 6
    before = [x for pair in rank.pages.read(ELSEWHERE[:24]) for x in pair]
    assert rank.restore(CHAIN, IDS) == 25
    after = [x for pair in rank.pages.read(IDS[:24]) for x in pair]
    assert all(abs(a - b).max() <= abs(a).max() / 128 for a, b in zip(before, after, strict=True))
    rank.evict()
    rank.save(CHAIN, IDS, ref())  # nor when they come from such a blob
    assert rank.codecs_in(0) == ["restored16.1"] * 6


def test_blocks_that_were_computed_since_are_packed(rank):
    rank.save(CHAIN, IDS, ref())
    rank.restore(CHAIN, ELSEWHERE)
    assert rank.store.flush(10)
    rank.evict()
    rank.save(CHAIN, IDS, ref())  # the engine still has the blocks that it computed
    assert rank.codecs_in(0) == ["tq3.2"] * 6
    other = hashes(list(range(500, 600)))
    rank.pages.compute(other, ELSEWHERE)  # the same blocks, somebody else's now
    rank.save(other, ELSEWHERE, ref("other"))
    assert rank.codecs_in(0) == ["tq3.2"] * 12


def test_a_chunk_with_some_restored_blocks_is_kept_as_rows(rank):
    rank.save(CHAIN, IDS, ref())
    edited = hashes([*TOKENS[:40], *range(700, 760)])  # leaves it in the middle of chunk 2
    assert rank.restore(edited, ELSEWHERE) == 10
    run = NumpyBlocks()
    run.compute(edited, ELSEWHERE)
    rank.pages.write(ELSEWHERE[10:], run.read(ELSEWHERE[10:]), 0)
    rank.save(edited, ELSEWHERE, ref())
    assert rank.codecs_in(0).count("restored16.1") == 1
    assert rank.store.counters.as_dict()["chunks_kept"] == 1
    rank.save(edited[:11], ELSEWHERE, ref("short"))  # three blocks behind chunk 1, two restored
    assert "restored16.1" in rank.codecs_in(0, TAIL)


def test_what_is_known_of_a_block_goes_with_its_hash():
    blocks = RestoredBlocks()
    blocks.note([1, 2], [b"a", b"b"], lossy=True)
    assert blocks.any_of([2], [b"b"]) and blocks.any_of([5, 1], [b"x", b"a"])
    assert not blocks.any_of([2], [b"c"])
    blocks.note([2], [b"b"], lossy=False)
    assert not blocks.any_of([2], [b"b"])


def test_a_codec_adopted_meanwhile_is_used_and_the_old_one_read(rank):
    rank.save(CHAIN[:12], IDS, ref())
    rank.store.adopt(CodecSet.one(TQ4))
    rank.save(CHAIN, IDS, ref())
    assert rank.codecs_in(0) == ["tq3.2"] * 3 + ["tq4.2"] * 3
    assert rank.restore(CHAIN, ELSEWHERE) == 25


# ---- the device's kernels, and the host for what they were not checked with


class Device:
    """What kernels would do; here the host does, and counts."""

    def __init__(self, host: HostBlocks) -> None:
        self._host = host
        self.packed: list[bytes] = []
        self.filled: list[bytes] = []

    def mark(self) -> object:
        return None

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        self.packed += [x.piece.key for x in wanted]
        return self._host.pack(wanted, ready)

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        self.filled += [x.piece.key for x in wanted]
        return self._host.fill(wanted, ready)

    def close(self) -> None:
        """Nothing is held."""


def test_the_device_does_what_its_kernels_were_checked_for(tmp_path):
    store = open_store(ram_and_disk(tmp_path), codec="tq3")
    pages = NumpyBlocks()
    host = HostBlocks(pages, store, NoStream())
    device = Device(host)
    blocks = CheckedBlocks(device, host, store)
    assert blocks.block_bytes == BLOCK * LAYOUT.bytes_per_token
    pages.compute(CHAIN, IDS)
    pieces = store.keys.whole(CHAIN)
    wanted = [
        Packing(x, IDS[x.first_block : x.end_block], restored=i == 2) for i, x in enumerate(pieces)
    ]
    blobs = [x.result() for x in blocks.pack(wanted, None)]
    assert device.packed == [x.key for i, x in enumerate(pieces) if i != 2]
    assert [codec_in(x) for x in blobs] == [
        *[b"tq3.2"] * 2,
        b"restored16.1",
        *[b"tq3.2"] * 3,
        b"rows16.1",
    ]
    store.adopt(CodecSet.one(TQ4))
    device.packed.clear()
    assert codec_in(blocks.pack(wanted[:1], None)[0].result()) == b"tq4.2"
    rows: dict = {}
    blocks.pack(wanted, None, rows)
    assert device.packed == [] and list(rows) == [x for i, x in enumerate(pieces[:6]) if i != 2]
    fillings = [
        Filling(x, blob, 0, ELSEWHERE[x.first_block : x.end_block])
        for x, blob in zip(pieces, blobs, strict=True)
    ]
    assert blocks.fill(fillings, None) == set(ELSEWHERE)
    assert device.filled == [x.key for i, x in enumerate(pieces) if i != 2]
    blocks.close()
    store.close()
