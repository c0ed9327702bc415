"""How long blobs stay in Redis, and whether the server bounds what they take there."""

from __future__ import annotations

import logging

import pytest
import redis

from benchmarks.stacks.constants import configured
from kvstore.config import StoreConfig
from kvstore.tiers.base import TierStats
from kvstore.tiers.redis_server.client import ServerBounds
from kvstore.tiers.redis_server.redis_tier import PROLONG_S, TTL_S, name_of
from kvstore.tiers.registry import open_tiers
from tests.faults.redis_tiers import names, tier_at
from tests.redis_server import BOUNDED, RedisServer, node_of_a_cluster
from tests.waiting import until

pytestmark = pytest.mark.redis

EVICTING, FULL = BOUNDED, ("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")
VOLATILE = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl")


def times_to_live(client: redis.Redis) -> set[int]:
    return {client.ttl(x) for x in names(client)}


def test_every_blob_has_a_time_to_live(server: RedisServer) -> None:
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many([(b"c-one", b"1"), (b"c-two", b"2")])
        tier.replace(b"r", b"record")
        assert len(names(client)) == 3
        assert times_to_live(client) <= {int(TTL_S) - 1, int(TTL_S)}


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
