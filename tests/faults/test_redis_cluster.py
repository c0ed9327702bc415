"""Blobs and stored objects on a Redis Cluster: on all nodes, while slots move, without a node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from gateway.stored.redis_table import RedisTable
from gateway.stored.table import StoredLimits, Write
from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.redis_tier import name_of
from tests.faults.redis_tiers import blobs, tier_at
from tests.faults.test_redis_lines import doctors_word
from tests.redis_server import RedisCluster, RedisServer
from tests.waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(300)]
STORED = blobs(30, 60_000)


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as it:
        yield it


def numbers_of_keys(cluster: RedisCluster) -> list[int]:
    return [cluster.ask(i, "DBSIZE") for i in range(3)]


def test_blobs_lie_on_all_nodes_and_come_back(cluster: RedisCluster) -> None:
    with tier_at(cluster.url, deadline_s=20.0) as (tier, _):
        assert tier.put_many(list(STORED.items())) == len(STORED)
        assert min(numbers_of_keys(cluster)) > 0
        assert tier.get_many(list(STORED)) == list(STORED.values())
        assert tier.contains_many([*STORED, b"none"]) == [True] * len(STORED) + [False]
        assert dict(tier.scan(b"c")) == STORED
        assert tier.stats().available and tier.stats().errors == 0
        assert tier.delete_many(list(STORED)) == len(STORED)
    assert numbers_of_keys(cluster) == [0, 0, 0]


def test_keys_are_found_while_their_slot_moves_and_after_it(cluster: RedisCluster) -> None:
    key, blob = next((x, y) for x, y in STORED.items() if key_slot(name_of(x)) < 5000)
    slot = key_slot(name_of(key))
    with tier_at(cluster.url, deadline_s=20.0) as (tier, _):
        tier.put_many([(key, blob)])
        there, source = cluster.nodes[1].port, cluster.id_of(0)
        target = cluster.id_of(1)
        cluster.ask(1, "CLUSTER", "SETSLOT", slot, "IMPORTING", source)
        cluster.ask(0, "CLUSTER", "SETSLOT", slot, "MIGRATING", target)
        assert tier.get_many([key]) == [blob]  # still where it was
        names = cluster.ask(0, "CLUSTER", "GETKEYSINSLOT", slot, 100)
        cluster.ask(0, "MIGRATE", "127.0.0.1", there, "", 0, 5000, "KEYS", *names)
        assert tier.get_many([key]) == [blob]  # ASK
        for node in (1, 0, 2):
            cluster.ask(node, "CLUSTER", "SETSLOT", slot, "NODE", target)
        assert tier.get_many(list(STORED))[list(STORED).index(key)] == blob  # MOVED
        assert tier.put_many(list(STORED.items())) == len(STORED)
        assert tier.get_many(list(STORED)) == list(STORED.values())
        assert tier.stats().errors == 0


def test_a_lost_node_costs_misses_until_its_replica_has_taken_over(cluster: RedisCluster) -> None:
    with tier_at(cluster.url, deadline_s=2.0) as (tier, clock):
        assert tier.put_many(list(STORED.items())) == len(STORED)
        # A replica has what was written some time ago; the last of it may be lost.
        until(lambda: cluster.ask(3, "DBSIZE") == cluster.ask(0, "DBSIZE"), what="replicated")
        cluster.nodes[0].kill()

        def all_there() -> bool:
            clock.skipped_s += 60.0  # the breaker's waits
            try:
                found = tier.get_many(list(STORED))
            except TierUnavailable:
                return False
            assert all(x in (None, y) for x, y in zip(found, STORED.values(), strict=True))
            return found == list(STORED.values())

        assert not all_there()
        until(all_there, what="taken over")
        assert tier.put_many(list(STORED.items())) == len(STORED)


def test_a_node_that_hangs_is_waited_for_once_and_not_for_each_key(cluster: RedisCluster) -> None:
    with tier_at(cluster.url, deadline_s=2.0) as (tier, _):
        assert tier.put_many(list(STORED.items())) == len(STORED)
        cluster.nodes[0].stop()
        began = time.monotonic()
        with pytest.raises(TierUnavailable):
            tier.contains_many([b"c%032d" % i for i in range(300)])
        assert time.monotonic() - began < 30.0  # about 100 of the keys are there
        cluster.nodes[0].cont()


def test_a_server_that_is_no_cluster_is_refused_with_a_reason() -> None:
    with RedisServer(tcp=True) as server:
        link = RedisLink(f"redis+cluster://127.0.0.1:{server.port}", 5.0)
        with pytest.raises(TierUnavailable, match="cluster"):
            link.run([("PING",)])
        link.close()


def test_the_doctor_finds_a_cluster(cluster: RedisCluster, tmp_path: Path) -> None:
    verdict, text = doctors_word(cluster.url, tmp_path)
    assert verdict == "ok" and "version" in text


def test_a_tenants_stored_objects_lie_on_one_node_each(cluster: RedisCluster) -> None:
    tenants = [f"tenant{i}" for i in range(12)]
    limits = StoredLimits(tenant_bytes=1 << 20, max_age_s=3600.0)
    table = RedisTable(cluster.url, limits, str, deadline_s=20.0)
    term = bytes(16)
    for tenant in tenants:
        write = Write(None, b"head", 100, {0: tenant.encode()}, terms=[term])
        assert table.write(tenant, "response:r1", write)
    assert min(numbers_of_keys(cluster)) > 0
    other = RedisTable(cluster.url, limits, str, deadline_s=20.0)
    for tenant in tenants:
        assert other.pages(tenant, "response:r1", [0, 1]) == [tenant.encode(), None]
        listed = other.listed(tenant, term, None, ascending=True)
        assert listed == [(1, "response:r1")]
    for tenant in tenants:
        assert other.delete(tenant, ["response:r1"]) == 1
        assert table.pages(tenant, "response:r1", [0]) == [None]
    table.close()
    other.close()
