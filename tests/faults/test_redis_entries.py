"""What a Redis server did to the entries of blobs: evicted, expired, refused, left to others."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import pytest
import redis

from benchmarks.stacks.constants import configured
from kvstore.config import StoreConfig
from kvstore.errors import Corrupt, ForeignCodec, RefusedCodec, Unusable
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.tiers.base import Blob, TierStats
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server import redis_tier
from kvstore.tiers.redis_server.client import ServerBounds
from kvstore.tiers.redis_server.redis_tier import PROLONG_S, TTL_S, RedisTier, name_of
from kvstore.tiers.registry import open_tiers
from tests.faults.redis_tiers import blobs, names, tier_at
from tests.redis_server import BOUNDED, RedisServer, node_of_a_cluster
from tests.waiting import until

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


def test_what_only_another_engine_can_read_is_left_to_it(server: RedisServer):
    """In memory of its own it goes if it is refused: no readable one would be stored there."""
    key, near = b"c" + bytes(32), RamTier(1 << 30)
    tier = RedisTier(server.url, deadline_s=10.0)
    stack = TierStack([near, tier], Counters())

    def refused(by: type[Unusable]) -> Callable[[Blob], bytes]:
        def use(blob: Blob) -> bytes:
            raise by("no")

        return use

    for level in (0, 1):
        stack.put(level, [(key, b"segments")])
    assert stack.good_copy(key, [0, 1], refused(ForeignCodec)) == "fingerprint"
    assert near.get_many([key]) == [b"segments"]
    assert stack.good_copy(key, [0, 1], refused(RefusedCodec)) == "fingerprint"
    assert near.get_many([key]) == [None]
    assert tier.get_many([key]) == [b"segments"]
    assert stack.good_copy(key, [1], refused(Corrupt)) == "corrupt"
    assert tier.get_many([key]) == [None]
    tier.close()


EVICTING, FULL = BOUNDED, ("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")
VOLATILE = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl")


def times_to_live(client: redis.Redis) -> set[int]:
    return {client.ttl(x) for x in names(client)}


@pytest.mark.parametrize(
    ("settings", "ttl_s"),
    [({}, TTL_S), ({"redis_ttl_s": 60.0}, 60.0), ({"ttl_s": 30.0}, 30.0), ({"ttl_s": 1e9}, TTL_S)],
)
def test_the_shorter_of_both_times_to_live_holds(server, tmp_path, settings, ttl_s):
    config = configured(StoreConfig, ram_bytes=0, disk_bytes=0, redis_url=server.url, **settings)
    (tier,) = open_tiers(config, tmp_path)
    assert tier.put_many([(b"c", b"blob")]) == 1
    tier.close()
    with redis.Redis.from_url(server.url) as client:
        assert times_to_live(client) <= {int(ttl_s) - 1, int(ttl_s)}


@pytest.mark.parametrize("use", ["touch", "put"])
def test_a_use_prolongs_it_once_in_a_while(server: RedisServer, use: str) -> None:
    blobs = [(b"c-%d" % i, b"blob") for i in range(1000)]
    with tier_at(server.url) as (tier, clock), redis.Redis.from_url(server.url) as client:
        tier.put_many(blobs)

        def commands_of_a_use() -> int:
            for name in names(client)[:500]:
                client.expire(name, 60)
            before = client.info("commandstats").get("cmdstat_pexpire", {}).get("calls", 0)
            if use == "touch":
                tier.touch([x for x, _ in blobs])
            else:
                tier.put_many(blobs)
            return client.info("commandstats").get("cmdstat_pexpire", {}).get("calls", 0) - before

        assert commands_of_a_use() == 0  # they were written just now
        clock.skipped_s += PROLONG_S
        assert commands_of_a_use() == len(blobs)
        assert min(times_to_live(client)) > 60
        assert commands_of_a_use() == 0


@pytest.mark.parametrize(
    ("options", "trouble"),
    [((), "no maxmemory"), (FULL, "evicts nothing"), (EVICTING, ""), (VOLATILE, "")],
)
def test_a_server_that_does_not_bound_or_evict_is_said(options, trouble, caplog):
    with (
        RedisServer(*options) as server,
        tier_at(server.url) as (tier, _),
        caplog.at_level(logging.WARNING),
    ):
        assert tier.stats().trouble == ""  # it has not answered yet
        tier.put_many([(b"c", bytes(100_000))])
        for _ in range(2):
            tier.greet()
        stats = tier.stats()
    assert trouble in stats.trouble and bool(stats.trouble) == bool(trouble)
    assert (trouble in caplog.text) and len(caplog.records) == bool(trouble)  # once
    assert stats.capacity_bytes == (64 << 20 if options else 0)
    assert stats.nbytes > 100_000 and stats.num_blobs == 1


def test_a_server_that_refuses_config_says_it_all_the_same_and_one_that_refuses_info_does_not(
    server: RedisServer,
) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-config")
        with tier_at(server.url) as (tier, _):
            tier.greet()
            assert "no maxmemory" in tier.stats().trouble
        client.execute_command("ACL", "SETUSER", "default", "-info")
        with tier_at(server.url) as (tier, _):
            tier.greet()
            assert tier.stats().available
            assert "does not say" in tier.stats().trouble
            assert tier.put_many([(b"c", b"blob")]) == 1
        client.execute_command("ACL", "SETUSER", "default", "+info", "+config")


def test_the_bounds_of_a_cluster_are_those_of_its_nodes() -> None:
    with node_of_a_cluster(*EVICTING) as node, redis.Redis.from_url(node.url) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        with tier_at(f"redis+cluster://127.0.0.1:{node.port}", deadline_s=10.0) as (tier, _):
            until(lambda: tier.replace(b"c", b"blob"), what="up")
            tier.greet()
            stats = tier.stats()
            assert (stats.capacity_bytes, stats.trouble) == (64 << 20, "")
        assert client.exists(name_of(b"c"))


def test_several_views_of_one_server_are_not_added_up() -> None:
    one = TierStats("redis", 10, 100, 5, 2, 1, True, ServerBounds(max_bytes=0).trouble)
    two = TierStats("redis", 12, 100, 6, 2, 1, True)
    joined = TierStats.joined([one, two], available=True)
    assert joined == TierStats("redis", 12, 100, 6, 2, 2, True, one.trouble)
    assert TierStats.joined([TierStats("ram", 10, 100, 5, 2, 1, True)] * 2, available=True) == (
        TierStats("ram", 20, 200, 10, 4, 2, True)
    )
