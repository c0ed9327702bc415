"""The tokens after a session's last full block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blobs.chain import PART
from kvstore.errors import Corrupt
from kvstore.store.block_keys import BlockKeys
from kvstore.store.block_store import BlockStore, Fetched
from kvstore.store.records import BlockRecord, decode_record, encode_record
from kvstore.tiers.ram_tier import RamTier
from tests.blob_names import named
from tests.block_sessions import (
    BLOCK,
    FINGERPRINT,
    LAYOUT,
    hashes,
    ram_and_disk,
    ref,
    rows_behind,
    save,
)

LONG = hashes(list(range(100)))  # 25 blocks: 6 chunks and a tail of one
AFTER = (100, 101, 102)


def check_part(store: BlockStore, fetched: Fetched, taken: int, codec: str = "raw") -> None:
    """The last blob holds the rows of its first ``taken`` tokens."""
    span, blob = fetched.spans[-1]
    assert (span.key[:1], span.first_block, span.num_tokens) == (PART, 25, 3)
    run = LAYOUT.empty(taken)
    store.packer.unpack_run(blob, span.key, 25 * BLOCK, 3, run)
    for found, wanted in zip(run, rows_behind(LONG, AFTER[:taken]), strict=True):
        for a, b in zip(found, wanted, strict=True):
            error = float(np.square(a - b).mean() / np.square(b).mean())
            assert error == 0 if codec == "raw" else 0.01 < error < 0.06


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_it_comes_back_after_all_blocks(store, taken):
    save(store, ref(), LONG, AFTER)
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.part, fetched.reason) == (25, AFTER, None)
    check_part(store, fetched, taken)


def test_under_a_lossy_codec_it_is_packed_like_a_chunk(opened):
    store = opened(codec="tq3")
    save(store, ref(), LONG, AFTER)
    fetched = store.fetch(ref(), LONG, 0)
    check_part(store, fetched, 3, "tq3")
    assert len(fetched.spans[-1][1].payload) * 4 < 3 * LAYOUT.bytes_per_token


def test_it_alone_comes_back_to_an_engine_that_has_all_blocks(store):
    save(store, ref(), LONG, AFTER)
    fetched = store.fetch(ref(), LONG, 25)
    assert (fetched.end_block, fetched.part, fetched.tier) == (25, AFTER, "ram")
    assert [x.is_part for x, _ in fetched.spans] == [True]


@pytest.mark.parametrize("first", [0, 20, 25, 26])
def test_only_after_the_sessions_own_blocks(store, first):
    """Also if the prompt has as many blocks, or the engine has more of them."""
    save(store, ref(), LONG, AFTER)
    other = hashes([*range(90), *range(900, 920)])
    assert store.fetch(ref(), other, min(first, 22)).part == ()
    longer = hashes(list(range(120)))
    assert store.fetch(ref(), longer, first).part == (AFTER if first <= 25 else ())
    assert store.fetch(ref(), LONG[:24], min(first, 23)).part == ()


def test_another_tenant_or_session_gets_none(store):
    save(store, ref(), LONG, AFTER)
    assert store.fetch(ref("other"), LONG, 0).part == ()
    assert store.fetch(ref(), hashes(list(range(100)), "salt"), 0).spans == []
    keys = [store.keys.part(hashes(list(range(100)), x), AFTER).key for x in ("", "a", "b")]
    assert len(set(keys)) == 3


def test_later_tokens_replace_it(store):
    save(store, ref(), LONG, AFTER)
    before = store.keys.part(LONG, AFTER).key
    longer = hashes(list(range(108)))
    new = save(store, ref(), longer, (108,))
    assert [x.is_part for x in new] == [False, True]
    assert store.missing(LONG, part=AFTER)[-1].key == before
    assert store.fetch(ref(), longer, 0).part == (108,)
    save(store, ref(), longer)
    assert store.fetch(ref(), longer, 0).part == ()
    assert store.record(ref()).num_tokens == 108


def test_it_counts_as_tokens_and_bytes(store):
    save(store, ref("without"), LONG)
    save(store, ref(), LONG, AFTER)
    without, record = store.record(ref("without")), store.record(ref())
    assert (without.num_tokens, record.num_tokens) == (100, 103)
    assert record.packed_bytes - without.packed_bytes == store.packer.run_nbytes(100, 3)
    assert [x.is_part for x in store.unlisted(LONG, part=(7,))] == [True]
    assert store.unlisted(LONG, part=AFTER) == []


def test_it_is_evicted_first_and_missed(opened):
    tier = RamTier(1 << 26)
    store = opened([tier])
    save(store, ref(), LONG, AFTER)
    tier.delete_many([named(store.keys.part(LONG, AFTER).key)])
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.part, fetched.reason) == (25, (), "evicted")
    save(store, ref(), LONG, AFTER)
    tier.delete_many([named(store.keys.chunks(LONG)[3].key)])
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.part) == (12, ())


def test_a_damaged_one_costs_its_own_tokens(opened):
    tier = RamTier(1 << 26)
    store = opened([tier])
    save(store, ref(), LONG, AFTER)
    key = named(store.keys.part(LONG, AFTER).key)
    blob = bytearray(tier.get_many([key])[0])
    blob[-1] ^= 1
    tier.delete_many([key])
    tier.put_many([(key, bytes(blob))])
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.end_block, fetched.part, fetched.reason) == (25, (), "corrupt")
    assert not any(x.is_part for x, _ in fetched.spans)


def test_it_survives_a_restart_and_is_forgotten(tmp_path: Path, opened):
    store = opened(ram_and_disk(tmp_path))
    save(store, ref(), LONG, AFTER)
    store.close()
    store = opened(ram_and_disk(tmp_path))
    fetched = store.fetch(ref(), LONG, 0)
    assert (fetched.part, fetched.tier) == (AFTER, "disk")
    check_part(store, fetched, 3)
    store.forget(ref())
    assert len(store.missing(LONG, part=AFTER)) == 8


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), st.data())
def test_other_tokens_have_another_name(tokens, data):
    other = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6))
    keys = BlockKeys(FINGERPRINT, BLOCK, 4)
    names = keys.part(LONG, tokens).key, keys.part(LONG, other).key
    assert (names[0] == names[1]) == (tokens == other)
    assert keys.part(LONG[:24], tokens).key != names[0]


@pytest.mark.parametrize("part", [(-1,), (1 << 32,), (1, 2, 3, 4)])
def test_a_record_whose_part_cannot_be_is_refused(part):
    record = BlockRecord(
        tenant="t", id="s", hashes=LONG[0], block_tokens=BLOCK, last_used_s=0.0, part=part
    )
    with pytest.raises(Corrupt):
        decode_record(memoryview(encode_record(record)), BlockRecord)


def test_a_part_of_no_block_is_refused():
    record = BlockRecord(
        tenant="t", id="s", hashes=b"", block_tokens=BLOCK, last_used_s=0.0, part=(1,)
    )
    with pytest.raises(Corrupt):
        decode_record(memoryview(encode_record(record)), BlockRecord)
