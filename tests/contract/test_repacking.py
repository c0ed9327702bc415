"""What was stored before there was a codec is packed in idle moments."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.blobs.chain import CHUNK, RECORD
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import RAW, StoreCodecs
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
    Store,
    blobs_of,
    history,
    ref,
)
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import RenamedRam, SharedRam, chain_of
from tests.waiting import until

TQ3, TQ4 = map(codec_by_name, ("tq3", "tq4"))
PACKED = StoreCodecs(TQ3, readable=(RAW, TQ4))


def always() -> bool:
    return True


def codecs_in(tier: Tier) -> set[str]:
    blobs = [x for name, x in blobs_of(tier).items() if name[:1] != RECORD]
    return {codec_in(x).decode() for x in blobs}


def is_packed(tiers: Sequence[Tier]) -> bool:
    return all(codecs_in(x) == {"tq3.2"} for x in tiers)


def is_through(store: Store) -> bool:
    return is_packed(store.ledger.stack.tiers) and not store.stats().repacking.sessions_left


def reports_of(store: Store) -> list[SessionRef]:
    """A list to which each session is added that was packed again."""
    done: list[SessionRef] = []
    store.listen(lambda notice: done.append(notice.session) if notice.why == "packed" else None)
    return done


def packed(store: Store, num_sessions: int = 1) -> list[SessionRef]:
    """Adopt a codec, and wait until so many sessions were packed again."""
    done = reports_of(store)
    store.adopt(PACKED)
    store.pack_when(always)
    until(lambda: len(done) == num_sessions)
    return done


def counted(store: Store, session: SessionRef) -> int:
    """The bytes of the session's blobs, each in the fastest tier that has it."""
    record = store.record(session)
    assert record is not None
    stack, keys = store.ledger.stack, store.ledger.index.blob_keys(record)
    levels = stack.locate(keys).levels
    blobs = [stack.find(x or 0, [key])[0] for key, x in zip(keys, levels, strict=True)]
    return sum(len(x) for x in blobs if x is not None)


def num_back(store: Store, tokens: list[int], session: SessionRef | None = None) -> int:
    """Tokens of a session that come back; their rows have gone through a codec."""
    session = session or ref()
    return store.restore(store.match(session, chain_of(store, session, tokens))).num_tokens


def test_a_session_of_before_is_packed_in_every_tier(rig: Rig, store: Store, tiers: list[Tier]):
    rig.save(store, ref(), LONG)
    before, pinned = [x.stats() for x in tiers], counted(store, ref())
    smaller = reports_of(store)
    store.pack_when(always)
    store.adopt(PACKED)
    until(lambda: is_through(store) and bool(smaller))
    assert store.flush(200)
    assert [(x.tenant, x.id) for x in smaller] == [("t", "s")]
    after, record = [x.stats() for x in tiers], store.record(smaller[0])  # as it is reported
    assert record.packed_bytes == counted(store, ref()) < pinned / 2
    for one, other in zip(before, after, strict=True):
        assert other.num_blobs == one.num_blobs and other.nbytes <= one.nbytes  # disks have pages
        assert other.evictions == one.evictions == 0
    assert after[0].nbytes < before[0].nbytes
    report = store.stats().repacking
    assert (report.sessions_left, report.bytes_left, report.sessions_done) == (0, 0, 1)
    assert report.freed_bytes > pinned / 2
    assert store.stats().counters["repacked_blobs"] == 2 * 6
    assert num_back(store, LONG) == 96
    assert store.demote(ref(), "disk") == "disk" and num_back(store, LONG) == 96
    assert store.forget(ref())
    assert not any(blobs_of(x) for x in tiers)


def test_each_blob_is_read_once(rig: Rig):
    """What it takes afterwards is asked for without reading it."""
    tier = FaultyTier(RamTier(64 * MIB))
    store = rig.open([tier])
    rig.save(store, ref(), LONG)
    num_blobs, before = len(blobs_of(tier)) - 1, len(tier.calls)  # all but the record
    packed(store)
    assert tier.calls[before:].count("get_many") == num_blobs
    assert tier.calls[before:].count("lengths") >= 1


def test_what_an_earlier_life_left_is_found_at_the_start(rig: Rig, tmp_path: Path):
    first = rig.open([RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)])
    rig.save(first, ref(), LONG)
    first.close()
    tiers = [RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)]
    store = rig.open(tiers, codecs=PACKED)
    store.pack_when(always)
    until(lambda: codecs_in(tiers[1]) == {"tq3.2"})
    until(lambda: not store.stats().repacking.sessions_left)
    assert store.record(ref()).packed_bytes == counted(store, ref())
    assert num_back(store, LONG) == 96


