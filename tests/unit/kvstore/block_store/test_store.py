"""The cold store of an engine that hashes its own blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.session import SessionRef
from kvstore.store.records import common_blocks
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.block_sessions import (
    BLOCK,
    check_rows,
    hashes,
    open_store,
    ref,
    save,
)
from tests.faulty_tier import FaultyTier

LONG = hashes(list(range(100)))  # 25 blocks: 6 chunks and a tail of one


def test_blocks_that_the_engine_still_has_are_not_read(store):
    save(store, ref(), LONG)
    fetched = store.fetch(ref(), LONG, 10)
    assert fetched.end_block == 25
    assert fetched.spans[0][0].first_block == 8  # the chunk that block 10 is in
    assert store.fetch(ref(), LONG, 25).spans == []


def test_only_new_blobs_are_asked_for(store):
    assert len(save(store, ref(), LONG)) == 7
    longer = hashes(list(range(140)))
    new = save(store, ref(), longer)
    assert [x.first_block for x in new] == [24, 28, 32]
    assert store.missing(longer) == []


def test_blocks_of_no_known_session_are_found_without_asking_a_tier(store):
    assert [x.first_block for x in store.unlisted(LONG)] == [0, 4, 8, 12, 16, 20, 24]
    save(store, ref(), LONG)
    assert store.unlisted(LONG) == []
    assert [x.first_block for x in store.unlisted(hashes(list(range(140))))] == [24, 28, 32]
    fork = hashes([*range(50), *range(900, 950)])
    assert [x.first_block for x in store.unlisted(fork)] == [12, 16, 20, 24]
    assert [x.is_state for x in store.unlisted(LONG, [8])] == [True]
    store.forget(ref())
    assert len(store.unlisted(LONG)) == 7


def test_a_session_that_no_tier_takes_is_not_saved(opened):
    full = FaultyTier(RamTier(1 << 26))
    store = opened([full])
    save(store, ref(), LONG[:20])
    full.fails = lambda number, method: True
    longer = store.missing(LONG)
    assert store.commit(ref(), LONG, {x.key: b"" for x in longer}) is None
    full.fails = lambda number, method: False
    assert store.record(ref()).num_tokens == 80  # unchanged
    counters = store.counters.as_dict()
    assert (counters["saves"], counters["saves_failed"]) == (1, 1)
    assert store.fetch(ref(), LONG, 0).end_block == 20


def test_a_slower_tier_may_still_take_it(tmp_path, opened):
    full = FaultyTier(RamTier(1 << 26))
    store = opened([full, DiskTier(tmp_path, 1 << 26)])
    full.fails = lambda number, method: method in {"put_many", "replace"}
    save(store, ref(), LONG)
    assert store.flush(10)
    assert store.tier_of(store.record(ref())) == "disk"
    assert store.counters.as_dict()["saves"] == 1


def test_a_tail_that_grew_is_deleted(store):
    old_tail = save(store, ref(), LONG)[-1]
    assert old_tail.is_tail
    save(store, ref(), hashes(list(range(140))))
    assert store.fetch(None, LONG, 24).end_block == 24


def test_a_tail_that_another_session_needs_stays(store):
    save(store, ref("a"), LONG)
    save(store, ref("b"), LONG)
    save(store, ref("a"), hashes(list(range(140))))
    assert store.fetch(ref("b"), LONG, 0).end_block == 25


def test_a_prompt_that_leaves_the_session_is_matched_block_by_block(store):
    save(store, ref(), LONG)
    prompt = hashes([*range(42), *range(900, 960)])
    fetched = store.fetch(ref(), prompt, 0)
    assert (fetched.end_block, fetched.reason) == (10, "diverged")
    check_rows(store, prompt, fetched)


def test_another_session_finds_shared_chunks_by_content(store):
    save(store, ref("a"), LONG)
    prompt = hashes([*range(42), *range(900, 960)])
    fetched = store.fetch(ref("b"), prompt, 0)
    assert (fetched.end_block, fetched.reason) == (8, "never-stored")
    check_rows(store, prompt, fetched)


def test_another_salt_finds_nothing(store):
    save(store, ref(), LONG)
    assert store.fetch(ref(), hashes(list(range(100)), "other"), 0).spans == []


def test_another_model_finds_nothing():
    tier = RamTier(1 << 26)
    with_one = open_store([tier])
    save(with_one, ref(), LONG)
    other = open_store([tier], fingerprint="e" * 64)
    assert other.fetch(ref(), LONG, 0).spans == []
    assert other.records() == []


def test_a_lossy_codec_keeps_the_tail_in_16_bits(opened):
    store = opened(codec="tq3")
    save(store, ref(), LONG)
    record = store.record(ref())
    assert record.packed_bytes < 100 * store.packer.layout.bytes_per_token / 4
    assert store.fetch(ref(), LONG, 0).end_block == 25


def test_ids_of_any_kind_are_sessions(store):
    odd = SessionRef("", "/\0\uffff" + "x" * 5000, b"")
    save(store, odd, LONG)
    assert store.fetch(odd, LONG, 0).end_block == 25


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=0, max_size=70),
    st.lists(st.integers(0, 2), min_size=0, max_size=70),
    st.integers(0, 12),
)
def test_all_fetched_blocks_belong_to_the_prompt(stored, prompt, first):
    store = open_store()
    save(store, ref(), hashes(stored)) if len(stored) >= BLOCK else None
    wanted = hashes(prompt)
    first = min(first, len(wanted))
    fetched = store.fetch(ref(), wanted, first)
    assert first <= fetched.end_block <= len(wanted)
    assert fetched.end_block == max(common_blocks(hashes(stored), wanted), first)
    check_rows(store, wanted, fetched)
    store.close()


@settings(max_examples=60)
@given(
    stored=st.integers(0, 40),
    common=st.integers(0, 40),
    asked=st.integers(1, 40),
    first=st.integers(0, 12),
    named=st.booleans(),
)
def test_a_peek_says_how_far_a_fetch_comes(stored, common, asked, first, named):
    store = open_store()
    if stored:
        save(store, ref(), hashes(list(range(stored * BLOCK))))
    prompt = hashes([*range(common * BLOCK), *range(1000, 1000 + asked * BLOCK)])
    session = ref() if named else ref("other")
    end, reason = store.peek(session, prompt, first)
    fetched = store.fetch(session, prompt, first)
    assert (end, reason) == (fetched.end_block, fetched.reason)
    store.close()


def test_a_peek_reads_nothing(opened):
    ram = FaultyTier(RamTier(1 << 30))
    store = opened([ram])
    save(store, ref(), LONG)
    ram.calls.clear()
    assert store.peek(ref(), LONG, 3) == (25, None)
    assert store.peek(None, hashes(list(range(500, 600))), 0) == (0, "never-stored")
    assert "get_many" not in ram.calls
