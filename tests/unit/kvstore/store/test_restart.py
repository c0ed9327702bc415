"""Sessions that are still there after the process has ended."""

from __future__ import annotations

import pytest

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import RECORD
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.kv_sessions import begin_save, come_back, disk, open_store, ram, ref, save, tokens
from tests.redis_server import RedisServer

HISTORY = tokens(200)


def test_closing_writes_saves_that_were_still_waiting(tmp_path, opened):
    store = opened([ram(), disk(tmp_path)])
    assert begin_save(store, ref(), HISTORY)
    store.close()
    store = opened([ram(), disk(tmp_path)])
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 192


def test_another_models_sessions_in_the_same_place_are_not_ours(tmp_path, opened):
    tier = disk(tmp_path)
    store = opened([tier])
    save(store, ref(), HISTORY)
    (key, blob), *_ = tier.scan(RECORD)
    foreign = RECORD + bytes(32)
    tier.put_many([(foreign, blob), (RECORD + b"\1" * 32, b"no blob at all")])
    store.close()
    tier = disk(tmp_path)
    store = opened([tier])
    assert [x.id for x in store.records()] == ["s"]
    assert tier.contains_many([key, foreign, RECORD + b"\1" * 32]) == [True, True, False]
    assert store.stats().counters["corrupt"] == 1


def test_a_record_without_chunks_and_chunks_without_a_record(tmp_path, opened):
    tier = disk(tmp_path)
    store = opened([tier])
    save(store, ref("a"), HISTORY)
    save(store, ref("b"), tokens(100, 1))
    tier.delete_many([key for key, _ in tier.scan(CHUNK_KIND)][:1])
    store.close()
    store = opened([disk(tmp_path)])
    lost = [come_back(store, ref(x), t) for x, t in (("a", HISTORY), ("b", tokens(100, 1)))]
    assert sorted(x.reason is None for x, _ in lost) == [False, True]


def test_the_newest_record_wins_in_any_tier(opened):
    near, far = ram(), ram()
    far.name = "disk"
    store = opened([far])
    save(store, ref(), HISTORY[:100])
    (key, old) = next(iter(far.scan(RECORD)))
    save(store, ref(), HISTORY)
    near.put_many([(key, old)])
    second = opened([near, far])
    assert [x.num_tokens for x in second.records()] == [192]
    second.ledger.index.remove(key)
    assert come_back(second, ref(), HISTORY)[1].num_tokens == 192


def test_a_restart_packs_nothing_again(tmp_path, opened):
    store = opened([ram(), disk(tmp_path)])
    assert begin_save(store, ref(), HISTORY) and store.flush(200)
    store.close()
    store = opened([ram(), disk(tmp_path)])
    _, restored = come_back(store, ref(), HISTORY)
    assert begin_save(store, ref(), HISTORY, restored) and store.flush(200)
    assert store.stats().counters["chunks_packed"] == 0
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 192


@pytest.mark.redis
def test_a_session_wakes_on_a_second_engine_through_a_real_server():
    with RedisServer() as server:
        tiers = [[ram(), RedisTier(server.url, deadline_s=5.0)] for _ in range(2)]
        one, two = map(open_store, tiers)
        save(one, ref(), HISTORY[:150])
        match, restored = come_back(two, ref(), HISTORY)
        assert (match.tier, restored.num_tokens, restored.reason) == ("redis", 144, None)
        assert come_back(two, ref(salt=b"other"), HISTORY)[1].num_tokens == 0
        save(two, ref(), HISTORY)
        assert come_back(one, ref(), HISTORY)[1].num_tokens == 192
        assert one.flush(200)
        server.kill()
        assert come_back(one, ref(), HISTORY)[1].num_tokens == 192  # from its own memory
        assert two.forget(ref())
        one.close()
        two.close()