def test_it_stops_before_the_next_blob_while_a_request_runs(rig, store, tiers):
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
    assert num_back(store, LONG) == 96  # half of it is packed
    rig.save(store, ref(), [*LONG, *history(20, 1)])  # the save is not held up
    assert store.stats().counters["repacked_blobs"] == done
    may.set()
    until(lambda: is_packed(tiers))
    assert num_back(store, [*LONG, *history(20, 1)]) == 112


def test_the_longest_unused_come_first(rig: Rig):
    clock, tier = Clock(), RamTier(64 * MIB)
    store = rig.open([tier], clock=clock)
    for name, length in (("old", 100), ("small", 40), ("large", 200)):
        rig.save(store, ref(name), history(length, length))
        clock.now += 3600.0
    assert [x.id for x in packed(store, 3)] == ["old", "small", "large"]
    until(lambda: is_through(store))


def test_sessions_that_share_a_beginning_keep_it(rig: Rig, store: Store, tiers: list[Tier]):
    rig.save(store, ref("a"), LONG)
    rig.save(store, ref("b"), FORK)
    packed(store, 2)
    until(lambda: is_through(store))
    for name in ("a", "b"):
        assert store.record(ref(name)).packed_bytes == counted(store, ref(name))
    assert store.forget(ref("a"))
    assert num_back(store, FORK, ref("b")) == 96
    assert store.forget(ref("b"))
    assert not any(blobs_of(x) for x in tiers)


def test_a_session_that_is_deleted_meanwhile_does_not_come_back(rig, store, tiers):
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
    assert store.flush(200)
    assert not any(blobs_of(x) for x in tiers)


def test_what_was_packed_before_is_left_alone(rig: Rig, store: Store):
    """A second codec would add its error to that of the first."""
    store.adopt(StoreCodecs(TQ4, readable=(RAW,)))
    rig.save(store, ref(), LONG[:32])
    assert store.flush(120)  # a codec that is loaded on a busy machine takes longer than a save
    store.adopt(StoreCodecs(RAW, readable=(TQ4,)))
    rig.save(store, ref(), LONG)
    stack = store.ledger.stack
    keys = [x.key for x in store.keys.chunks(chain_of(store, ref(), LONG))]
    kept = stack.find(0, keys[:2])
    packed(store)
    assert [stack.find(level, keys[:2]) for level in (0, 1)] == [kept, kept]
    assert [codec_in(x or b"") for x in stack.find(0, keys)] == [b"tq4.2"] * 2 + [b"tq3.2"] * 4
    assert store.stats().counters["repacked_blobs"] == 2 * 4
    assert num_back(store, LONG) == 96


def test_a_session_that_went_on_elsewhere_stays_as_it_was_left_there(rig: Rig):
    clock, shared = Clock(), SharedRam(64 * MIB)
    here = rig.open([RamTier(64 * MIB), shared], clock=clock)
    there = rig.open([RamTier(64 * MIB), shared], clock=clock)
    rig.save(here, ref(), LONG)
    rig.save(here, ref("other"), history(40, 3))
    clock.now += 60
    rig.save(there, ref(), LONGER)
    assert {x.id for x in packed(here)} == {"other"}
    assert here.flush(200)
    index = here.ledger.index
    assert index.find_shared(index.key_of(ref())).num_tokens == len(LONGER) // 16 * 16
    here.close(), there.close()


def test_a_copy_whose_exchange_was_cut_short_is_removed(rig: Rig):
    """As after a kill between the two steps of a tier that knows no exchange."""
    tier = RenamedRam(64 * MIB)
    store = rig.open([tier])
    rig.save(store, ref(), LONG)
    raw = {name: x for name, x in blobs_of(tier).items() if name[:1] == CHUNK}
    packed(store)
    assert codecs_in(tier) == {"tq3.2"}
    assert tier.put_many(list(raw.items())) == 6
    store.adopt(PACKED)  # another look
    until(lambda: codecs_in(tier) == {"tq3.2"})
    assert num_back(store, LONG) == 96


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
    packed(store, 2)
    assert tier.stats().evictions == 0
    assert num_back(store, LONG, ref("a")) == 96
    assert num_back(store, history(100, 9), ref("b")) == 96
    if pinned:
        for i in range(20):
            rig.save(store, ref(f"more{i}"), history(200, 20 + i))
        assert tier.stats().evictions and num_back(store, LONG, ref("a")) == 96
