"""The worker side with lossy codecs: one for each tier, and no lossy copy packed again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from engines.vllm_plugin.blocks.blocks import Filling, Packing
from engines.vllm_plugin.blocks.host_blocks import HostBlocks
from engines.vllm_plugin.blocks.restored_blocks import RestoredBlocks
from engines.vllm_plugin.device.checked_blocks import (
    MOST_TRIES,
    CheckedBlocks,
    KernelsUnusable,
)
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.rank import StagingArea
from engines.vllm_plugin.worker.transfer import Transfer
from kvstore.blobs.chain import CHUNK, PART, TAIL
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import codec_in
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.by_blocks.names import BlobSpan
from kvstore.by_blocks.store import RestoredPart
from kvstore.codecs.presets import codec_by_name
from kvstore.session import SessionRef
from tests.block_sessions import BLOCK, LAYOUT, hashes, open_store, ram_and_disk, ref, rows_behind
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NoStream, NumpyBlocks
from tests.unit.engines.vllm_plugin.worker.test_transfer import ended_loads

TOKENS = list(range(100))
CHAIN = hashes(TOKENS)  # 25 blocks: 6 chunks and a tail of one block
IDS = list(range(30, 55))
ELSEWHERE = list(range(1, 26))
TQ3, TQ4 = codec_by_name("tq3"), codec_by_name("tq4")
BOTH = CodecSet(TQ3, TQ4, TQ4)


class Rank:
    def __init__(self, folder: Path, max_queued_bytes: int = 1 << 30) -> None:
        self.pages = NumpyBlocks()
        self.tiers = ram_and_disk(folder)
        self.store = store = open_store(self.tiers, codecs=BOTH)
        self.staging = StagingArea()
        blocks = HostBlocks(self.pages, store, NoStream())
        self.transfer = Transfer(blocks, store, self.staging, max_queued_bytes)

    def save(self, chain: Sequence[bytes], ids: Sequence[int], session: SessionRef) -> None:
        save = Save(1, session, list(chain), list(ids[: len(chain)]))
        self.transfer.save(save, lambda save, kept: None)
        assert self.transfer.wait_saved(session, 20) and self.store.flush(20)

    def restore(self, chain: Sequence[bytes], ids: Sequence[int]) -> int:
        """Load the chain into these blocks; the number of blocks that were stored."""
        self.staging.expect(7)
        fetched = self.store.fetch(ref(), chain, 0)
        self.staging.put(7, fetched)
        self.transfer.load(Load(7, "r", 0, list(ids[: fetched.end_block])))
        assert ended_loads(self.transfer) == {"r"} and not self.transfer.take_bad_blocks()
        return fetched.end_block

    def codecs_in(self, tier: int, kind: bytes = CHUNK) -> list[str]:
        """Codecs of the blobs of this kind in the RAM tier (0) or on disk (1)."""
        return sorted(codec_in(blob).decode() for _, blob in self.tiers[tier].scan(kind))

    def evict(self) -> None:
        for tier in self.tiers:
            tier.delete_many([x for kind in (CHUNK, TAIL) for x, _ in tier.scan(kind)])

    def close(self) -> None:
        self.transfer.close()
        self.store.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    rank.pages.compute(CHAIN, IDS)
    yield rank
    rank.close()


def test_each_tier_gets_its_own_codec_from_the_same_rows(rank):
    rank.save(CHAIN, IDS, ref())
    assert rank.codecs_in(0) == ["tq3.2"] * 6
    assert rank.codecs_in(1) == ["tq4.2"] * 6
    assert (rank.codecs_in(0, TAIL), rank.codecs_in(1, TAIL)) == (["tq3.2"], ["tq4.2"])
    for span in rank.store.keys.whole(CHAIN):
        ((_, blob),) = rank.tiers[1].scan(span.key)
        run = rank.pages.read(IDS[span.first_block : span.end_block])
        first = span.first_block * BLOCK
        assert blob == rank.store.packer.pack_run(span.key, run, first, TQ4)
    rank.save(CHAIN, IDS, ref())
    assert rank.store.counters.as_dict()["chunks_encoded"] == 7  # with the tail, once


def test_it_wakes_from_either(rank):
    rank.save(CHAIN, IDS, ref())
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    assert rank.store.demote(ref(), "disk") == "disk"
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    assert rank.store.flush(10)
    assert rank.codecs_in(0) == ["tq4.2"] * 6  # as it was read


def save_while_another_waits(rank: Rank, one: Save, other: Save) -> None:
    """``other`` is in line before the blocks of ``one`` are read."""
    gate, read = threading.Event(), rank.pages.read
    rank.pages.read = lambda block_ids: read(block_ids) if gate.wait(20) else []
    for save in (one, other):
        rank.transfer.save(save, lambda save, kept: None)
    gate.set()
    assert rank.transfer.wait_saved(one.session, 20)
    assert rank.transfer.wait_saved(other.session, 20) and rank.store.flush(20)


def test_under_pressure_slower_tiers_get_copies(tmp_path):
    """There is pressure while other sessions take more than half of the room for waiting saves."""
    rank = Rank(tmp_path, max_queued_bytes=48 * BLOCK * LAYOUT.bytes_per_token)
    short, long = hashes(list(range(500, 516))), hashes(list(range(600, 700)))
    for chain, ids in ((CHAIN, IDS), (long, ELSEWHERE), (short, [60, 61, 62, 63])):
        rank.pages.compute(chain, ids)
    one = Save(1, ref("a"), CHAIN[:8], IDS[:8])
    save_while_another_waits(rank, one, Save(2, ref("b"), short, [60, 61, 62, 63]))
    assert rank.codecs_in(1) == ["tq4.2"] * (2 + 1)
    one = Save(3, ref(), CHAIN, IDS)
    save_while_another_waits(rank, one, Save(4, ref("c"), long, ELSEWHERE))
    assert rank.codecs_in(1) == ["tq3.2"] * 4 + ["tq4.2"] * (2 + 1 + 6)
    assert rank.store.counters.as_dict()["saves_copied"] == 1
    rank.close()


def test_restored_blocks_are_not_packed_again(rank):
    rank.save(CHAIN, IDS, ref())
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    assert rank.store.flush(10)
    rank.evict()
    rank.save(CHAIN, ELSEWHERE, ref())
    assert rank.codecs_in(0) == rank.codecs_in(1) == ["restored16.1"] * 6
    assert rank.codecs_in(0, TAIL) == ["restored16.1"]
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
    rank.pages.compute(other, ELSEWHERE)  # the same blocks, another session's now
    rank.save(other, ELSEWHERE, ref("other"))
    assert rank.codecs_in(0) == ["tq3.2"] * 12


def test_of_a_chunk_with_some_restored_blocks_only_the_others_are_packed(rank):
    rank.save(CHAIN, IDS, ref())
    edited = hashes([*TOKENS[:40], *range(700, 760)])  # leaves it in the middle of chunk 2
    assert rank.restore(edited, ELSEWHERE) == 10
    run = NumpyBlocks()
    run.compute(edited, ELSEWHERE)
    rank.pages.write(ELSEWHERE[10:], run.read(ELSEWHERE[10:]), 0)
    rank.save(edited, ELSEWHERE, ref())
    assert rank.codecs_in(0).count("segments.1") == rank.codecs_in(1).count("segments.1") == 1
    assert rank.store.counters.as_dict()["chunks_kept"] == 1
    rank.save(edited[:11], ELSEWHERE, ref("short"))  # three blocks after chunk 1, two restored
    assert "segments.1" in rank.codecs_in(0, TAIL)


def rows_in(rank: Rank, tier: int, span: BlobSpan) -> np.ndarray:
    """K of the first layer in the tier's blob."""
    ((_, blob),) = rank.tiers[tier].scan(span.key)
    num_tokens = rank.store.keys.num_tokens(span)
    out = LAYOUT.empty(num_tokens)
    rank.store.packer.unpack_run(blob, span.key, span.first_block * BLOCK, num_tokens, out)
    return out[0][0]


