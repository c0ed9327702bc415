"""What was stored before there was a codec is packed in idle moments, in both cold stores."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from kvstore.blobs.chain import CHUNK, RECORD, TAIL
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import codec_in
from kvstore.blobs.segments import Lineage
from kvstore.codecs.presets import codec_by_name
from kvstore.session import SessionRef
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.clock import Clock
from tests.contract.store_rig import (
    FORK,
    LONG,
    LONGER,
    MIB,
    Rig,
    SlowRam,
    Store,
    blobs_of,
    history,
    ref,
)
from tests.faulty_tier import FaultyTier
from tests.waiting import until


class SharedRam(RamTier):
    """One that engines share, and that outlives them."""

    name = "redis"

    def close(self) -> None:
        pass


RAW, TQ3, TQ4 = map(codec_by_name, ("raw", "tq3", "tq4"))
PACKED = CodecSet(TQ3, TQ4, TQ4, readable=(RAW,))


def always() -> bool:
    return True


def codecs_in(tier: Tier) -> set[str]:
    blobs = [x for name, x in blobs_of(tier).items() if name[:1] != RECORD]
    return {codec_in(x).decode() for x in blobs}


def is_packed(tiers: list[Tier]) -> bool:
    return [codecs_in(x) for x in tiers] == [{"tq3.2"}, {"tq4.2"}][: len(tiers)]


def is_through(store: Store) -> bool:
    return is_packed(list(store.ledger.stack.tiers)) and not store.stats().repacking.sessions_left


def counted(store: Store, session: SessionRef) -> int:
    """The bytes of the session's blobs, each in the fastest tier that has it."""
    record = store.record(session)
    assert record is not None
    stack, keys = store.ledger.stack, store.ledger.index.blob_keys(record)
    levels = stack.locate(keys).levels
    blobs = [stack.find(x or 0, [key])[0] for key, x in zip(keys, levels, strict=True)]
    return sum(len(x) for x in blobs if x is not None)


def num_back(rig: Rig, store: Store, tokens: list[int], session: SessionRef | None = None) -> int:
    """Tokens of a session that come back; their rows have gone through a codec."""
    if rig.name == "by_tokens":
        match = store.match(session or ref(), ref().salt, tokens, len(tokens))
        return store.load(match).num_tokens
    from tests import block_sessions

    fetched = store.fetch(session or ref(), block_sessions.hashes(tokens), 0)
    for span, blob in fetched.spans:
        run = store.packer.layout.empty(span.num_tokens)
        first = span.first_block * block_sessions.BLOCK
        store.packer.unpack_run(blob, span.key, first, span.num_tokens, run)
    return fetched.end_block * block_sessions.BLOCK


def test_a_session_of_before_gets_the_codec_of_each_tier(rig: Rig, store: Store, tiers: list[Tier]):
    rig.save(store, ref(), LONG)
    before, pinned = [x.stats() for x in tiers], counted(store, ref())
    smaller: list[SessionRef] = []
    store.pack_when(always, smaller.append)
    store.adopt(PACKED)
    until(lambda: is_through(store) and bool(smaller))
    assert store.flush(20)
    assert [(x.tenant, x.id) for x in smaller] == [("t", "s")]
    after, record = [x.stats() for x in tiers], store.record(smaller[0])  # as it is reported
    assert record.packed_bytes == counted(store, ref()) < pinned / 2
    assert record.tail_bytes and record.codecs[:2] == ("tq3.2", "tq4.2")
    for one, other in zip(before, after, strict=True):
        assert other.num_blobs == one.num_blobs and other.nbytes <= one.nbytes  # disks have pages
        assert other.evictions == one.evictions == 0
    assert after[0].nbytes < before[0].nbytes
    report = store.stats().repacking
    assert (report.sessions_left, report.bytes_left, report.sessions_done) == (0, 0, 1)
    assert report.freed_bytes > pinned / 2
    assert store.stats().counters["repacked_blobs"] == 2 * 7
    assert num_back(rig, store, LONG) == 100
    assert store.demote(ref(), "disk") == "disk" and num_back(rig, store, LONG) == 100
    assert store.forget(ref())
    assert not any(blobs_of(x) for x in tiers)


def test_each_blob_is_read_once(rig: Rig):
    """What it takes afterwards is asked for without reading it."""
    tier = FaultyTier(RamTier(64 * MIB))
    store = rig.open([tier])
    rig.save(store, ref(), LONG)
    num_blobs, before = len(blobs_of(tier)) - 1, len(tier.calls)  # all but the record
    smaller: list[SessionRef] = []
    store.pack_when(always, smaller.append)
    store.adopt(PACKED)
    until(lambda: bool(smaller))
    assert tier.calls[before:].count("get_many") == num_blobs
    assert tier.calls[before:].count("lengths") >= 1


