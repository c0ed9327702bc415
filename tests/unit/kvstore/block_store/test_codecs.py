"""Several codecs in the store of an engine that packs by itself."""

from __future__ import annotations

import pytest

from kvstore.blobs.chain import CHUNK
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import codec_in
from kvstore.codecs.presets import codec_by_name
from kvstore.tiers.ram_tier import RamTier
from tests.blob_names import named
from tests.block_sessions import (
    PER_CHUNK,
    check_rows,
    hashes,
    pack,
    ram_and_disk,
    ref,
    save,
)

LONG = hashes(list(range(100)))  # 6 chunks and a tail of one block
LONGER = hashes(list(range(140)))
RAW, TQ3, TQ4 = map(codec_by_name, ("raw", "tq3", "tq4"))


def codecs_in(store, place: int) -> list[str]:
    return sorted(codec_in(blob).decode() for _, blob in store.ledger.stack.scan(place, CHUNK))


def test_slower_tiers_get_blobs_that_are_packed_for_them(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path), codecs=CodecSet(TQ3, TQ4, RAW))
    assert [x.id for x in store.save_codecs] == ["tq3.2", "tq4.2"]
    fresh = {x.key: pack(store, LONG, x) for x in store.missing(LONG)}
    asked: list[str] = []

    def again(codec):
        asked.append(codec.id)
        assert codecs_in(store, 0) == ["tq3.2"] * 6  # that is where it can be had already
        return {x.key: pack(store, LONG, x, codec=codec) for x in store.keys.whole(LONG)}

    assert store.commit(ref(), LONG, fresh, again=again)
    assert store.flush(10)
    assert asked == ["tq4.2"]
    assert (codecs_in(store, 0), codecs_in(store, 1)) == (["tq3.2"] * 6, ["tq4.2"] * 6)
    assert store.stats().codecs == {"ram": "tq3.2", "disk": "tq4.2"}
    assert store.commit(ref(), LONG, {}, again=again)  # nothing new, nothing asked
    assert asked == ["tq4.2"]
    assert store.forget(ref())
    assert not any(store.ledger.stack.scan(0, b"")) and not any(store.ledger.stack.scan(1, b""))


def test_without_that_they_get_copies(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path), codecs=CodecSet(TQ3, TQ4, RAW))
    save(store, ref(), LONG)
    assert store.flush(10)
    assert codecs_in(store, 1) == ["tq3.2"] * 6
    assert store.demote(ref(), "disk") == "disk"
    assert store.fetch(ref(), LONG, 0).end_block == 25


def test_another_codec_is_adopted_and_the_old_one_read(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path))
    save(store, ref(), LONG)
    store.adopt(CodecSet.one(TQ3))
    assert [x.first_block for x in store.missing(LONGER)] == [24, 28, 32]
    save(store, ref(), LONGER)
    assert codecs_in(store, 0) == ["raw.1"] * 6 + ["tq3.2"] * 2
    fetched = store.fetch(ref(), LONGER, 0)
    assert (fetched.end_block, fetched.reason) == (35, None)
    check_rows(store, LONG, store.fetch(ref(), LONG[:24], 0))
    record = store.record(ref())
    assert record.codecs == ("tq3.2", "raw.1")
    blobs = [store.ledger.stack.find(0, [x])[0] for x in store.ledger.index.blob_keys(record)]
    assert record.packed_bytes == sum(map(len, blobs))


@pytest.mark.parametrize("keep", [True, False])
def test_an_old_codec_is_read_only_if_it_is_kept(tmp_path, keep, opened):
    store = opened(ram_and_disk(tmp_path), codecs=CodecSet.one(TQ3))
    save(store, ref(), LONG)
    store.adopt(CodecSet.one(TQ4), keep=keep)
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.reason) == ((25, None) if keep else (0, "fingerprint"))
    assert len(store.records()) == keep
    assert len(store.missing(LONG)) == (0 if keep else 7)
    assert store.forget(ref())
    assert not any(store.ledger.stack.scan(0, b"")) and not any(store.ledger.stack.scan(1, b""))


def test_after_a_restart_with_another_codec_it_is_no_error(tmp_path, opened):
    store = opened(ram_and_disk(tmp_path), codecs=CodecSet.one(TQ3))
    save(store, ref(), LONG)
    store.close()
    store = opened(ram_and_disk(tmp_path), codecs=CodecSet.one(TQ4))
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.spans, fetched.reason) == ([], "fingerprint")
    assert store.forget(ref())
    assert not any(store.ledger.stack.scan(1, b""))


def test_a_blob_in_an_unknown_codec_is_a_miss_and_no_error(opened):
    theirs = opened([RamTier(1 << 26)], codecs=CodecSet.one(TQ4))
    store = opened([RamTier(1 << 26)], codecs=CodecSet.one(TQ3))
    save(store, ref(), LONG)
    span = store.keys.whole(LONG)[2]
    name = named(span.key, TQ3.id)
    store.ledger.stack.tiers[0].replace(name, pack(theirs, LONG, span))
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.reason) == (2 * PER_CHUNK, "fingerprint")
    assert store.missing(LONG)[0].first_block == 8  # it does not keep ours out
    assert store.counters.as_dict().get("corrupt", 0) == 0