def test_a_tail_goes_on_as_it_was_packed(rank):
    rank.save(CHAIN, IDS, ref())
    tail = rank.store.keys.whole(CHAIN)[-1]
    before = [rows_in(rank, tier, tail) for tier in (0, 1)]
    assert rank.restore(CHAIN, ELSEWHERE) == 25
    longer = hashes([*TOKENS, *range(500, 516)])  # the tail's block begins a chunk, and a tail
    ids = [*ELSEWHERE, 26, 27, 28, 29]
    run = NumpyBlocks()
    run.compute(longer, ids)
    rank.pages.write(ids[25:], run.read(ids[25:]), 0)
    rank.save(longer, ids, ref())
    chunk = rank.store.keys.whole(longer)[6]
    assert rank.codecs_in(0).count("segments.1") == rank.codecs_in(1).count("segments.1") == 1
    for tier in (0, 1):  # of each its own copy
        assert np.array_equal(rows_in(rank, tier, chunk)[:, :BLOCK], before[tier])
    assert not np.array_equal(*before)


def save_with_part(rank: Rank, chain, ids, part, restored: RestoredPart | None = None) -> None:
    save = Save(1, ref(), list(chain), list(ids), {}, part, restored_part=restored)
    rank.transfer.save(save, lambda save, kept: None)
    assert rank.transfer.wait_saved(ref(), 20) and rank.store.flush(20)


