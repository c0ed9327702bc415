"""How much of a prompt comes back, from whose chunks, and the reason where it is less."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.ram_tier import RamTier
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    CHUNK,
    chain_of,
    come_back,
    disk,
    kv_of,
    open_store,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(100)
WHOLE = 96


@pytest.fixture
def store(opened):
    return opened([ram()])


@pytest.mark.parametrize("limit", [0, 1, 15, 16, 17, 95, 96, 97, 99, 100, 200])
def test_full_chunks_of_the_prompt_come_back(store, limit):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, ref(), HISTORY, limit=limit)
    assert match.num_tokens == restored.num_tokens == min(limit, 100) // CHUNK * CHUNK
    assert match.reason is None


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 40, 80, 95, 98])
def test_a_prompt_that_leaves_the_history_keeps_the_common_chunks(store, cut):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, ref(), [*HISTORY[:cut], *[7] * 20])
    lost = None if cut >= WHOLE else "diverged"  # nothing after the last full chunk was stored
    assert (match.num_tokens, match.reason) == (cut // CHUNK * CHUNK, lost)
    assert (restored.num_tokens, restored.tier) == (match.num_tokens, match.tier)
    assert match.tier == ("ram" if cut >= CHUNK else None)


def test_an_unknown_session(store):
    match, _ = come_back(store, ref("new"), HISTORY)
    assert (match.num_tokens, match.reason) == (0, "never-stored")
    assert store.prepare(ref("new"))[0].reason == "never-stored"
    assert store.record(ref("new")) is None
    assert store.tier_of(ref("new")) is None


@pytest.mark.parametrize("session", [ref("other"), None])
def test_another_session_of_the_tenant_shares_full_chunks(store, session):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, session, [*HISTORY[:70], *[7] * 20])
    assert (match.num_tokens, match.reason) == (64, None)
    assert restored.num_tokens == 64


@pytest.mark.parametrize("known", [True, False])
def test_more_chunks_than_one_probe_asks_for(store, known):
    long = tokens(400 * CHUNK + 3)
    save(store, ref(), long)
    match, _ = come_back(store, ref() if known else None, long)
    assert match.num_tokens == 400 * CHUNK


def test_an_abandoned_branch_is_found_by_content(store):
    first, second = [*HISTORY[:40], *tokens(60, 1)], [*HISTORY[:40], *tokens(20, 2)]
    save(store, ref(), first)
    save(store, ref(), second)
    assert come_back(store, ref(), first)[0].num_tokens == 96
    assert come_back(store, ref(), second)[0].num_tokens == 48


@pytest.mark.parametrize("other", [ref(salt=b"other"), ref(tenant="other", salt=b"other")])
def test_another_tenant_finds_nothing(store, other):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, other, HISTORY)
    assert match.num_tokens == restored.num_tokens == 0
    assert store.match(None, chain_of(store, other, HISTORY)).reason == "never-stored"
    if other.tenant != "t":
        assert store.record(other) is None
        assert store.tier_of(other) is None


WIDER = {"layout": KVLayout("bfloat16", (KVLayer(2, 32, 32),)), "fingerprint": "f2"}


@pytest.mark.parametrize("change", [{"fingerprint": "f2"}, WIDER, {"chunk_tokens": 32}])
def test_another_model_or_chunk_size_is_a_miss_with_its_reason(tmp_path, change, opened):
    before = opened([disk(tmp_path)])
    save(before, ref(), HISTORY)
    before.close()
    after = opened([disk(tmp_path)], **change)
    match = after.match(ref(), chain_of(after, ref(), HISTORY))
    assert (match.num_tokens, match.reason) == (0, "fingerprint")
    assert after.records() == []
    assert after.record(ref()) is None


def test_misses_are_counted_by_reason(store):
    save(store, ref(), HISTORY)
    come_back(store, ref(), [*HISTORY[:20], *[1] * 20])
    come_back(store, ref("new"), tokens(50, 9))
    counters = store.stats().counters
    assert counters["misses.diverged"] == counters["misses.never-stored"] == 1
    assert (counters["restores"], counters["restored_tokens"]) == (1, 16)


def test_ids_of_any_kind_are_sessions(store):
    session = SessionRef("", "/\0\uffff" + "x" * 5000, b"")
    save(store, session, HISTORY)
    assert come_back(store, session, HISTORY)[1].num_tokens == WHOLE


# ---- for an engine that has blocks of its own


def test_chunks_that_the_engine_still_has_are_not_read(store):
    save(store, ref(), HISTORY)
    chain = chain_of(store, ref(), HISTORY)
    match = store.match(ref(), chain, 4)
    fetched = store.fetch(match)
    assert (match.num_chunks, fetched.num_chunks) == (6, 6)
    assert [x.piece.first_token for x, _ in fetched.blobs] == [64, 80]
    assert store.match(ref(), chain, 6).reads == ()


def fetch(store: ColdStore, session: SessionRef | None, prompt: list[int], first: int = 0) -> int:
    """Fetch, and check every row; returns the chunks that the engine then has."""
    match = store.match(session, chain_of(store, ref(), prompt), first)
    fetched = store.fetch(match)
    wanted = kv_of(prompt)
    for read, blob in fetched.blobs:
        out = store.model.layout.empty(CHUNK)
        store.packer.unpack_rows(blob, read.piece, out)
        first_token, end = read.piece.first_token, read.piece.end_token
        for pair, rows in zip(out, wanted, strict=True):
            for a, b in zip(pair, rows, strict=True):
                assert a.tobytes() == b[:, first_token:end].tobytes()
    assert fetched.num_chunks == match.num_chunks
    return max(fetched.num_chunks, first)


BITS = st.lists(st.integers(0, 1), max_size=5 * CHUNK)


@given(BITS, BITS, st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_all_fetched_chunks_belong_to_the_prompt(stored, more, common, first, named):
    store = open_store([ram()])
    prompt = [*stored[: common * CHUNK], *more]
    if len(stored) >= CHUNK:
        save(store, ref(), stored)
    one, other = (chain_of(store, ref(), x) for x in (stored, prompt))
    same = sum(a == b for a, b in zip(one, other, strict=False))
    first = min(first, len(other))
    assert fetch(store, ref() if named else ref("other"), prompt, first) == max(same, first)
    store.close()


def test_a_match_reads_no_blob(opened):
    tier = FaultyTier(RamTier(1 << 30))
    store = opened([tier])
    save(store, ref(), HISTORY)
    tier.calls.clear()
    assert store.match(ref(), chain_of(store, ref(), HISTORY), 3).num_chunks == 6
    assert store.match(None, chain_of(store, ref(), tokens(50, 5))).num_chunks == 0
    assert "get_many" not in tier.calls
