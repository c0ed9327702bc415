"""The worker side with lossy codecs: one for each tier, and no lossy copy packed again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engines.vllm_plugin.blocks.blocks import RestoredBlocks
from engines.vllm_plugin.blocks.host_blocks import HostBlocks
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.rank import StagingArea
from engines.vllm_plugin.worker.transfer import Transfer
from kvstore.blobs.chain import CHUNK, PART, TAIL
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import codec_in
from kvstore.codecs.presets import codec_by_name
from kvstore.session import SessionRef
from kvstore.store.block_store import RestoredPart
from kvstore.store.spans import Span
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


def rows_in(rank: Rank, tier: int, span: Span) -> np.ndarray:
    """K of the first layer in the tier's blob."""
    ((_, blob),) = rank.tiers[tier].scan(span.key)
    num_tokens = span.num_tokens
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