def restore_with_part(rank: Rank, chain, ids, part_tokens: int) -> None:
    rank.staging.expect(8)
    fetched = rank.store.fetch(ref(), chain, 0)
    rank.staging.put(8, fetched)
    rank.transfer.load(Load(8, "r", 0, list(ids), [], part_tokens))
    assert ended_loads(rank.transfer) == {"r"} and not rank.transfer.take_bad_blocks()


@pytest.mark.parametrize("known", [True, False])
def test_a_part_goes_on_as_it_was_packed(rank, known):
    """``known``: the scheduler side says which part it was; without that its rows are kept."""
    part, ids = (501, 502, 503), [*IDS, 60]
    rank.pages.write([60], rows_behind(CHAIN, (*part, 0)), 0)
    save_with_part(rank, CHAIN, ids, part)
    span = rank.store.keys.part(CHAIN, part)
    assert rank.codecs_in(0, PART) == ["tq3.2"] and rank.codecs_in(1, PART) == ["tq4.2"]
    before = rows_in(rank, 0, span)[:, :2]
    there = [*ELSEWHERE, 26]
    restore_with_part(rank, CHAIN, there, 2)  # the prompt goes on otherwise after two of them
    longer = hashes([*TOKENS, 501, 502, 7, 8])
    restored = RestoredPart(25, part, 2) if known else None
    save_with_part(rank, longer, there, (), restored)
    tail = rank.store.keys.whole(longer)[-1]
    assert rank.codecs_in(0, TAIL) == rank.codecs_in(1, TAIL) == ["segments.1"]
    after = rows_in(rank, 0, tail)[:, BLOCK : BLOCK + 2]
    assert np.array_equal(after, before) if known else np.allclose(after, before, rtol=2**-8)
    rank.evict()
    save_with_part(rank, longer, there, ())
    assert rank.codecs_in(0, TAIL) == ["segments.1"]  # its rows are known as restored still


def test_the_record_of_a_block_goes_with_its_hash():
    blocks = RestoredBlocks()
    blocks.note([1, 2], [b"a", b"b"], lossy=True)
    assert blocks.num_lossy([2], [b"b"], b"", 4) == 4
    assert blocks.num_lossy([5, 1, 6], [b"x", b"a", b"y"], b"", 4) == 8
    assert not blocks.num_lossy([2], [b"c"], b"", 4)
    blocks.note([2], [b"b"], lossy=False)
    assert not blocks.num_lossy([2], [b"b"], b"", 4)


def test_a_block_that_began_with_restored_rows_goes_by_the_one_before():
    blocks = RestoredBlocks()
    blocks.note_part(3, b"before", 2, lossy=True)
    assert blocks.num_lossy([3], [], b"before", 4) == 2
    assert blocks.num_lossy([1, 3], [b"before", b"full"], b"", 4) == 4 + 2
    assert not blocks.num_lossy([3], [b"full"], b"another", 4)
    blocks.note_part(3, b"before", 2, lossy=False)
    assert not blocks.num_lossy([3], [], b"before", 4)


def test_a_codec_adopted_meanwhile_is_used_and_the_old_one_read(rank):
    rank.save(CHAIN[:12], IDS, ref())
    rank.store.adopt(CodecSet.one(TQ4))
    rank.save(CHAIN, IDS, ref())
    assert rank.codecs_in(0) == ["tq3.2"] * 3 + ["tq4.2"] * 3
    assert rank.restore(CHAIN, ELSEWHERE) == 25


# ---- the device's kernels, and the host for codecs that they were not checked with


