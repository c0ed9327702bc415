"""What a Redis server did to the entries of blobs: evicted, expired, refused."""

from __future__ import annotations

import random
import threading
import time

import pytest
import redis

from kvstore.tiers.redis_server import redis_tier
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.faults.redis_tiers import blobs, names, tier_at
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis


def test_a_blob_that_no_server_takes_is_refused(server, monkeypatch):
    monkeypatch.setattr(redis_tier, "MAX_BLOB_BYTES", 1000)
    with tier_at(server.url) as (tier, _):
        assert tier.put_many([(b"c-large", bytes(1001)), (b"c-small", bytes(1000))]) == 1
        assert not tier.replace(b"c-large", bytes(1001))
        assert tier.contains_many([b"c-large", b"c-small"]) == [False, True]
        assert tier.stats().errors == 2


def test_a_full_server_that_evicts_gives_back_whole_blobs_only():
    stored = blobs(60)
    with (
        RedisServer("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server,
        tier_at(server.url, deadline_s=10.0) as (tier, _),
    ):
        for key, blob in stored.items():
            tier.put_many([(key, blob)])
        found = dict(zip(stored, tier.get_many(list(stored)), strict=True))
        whole = {key: blob for key, blob in found.items() if blob is not None}
        assert whole.items() <= stored.items()
        assert 0 < len(whole) < 40
        gone = [key for key in stored if key not in whole]
        assert tier.contains_many(gone) == [False] * len(gone)
        assert tier.stats().errors == 0


def test_a_full_server_that_may_not_evict_refuses_and_keeps_the_old():
    stored = blobs(60)
    with (
        RedisServer("--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as server,
        tier_at(server.url, deadline_s=10.0) as (tier, _),
    ):
        kept = tier.put_many(list(stored.items()))
        assert 20 < kept < 35
        assert not tier.replace(b"r", bytes(3_000_000))
        found = tier.get_many(list(stored))
        assert sum(x is not None for x in found) == kept
        assert all(x in (None, y) for x, y in zip(found, stored.values(), strict=True))
        stats = tier.stats()
        assert stats.available  # a refusal is an answer
        assert stats.errors >= 60 - kept
        with redis.Redis.from_url(server.url) as client:
            assert len(names(client)) == kept  # nothing half-written
        assert tier.delete_many(list(stored)) == kept
        assert tier.put_many(list(stored.items())[:10]) == 10


def test_a_read_only_replica_refuses_blobs_and_serves_reads(server: RedisServer):
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many([(b"k", b"blob")])
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert tier.get_many([b"k"]) == [b"blob"]
        assert tier.put_many([(b"new", b"blob")]) == 0
        assert tier.stats().available
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert tier.put_many([(b"new", b"blob")]) == 1


def test_entries_expire_unless_touched(server: RedisServer):
    stored = blobs(2)
    kept, lost = stored
    with tier_at(server.url, ttl_s=30.0) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        tier.replace(b"r", b"record")
        assert {client.ttl(name) for name in names(client)} <= {29, 30}
        for name in names(client):
            client.pexpire(name, 300)
        with tier_at(server.url, ttl_s=30.0) as (other, _):  # did not write them, but uses them
            other.touch([kept, b"r"])
        time.sleep(0.35)
        assert tier.get_many([kept, lost, b"r"]) == [stored[kept], None, b"record"]


def test_of_two_writers_the_last_wins_with_a_whole_blob(server: RedisServer):
    values = [random.Random(i).randbytes(800_000 + i) for i in range(2)]
    with (
        tier_at(server.url, deadline_s=20.0) as (one, _),
        tier_at(server.url, deadline_s=20.0) as (other, _),
    ):

        def write(tier: RedisTier, value: bytes) -> None:
            for _ in range(30):
                assert tier.replace(b"r", value)

        pair = zip((one, other), values, strict=True)
        threads = [threading.Thread(target=write, args=x) for x in pair]
        for thread in threads:
            thread.start()
        seen = [one.get_many([b"r"])[0] for _ in range(30)]
        for thread in threads:
            thread.join()
        assert set(seen) <= {None, *values}
        (last,) = other.get_many([b"r"])
        assert last in values
        with redis.Redis.from_url(server.url) as client:
            assert len(names(client)) == 1
