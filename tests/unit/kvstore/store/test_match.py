"""How much of a prompt comes back, from whose chunks, and the reason where it is less."""

from __future__ import annotations

import pytest

from kvstore.shapes import KVLayer, KVLayout
from tests.kv_sessions import CHUNK, LAYOUT, come_back, kv_of, ram, ref, save, tokens

HISTORY = tokens(100)


@pytest.fixture
def store(opened):
    return opened([ram()])


@pytest.mark.parametrize("limit", [0, 1, 15, 16, 17, 95, 96, 97, 99, 100, 200])
def test_never_more_than_the_limit(store, limit):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, ref(), HISTORY, limit=limit)
    assert match.num_tokens == restored.num_tokens == min(limit, 100)
    assert match.reason is None


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40, 96, 98, 99])
def test_a_prompt_that_leaves_the_history_keeps_the_common_prefix(store, cut):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, ref(), [*HISTORY[:cut], 7, 7, 7])
    assert (match.num_tokens, match.reason) == (cut, "diverged")
    assert restored.num_tokens == cut
    assert restored.tokens.tolist() == match.tokens.tolist() == list(HISTORY[:cut])


def test_a_prompt_unlike_the_history_from_the_first_token_on(store):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, ref(), [7, *HISTORY])
    assert (match.num_tokens, match.tier, match.reason) == (0, None, "diverged")
    assert (restored.num_tokens, restored.tier) == (0, None)


def test_an_unknown_session(store):
    match, _ = come_back(store, ref("new"), HISTORY)
    assert (match.num_tokens, match.reason) == (0, "never-stored")
    assert store.prepare(ref("new")).reason == "never-stored"
    assert store.record(ref("new")) is None
    assert store.tier_of(ref("new")) is None


@pytest.mark.parametrize("session", [ref("other"), None])
def test_another_session_of_the_tenant_shares_full_chunks(store, session):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, session, [*HISTORY[:70], 7, 7])
    assert (match.num_tokens, match.reason) == (64, None)
    assert restored.num_tokens == 64


def test_more_chunks_than_one_probe_asks_for(store):
    long = tokens(40 * CHUNK + 3)
    save(store, ref(), long)
    match, _ = come_back(store, None, long)
    assert match.num_tokens == 40 * CHUNK


def test_an_abandoned_branch_is_found_by_content(store):
    first, second = [*HISTORY[:40], *tokens(60, 1)], [*HISTORY[:40], *tokens(20, 2)]
    save(store, ref(), first)
    save(store, ref(), second)
    match, _ = come_back(store, ref(), first)
    assert match.num_tokens == 96
    match, _ = come_back(store, ref(), second)
    assert match.num_tokens == 60


@pytest.mark.parametrize("other", [ref(salt=b"other"), ref(tenant="other", salt=b"other")])
def test_another_tenant_finds_nothing(store, other):
    save(store, ref(), HISTORY)
    match, restored = come_back(store, other, HISTORY)
    assert match.num_tokens == restored.num_tokens == 0
    assert store.match(None, other.salt, HISTORY, 100).reason == "never-stored"
    assert store.record(other) is None
    assert store.tier_of(other) is None


def test_another_tenant_with_the_same_session_id_has_its_own(store):
    theirs = ref(tenant="other", salt=b"other")
    save(store, ref(), HISTORY)
    save(store, theirs, HISTORY[:50])
    assert come_back(store, theirs, HISTORY)[0].num_tokens == 50
    assert come_back(store, ref(), HISTORY)[0].num_tokens == 100


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "f2"},
        {"codec": "tq3"},
        {"layout": KVLayout("bfloat16", (KVLayer(2, 32, 32),)), "fingerprint": "f2"},
    ],
)
def test_another_model_or_codec_is_a_miss_with_its_reason(tmp_path, change, opened):
    from tests.kv_sessions import disk

    layout = KVLayout("bfloat16", (KVLayer(2, 32, 32),))
    before = opened([disk(tmp_path)], layout=layout)
    save(before, ref(), HISTORY)
    before.close()
    after = opened([disk(tmp_path)], **{"layout": layout} | change)
    match = after.match(ref(), ref().salt, HISTORY, 100)
    assert (match.num_tokens, match.reason) == (0, "fingerprint")
    assert after.records() == []
    assert after.record(ref()) is None


def test_everything_a_record_covers_can_be_prepared(store):
    save(store, ref(), HISTORY)
    restored = store.load(store.prepare(ref()))
    assert restored.num_tokens == 100
    assert store.record(ref()).tokens.tolist() == HISTORY


def test_shorter_than_a_chunk_is_all_tail(store):
    save(store, ref(), HISTORY[:5])
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 5
    assert come_back(store, None, HISTORY)[1].num_tokens == 0


def test_one_token(store):
    save(store, ref(), [5])
    assert come_back(store, ref(), [5, 6])[1].num_tokens == 1


def test_a_run_shorter_than_its_tokens_sets_the_length(store):
    assert store.save(ref(), HISTORY, kv_of(HISTORY[:50]))
    assert store.flush(10)
    assert come_back(store, ref(), HISTORY)[0].num_tokens == 50


def test_nothing_to_save_is_skipped(store):
    assert not store.save(ref(), [], LAYOUT.empty(0))
    assert store.stats().counters["saves_skipped"] == 1


def test_misses_are_counted_by_reason(store):
    save(store, ref(), HISTORY)
    come_back(store, ref(), [*HISTORY[:20], 1])
    come_back(store, ref("new"), tokens(50, 9))
    counters = store.stats().counters
    assert counters["misses.diverged"] == counters["misses.never-stored"] == 1
    assert (counters["restores"], counters["restored_tokens"]) == (1, 20)