class Device:
    """Stands in for the device's kernels: has the host pack, and notes the requests."""

    def __init__(self, host: HostBlocks) -> None:
        self._host = host
        self.packed: list[bytes] = []
        self.filled: list[bytes] = []

    def mark(self) -> object:
        return None

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        self.packed += [x.span.key for x in wanted]
        return self._host.pack(wanted, ready)

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        self.filled += [x.span.key for x in wanted]
        return self._host.fill(wanted, ready)

    def close(self) -> None:
        """Nothing is held."""


def test_the_device_packs_with_the_codec_its_kernels_were_checked_for(tmp_path):
    store = open_store(ram_and_disk(tmp_path), codec="tq3")
    pages = NumpyBlocks()
    host = HostBlocks(pages, store, NoStream())
    device = Device(host)
    blocks = CheckedBlocks(device, host, store, no_kernels)
    assert blocks.block_bytes == BLOCK * LAYOUT.bytes_per_token
    pages.compute(CHAIN, IDS)
    spans = store.keys.whole(CHAIN)
    wanted = [
        Packing(
            x, IDS[x.first_block : x.end_block], Lineage(x.end_block * BLOCK) if i == 2 else FRESH
        )
        for i, x in enumerate(spans)
    ]
    blobs = [x.result() for x in blocks.pack(wanted, None)]
    assert device.packed == [x.key for i, x in enumerate(spans) if i != 2]
    assert [codec_in(x) for x in blobs] == [
        *[b"tq3.2"] * 2,
        b"restored16.1",
        *[b"tq3.2"] * 4,
    ]
    store.adopt(CodecSet.one(TQ4))
    device.packed.clear()
    assert codec_in(blocks.pack(wanted[:1], None)[0].result()) == b"tq4.2"
    rows: dict = {}
    blocks.pack(wanted, None, rows)
    assert device.packed == [] and list(rows) == spans
    fillings = [
        Filling(x, blob, 0, ELSEWHERE[x.first_block : x.end_block])
        for x, blob in zip(spans, blobs, strict=True)
    ]
    assert blocks.fill(fillings, None) == set(ELSEWHERE)
    # The first chunk of so small a model has no segment of first tokens, which kernels expect.
    assert device.filled == [x.key for i, x in enumerate(spans) if i not in (0, 2)]
    blocks.close()
    store.close()


def no_kernels() -> Device:
    raise KernelsUnusable("they are wrong")


class Proof:
    """Returns a device's half once the test lets it end."""

    def __init__(self, found: Device | None) -> None:
        self.found = found
        self.asked = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self) -> Device:
        self.asked.release()
        assert self.may_end.wait(20)
        return self.found or no_kernels()


def test_kernels_are_checked_again_for_a_codec_that_is_adopted(tmp_path):
    store, pages = open_store(ram_and_disk(tmp_path), codec="tq3"), NumpyBlocks()
    pages.compute(CHAIN, IDS)
    host = HostBlocks(pages, store, NoStream())
    old, new = Device(host), Device(host)
    proof = Proof(new)
    blocks = CheckedBlocks(old, host, store, proof)
    spans = store.keys.whole(CHAIN)[1:]  # of so small a model the host fills the first chunk
    wanted = [Packing(x, IDS[x.first_block : x.end_block]) for x in spans]
    (before,) = (x.result() for x in blocks.pack(wanted[:1], None))
    store.adopt(CodecSet.one(TQ4))
    old.packed.clear()
    for x in wanted[:3]:  # the host packs, and the check is asked for once
        assert codec_in(blocks.pack([x], None)[0].result()) == b"tq4.2"
    assert proof.asked.acquire(timeout=20) and not proof.asked.acquire(blocking=False)
    assert old.packed == new.packed == []
    proof.may_end.set()
    deadline = time.monotonic() + 20
    while not new.packed and time.monotonic() < deadline:
        (after,) = (x.result() for x in blocks.pack(wanted[:1], None))
    assert new.packed == [wanted[0].span.key] and codec_in(after) == b"tq4.2"
    assert blocks.why_host == ""
    fillings = [Filling(wanted[0].span, x, 0, ELSEWHERE[:4]) for x in (before, after)]
    assert blocks.fill(fillings, None) == set(ELSEWHERE[:4])
    assert (old.filled, new.filled) == ([], [wanted[0].span.key])  # the host reads the older blob
    blocks.close()
    store.close()