def test_what_an_earlier_life_left_is_found_at_the_start(rig: Rig, tmp_path: Path):
    first = rig.open([RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)])
    rig.save(first, ref(), LONG)
    first.close()
    tiers = [RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)]
    store = rig.open(tiers, codecs=PACKED)
    store.pack_when(always)
    until(lambda: codecs_in(tiers[1]) == {"tq4.2"})
    until(lambda: not store.stats().repacking.sessions_left)
    assert store.record(ref()).packed_bytes == counted(store, ref())
    assert num_back(rig, store, LONG) == 100


def test_it_stops_before_the_next_blob_while_a_request_runs(
    rig: Rig, store: Store, tiers: list[Tier]
):
    rig.save(store, ref(), LONG)
    asked, may = [0], threading.Event()

    def is_idle() -> bool:
        """A few times; then not, until ``may``."""
        asked[0] += 1
        return asked[0] <= 5 or may.is_set()

    store.adopt(PACKED)
    store.pack_when(is_idle)
    until(lambda: asked[0] > 7)
    done = store.stats().counters["repacked_blobs"]
    assert 0 < done <= 2 * 5
    report = store.stats().repacking
    assert report.sessions_left == 1 and report.bytes_left > 0
    assert num_back(rig, store, LONG) == 100  # half of it is packed
    rig.save(store, ref(), [*LONG, *history(20, 1)])  # the save is not held up
    assert store.stats().counters["repacked_blobs"] == done
    may.set()
    until(lambda: all(codecs_in(x) <= {"tq3.2", "tq4.2"} for x in tiers))
    assert num_back(rig, store, [*LONG, *history(20, 1)]) == 120


def test_the_oldest_and_largest_come_first(rig: Rig):
    clock, tier = Clock(), RamTier(64 * MIB)
    store = rig.open([tier], clock=clock)
    for name, length in (("old", 100), ("small", 40), ("large", 200)):
        rig.save(store, ref(name), history(length, length))
        clock.now += 3600.0
    order: list[SessionRef] = []
    store.adopt(PACKED)
    store.pack_when(always, order.append)
    until(lambda: is_through(store) and len(order) == 3)
    assert [x.id for x in order] == ["old", "large", "small"]  # 3 h * 100, 1 h * 200, 2 h * 40


def test_sessions_that_share_a_beginning_keep_it(rig: Rig, store: Store, tiers: list[Tier]):
    rig.save(store, ref("a"), LONG)
    rig.save(store, ref("b"), FORK)
    packed: list[SessionRef] = []
    store.adopt(PACKED)
    store.pack_when(always, packed.append)
    until(lambda: is_through(store) and len(packed) == 2)
    for name in ("a", "b"):
        assert store.record(ref(name)).packed_bytes == counted(store, ref(name))
    assert store.forget(ref("a"))
    assert num_back(rig, store, FORK, ref("b")) == 100
    assert store.forget(ref("b"))
    assert not any(blobs_of(x) for x in tiers)


def test_a_session_that_is_deleted_meanwhile_does_not_come_back(
    rig: Rig, store: Store, tiers: list[Tier]
):
    rig.save(store, ref(), LONG)
    gate, asked = threading.Event(), threading.Event()

    def is_idle() -> bool:
        if store.stats().counters.get("repacked_blobs", 0) < 4:
            return True
        asked.set()
        return gate.wait(20)

    store.adopt(PACKED)
    store.pack_when(is_idle)
    assert asked.wait(20)
    assert store.forget(ref())
    gate.set()
    until(lambda: not store.stats().repacking.sessions_left)
    assert store.flush(20)
    assert not any(blobs_of(x) for x in tiers)


def test_what_came_from_a_lossy_copy_is_left_alone(rig: Rig, store: Store):
    """Also where it lies under the name of an exact codec."""
    rig.save(store, ref(), LONG)
    stack = store.ledger.stack
    record = store.record(ref())
    assert record is not None
    key = next(x for x in store.ledger.index.blob_keys(record) if x[:1] == CHUNK)
    run = store.packer.layout.empty(16)
    assert stack.find(0, [key])[0] is not None
    store.packer.unpack_run(stack.find(0, [key])[0] or b"", key, 0, 16, run)
    kept = store.packer.pack_run(key, run, 0, RAW, Lineage(16))
    for level in (0, 1):
        assert stack.replace(level, key, kept)
    store.adopt(PACKED)
    done: list[SessionRef] = []
    store.pack_when(always, done.append)
    until(lambda: bool(done))
    assert [stack.find(level, [key])[0] for level in (0, 1)] == [kept, kept]
    assert store.stats().counters["repacked_blobs"] == 2 * 6
    assert num_back(rig, store, LONG) == 100


