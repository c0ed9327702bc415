"""Where a rank has its sessions, as real stores hold them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engines.vllm_plugin.messages import RankRests
from engines.vllm_plugin.worker.resting_watch import SWEEP_S, RestingWatch
from kvstore.errors import Corrupt
from kvstore.store.block_store import BlockStore
from kvstore.store.records import BlockRecord, decode_record, encode_record
from kvstore.tiers.disk.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import BLOCK, hashes, open_store, pack, ref, save

TOKENS = list(range(100))
CHAIN = hashes(TOKENS)  # 25 blocks: six chunks and a tail
ALL = ((0, 25),)


class Rank:
    def __init__(self, folder: Path, ram_bytes: int = 1 << 26) -> None:
        self.now = [0.0]
        self.news: list[RankRests] = []
        self.store: BlockStore = open_store([RamTier(ram_bytes), DiskTier(folder, 1 << 26)])
        self.watch = RestingWatch(self.store, 0, self.news.append, lambda: self.now[0])

    def look(self) -> list[RankRests]:
        self.now[0] += 2 * SWEEP_S
        self.watch.look()
        return self.take()

    def take(self) -> list[RankRests]:
        news, self.news[:] = list(self.news), []
        return news


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.store.close()


def where(news: list[RankRests]) -> list[tuple]:
    return [(x.session.id, x.ram, x.storage) for x in news]


def test_a_save_is_reported_at_once_and_the_disk_when_it_has_it(rank):
    save(rank.store, ref(), CHAIN)
    rank.watch.look_at(ref())
    (first, *_) = rank.take()
    assert (first.ram, first.hashes) == (ALL, b"".join(CHAIN))
    assert rank.store.flush(10)
    rank.look()
    rank.watch.look_at(ref())
    rank.take()
    assert rank.store.resting(ref())[1].storage == ALL
    assert rank.look() == []


def test_blocks_that_a_slower_tier_takes_later_are_seen_without_another_call(tmp_path):
    rank = Rank(tmp_path)
    save(rank.store, ref(), CHAIN)
    rank.watch.look_at(ref())
    assert rank.store.flush(10)
    reports = rank.take() + rank.look()
    assert where(reports)[-1] == ("s", ALL, ALL)
    rank.store.close()


def test_verbs_are_reported(rank):
    save(rank.store, ref(), CHAIN)
    assert rank.store.flush(10)
    rank.look()
    rank.take()
    rank.store.demote(ref(), "disk")
    rank.watch.look_at(ref())
    assert where(rank.take()) == [("s", (), ALL)]
    rank.store.forget(ref())
    rank.watch.look_at(ref())
    assert where(rank.take()) == [("s", (), ())]
    assert rank.look() == []


def test_evictions_are_found_by_looking_through_all_sessions(tmp_path):
    rank = Rank(tmp_path, ram_bytes=200_000)
    for i in range(4):
        save(rank.store, ref(f"s{i}"), hashes([i * 1000 + x for x in TOKENS]))
        assert rank.store.flush(10)
        rank.watch.look_at(ref(f"s{i}"))
    reports: dict[str, RankRests] = {x.session.id: x for x in rank.take() + rank.look()}
    for name, news in reports.items():
        _, resting = rank.store.resting(ref(name))
        assert (news.ram, news.storage) == (resting.ram, resting.storage)
        assert news.storage == ALL
    assert reports["s0"].ram != ALL
    rank.store.close()


def test_after_a_restart_the_inventory_is_reported_with_its_tokens(tmp_path):
    ids = struct.pack(f"<{len(TOKENS)}I", *TOKENS)
    rank = Rank(tmp_path)
    fresh = {x.key: pack(rank.store, CHAIN, x) for x in rank.store.missing(CHAIN)}
    rank.store.commit(ref(), CHAIN, fresh, ids=ids)
    save(rank.store, ref("without"), hashes([7, *TOKENS]))
    rank.store.close()
    again = Rank(tmp_path)
    news = {x.session.id: x for x in again.look()}
    assert (news["s"].ram, news["s"].storage, news["s"].ids) == ((), ALL, ids)
    assert (news["without"].storage, news["without"].ids) == (ALL, b"")
    assert again.look() == []
    again.watch.start_over()
    assert {x.session.id for x in again.look()} == {"s", "without"}
    # A turn that is saved without ids keeps those of the blocks that are still the same.
    again.store.commit(ref(), CHAIN[:10] + hashes([9] * 60), {}, ids=b"")
    record, _ = again.store.resting(ref())
    assert record.ids == ids[: 10 * BLOCK * 4]
    again.store.close()


def test_of_a_model_with_states_blocks_count_up_to_a_stored_state():
    store = open_store(has_state=True)
    save(store, ref(), CHAIN)
    assert store.resting(ref())[1].ram == ()
    store.close()


def test_records_of_earlier_releases_are_read_and_odd_ones_are_not(rank):
    save(rank.store, ref(), CHAIN)
    record, _ = rank.store.resting(ref())
    fields = msgspec.msgpack.decode(encode_record(record))
    del fields["ids"]
    assert decode_record(memoryview(msgspec.msgpack.encode(fields)), BlockRecord).ids == b""
    for ids in (b"123", bytes(4 * BLOCK * 26)):
        odd = msgspec.structs.replace(record, ids=ids)
        with pytest.raises(Corrupt):
            decode_record(memoryview(encode_record(odd)), BlockRecord)