def test_kernels_that_are_wrong_for_an_adopted_codec_are_checked_once(tmp_path):
    store, pages = open_store(ram_and_disk(tmp_path), codec="tq3"), NumpyBlocks()
    pages.compute(CHAIN, IDS)
    host = HostBlocks(pages, store, NoStream())
    device, proof = Device(host), Proof(None)
    blocks = CheckedBlocks(device, host, store, proof)
    wanted = [Packing(x, IDS[x.first_block : x.end_block]) for x in store.keys.whole(CHAIN)[:1]]
    store.adopt(CodecSet.one(TQ4))
    proof.may_end.set()
    blocks.pack(wanted, None)
    assert proof.asked.acquire(timeout=20)
    for _ in range(3):
        assert codec_in(blocks.pack(wanted, None)[0].result()) == b"tq4.2"
    assert device.packed == [] and not proof.asked.acquire(timeout=0.1)
    assert blocks.why_host == "they are wrong"
    store.adopt(CodecSet.one(TQ3))  # the one that they are right for
    blocks.pack(wanted, None)
    assert device.packed == [wanted[0].span.key]
    blocks.close()
    store.close()


def test_a_codec_that_is_adopted_many_times_is_packed_by_the_device_each_time(tmp_path):
    store, pages = open_store(ram_and_disk(tmp_path), codec="tq3"), NumpyBlocks()
    pages.compute(CHAIN, IDS)
    host = HostBlocks(pages, store, NoStream())
    made: list[Device] = []

    def proves() -> Device:
        made.append(Device(host))
        return made[-1]

    blocks = CheckedBlocks(Device(host), host, store, proves)
    wanted = [Packing(x, IDS[x.first_block : x.end_block]) for x in store.keys.whole(CHAIN)[:1]]
    for codec in (TQ4, TQ3) * (MOST_TRIES + 1):
        store.adopt(CodecSet.one(codec))
        deadline = time.monotonic() + 20
        while not (made and made[-1].packed) and time.monotonic() < deadline:
            blocks.pack(wanted, None)
        assert made[-1].packed and blocks.why_host == ""
        made[-1].packed.clear()
    blocks.close()
    store.close()


def test_a_check_counts_for_no_codec_if_another_is_adopted_meanwhile(tmp_path):
    store, pages = open_store(ram_and_disk(tmp_path), codec="tq3"), NumpyBlocks()
    pages.compute(CHAIN, IDS)
    host = HostBlocks(pages, store, NoStream())
    proof = Proof(None)  # wrong for the one that is checked
    blocks = CheckedBlocks(Device(host), host, store, proof)
    wanted = [Packing(x, IDS[x.first_block : x.end_block]) for x in store.keys.whole(CHAIN)[:1]]
    store.adopt(CodecSet.one(TQ4))
    blocks.pack(wanted, None)
    assert proof.asked.acquire(timeout=20)
    store.adopt(CodecSet.one(TQ3))
    store.adopt(CodecSet.one(TQ4))
    proof.found = new = Device(host)
    proof.may_end.set()
    deadline = time.monotonic() + 20
    while not new.packed and time.monotonic() < deadline:
        blocks.pack(wanted, None)
    assert new.packed
    blocks.close()
    store.close()


def test_a_check_that_failed_is_made_again_but_not_for_ever(tmp_path):
    store, pages = open_store(ram_and_disk(tmp_path), codec="tq3"), NumpyBlocks()
    pages.compute(CHAIN, IDS)
    host = HostBlocks(pages, store, NoStream())
    asked: list[str] = []

    def fails() -> Device:
        asked.append("check")
        raise MemoryError("the device is full")

    blocks = CheckedBlocks(Device(host), host, store, fails)
    wanted = [Packing(x, IDS[x.first_block : x.end_block]) for x in store.keys.whole(CHAIN)[:1]]
    store.adopt(CodecSet.one(TQ4))
    deadline = time.monotonic() + 20
    while len(asked) < MOST_TRIES and time.monotonic() < deadline:
        assert codec_in(blocks.pack(wanted, None)[0].result()) == b"tq4.2"
    for _ in range(3):
        blocks.pack(wanted, None)
    blocks.close()  # waits for a check that is still to come
    assert len(asked) == MOST_TRIES and blocks.why_host == "the device is full"
    store.close()