def test_a_session_that_went_on_elsewhere_stays_as_it_was_left_there(rig: Rig):
    clock, shared = Clock(), SharedRam(64 * MIB)
    here = rig.open([RamTier(64 * MIB), shared], clock=clock)
    there = rig.open([RamTier(64 * MIB), shared], clock=clock)
    rig.save(here, ref(), LONG)
    rig.save(here, ref("other"), history(40, 3))
    clock.now += 60
    rig.save(there, ref(), LONGER)
    done: list[SessionRef] = []
    here.adopt(PACKED)
    here.pack_when(always, done.append)
    until(lambda: bool(done))
    assert {x.id for x in done} == {"other"}
    assert here.flush(20)
    assert here.ledger.index.find_shared("t", "s").num_tokens == len(LONGER)
    here.close(), there.close()


def test_a_copy_whose_exchange_was_cut_short_is_removed(rig: Rig):
    """As after a kill between the two steps of a tier that knows no exchange."""
    tier = SlowRam(64 * MIB)
    store = rig.open([tier])
    rig.save(store, ref(), LONG)
    raw = {name: x for name, x in blobs_of(tier).items() if name[:1] == CHUNK}
    store.adopt(PACKED)
    done: list[SessionRef] = []
    store.pack_when(always, done.append)
    until(lambda: bool(done))
    assert codecs_in(tier) == {"tq4.2"}
    assert tier.put_many(list(raw.items())) == 6
    store.adopt(PACKED)  # another look
    until(lambda: codecs_in(tier) == {"tq4.2"})
    assert num_back(rig, store, LONG) == 100


@pytest.mark.parametrize("pinned", [False, True])
def test_a_full_tier_loses_nothing_by_it(rig: Rig, pinned: bool):
    tier = RamTier(64 * MIB)
    store = rig.open([tier])
    rig.save(store, ref(), LONG)
    room = tier.stats().nbytes
    store.close()
    tier = RamTier(int(room * 2.1))
    store = rig.open([tier])
    rig.save(store, ref("a"), LONG)
    rig.save(store, ref("b"), history(100, 9))
    if pinned:
        store.pin(ref("a"), True)
    store.adopt(PACKED)
    done: list[SessionRef] = []
    store.pack_when(always, done.append)
    until(lambda: len(done) == 2)
    assert tier.stats().evictions == 0
    assert num_back(rig, store, LONG, ref("a")) == 100
    assert num_back(rig, store, history(100, 9), ref("b")) == 100
    if pinned:
        for i in range(20):
            rig.save(store, ref(f"more{i}"), history(200, 20 + i))
        assert tier.stats().evictions and num_back(rig, store, LONG, ref("a")) == 100


def test_tails_that_an_older_release_left_unpacked_are_served_and_packed(
    rig: Rig, store: Store, tiers: list[Tier]
):
    """They lie under the lossy codec's own name, in 16 bits, and their record says less."""
    store.adopt(PACKED)
    rig.save(store, ref(), LONG)
    stack, record = store.ledger.stack, store.record(ref())
    assert record is not None
    key = next(x for x in store.ledger.index.blob_keys(record) if x[:1] == TAIL)
    run = store.packer.layout.empty(4)
    blob = stack.find(0, [key])[0]
    assert blob is not None
    store.packer.unpack_run(blob, key, 96, 4, run)
    rows = store.packer._seal_rows(store.packer._whole(exact=False), key, run, 96)
    for level in (0, 1):
        stack.delete(level, [key])
        assert stack.put(level, [(key, rows)])
    with store.ledger.claims.claim(store.ledger.record_key(ref())):
        store.ledger.committer.replace(msgspec.structs.replace(record, tail_bytes=None))
    assert store.flush(20)
    assert num_back(rig, store, LONG) == 100
    done: list[SessionRef] = []
    store.pack_when(always, done.append)
    until(lambda: bool(done))
    assert store.flush(20)
    assert all(codecs_in(x) <= {"tq3.2", "tq4.2"} for x in tiers)
    assert num_back(rig, store, LONG) == 100
    assert store.record(ref()).packed_bytes == counted(store, ref())
