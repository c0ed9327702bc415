"""What a Redis server did to the entries of blobs: evicted, tampered with, expired, refused."""

from __future__ import annotations

import random
import threading
import time

import pytest
import redis

from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.blobs import UNFINISHED_S
from kvstore.tiers.redis_server.fragments import FRAGMENT_BYTES, manifest_name
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.faults.redis_tiers import blobs, names, tier_at
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis


def test_a_blob_without_a_manifest_is_invisible_and_expires(server: RedisServer):
    """What a writer leaves that dies between the fragments and the manifest."""
    stored = blobs(1)
    (key,) = stored
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        assert {client.ttl(name) for name in names(client)} == {-1}
        fragments = {name: client.get(name) for name in names(client) if name != manifest_name(key)}
        client.flushall()
        for name, fragment in fragments.items():
            client.set(name, fragment, ex=UNFINISHED_S)
        assert tier.contains_many([key]) == [False]
        assert tier.get_many([key]) == [None]
        assert tier.put_many(list(stored.items())) == 1
        assert {name for name in names(client) if client.ttl(name) > 0} == set(fragments)


def test_a_blob_with_an_evicted_fragment_is_a_miss_and_can_be_stored_again(server: RedisServer):
    stored = blobs(3)
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        victim = [x for x in names(client) if x.startswith(manifest_name(b"c%032d" % 1))][2]
        client.delete(victim)
        first, middle, last = tier.get_many(list(stored))
        assert (first, middle, last) == (stored[b"c%032d" % 0], None, stored[b"c%032d" % 2])
        assert tier.contains_many(list(stored)) == [True, False, True]
        assert tier.stats().errors == 0  # eviction is no error
        assert tier.put_many(list(stored.items())) == 3
        assert tier.get_many(list(stored)) == list(stored.values())


@pytest.mark.parametrize("length", [1000, 700_000])
def test_tampered_entries_are_misses(server: RedisServer, length: int):
    stored = blobs(1, length)
    (key,) = stored
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        chance = random.Random(3)
        for _ in range(40):
            name = chance.choice(names(client))
            value = bytearray(client.get(name))
            value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
            client.set(name, bytes(value[: chance.choice((None, -1))]))
            assert tier.get_many([key]) == [None]
            client.flushall()
            assert tier.put_many(list(stored.items())) == 1
            assert tier.get_many([key]) == list(stored.values())
        assert tier.stats().errors >= 30  # a manifest that leads nowhere looks like an eviction


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
        assert stats.num_blobs == kept
        with redis.Redis.from_url(server.url) as client:
            assert {client.ttl(name) for name in names(client)} == {-1}  # nothing half-written
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
    values = [random.Random(i).randbytes(3 * FRAGMENT_BYTES + i) for i in range(2)]
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
        fragments = -(-len(last) // FRAGMENT_BYTES)  # three or four: which of the two was last
        with redis.Redis.from_url(server.url) as client:
            assert len(names(client)) == 1 + fragments  # and its manifest: the loser's are gone


@pytest.mark.parametrize("length", [3_000, 300_000])
def test_a_write_after_its_caller_gave_up_is_removed(server: RedisServer, length: int):
    """A hanging server carries out its commands as soon as it goes on: no client counts them."""
    (key, blob), (other, another) = blobs(2, length).items()
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        assert tier.replace(key, bytes(length + 1))
        cost = tier.stats().nbytes
        server.stop()
        with pytest.raises(TierUnavailable):
            tier.replace(key, blob)
        server.cont()
        time.sleep(0.2)
        assert tier.put_many([(other, another)]) == 1
        assert not [x for x in names(client) if x.startswith(manifest_name(key))]
        assert tier.stats().num_blobs == 1 and tier.stats().nbytes <= cost
        assert tier.put_many([(key, blob)]) == 1
        assert tier.get_many([key, other]) == [blob, another]


def test_a_blob_that_comes_while_it_is_asked_for_is_counted(server: RedisServer):
    ((key, blob),) = blobs(1, 1_000).items()
    stop = threading.Event()
    with tier_at(server.url, deadline_s=10.0) as (tier, _):

        def ask() -> None:
            while not stop.is_set():
                tier.contains_many([key])

        asking = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in asking:
            thread.start()
        counted = []
        for _ in range(400):
            tier.put_many([(key, blob)])
            tier.contains_many([key])
            counted.append(tier.stats().num_blobs)
            tier.delete_many([key])
        stop.set()
        for thread in asking:
            thread.join(20)
    assert counted == [1] * 400
