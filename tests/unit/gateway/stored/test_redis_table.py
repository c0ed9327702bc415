"""Stored objects on a Redis server: two gateways, evictions, a full server, keys that end."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from gateway.stored import redis_table
from gateway.stored.objects import ObjectStore
from gateway.stored.stored import Stored
from gateway.stored.table import StoredLimits, StoreFailed
from tests.clock import Clock
from tests.redis_server import RedisServer
from tests.stored_objects import (
    KEY_OF,
    done,
    entry,
    hidden,
    ids_of,
    items,
    put,
    read_all,
    redis_objects,
    shown,
    text,
)
from tests.waiting import eventually

LIMITS = StoredLimits(tenant_bytes=20_000, max_age_s=1000.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.redis
@pytest.mark.parametrize("ended", ["deleted", "too old", "stored again"])
def test_nothing_is_left_of_a_row_that_the_server_evicted(
    server: RedisServer, clock: Clock, ended: str
) -> None:
    objects, keys = redis_objects(server, LIMITS, clock), redis_table.Keys(hidden("a"))
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        put(objects, entry("1"), items("i"))
        client.unlink(keys.row(client.zrange(keys.used, 0, 0)[0]))
        assert shown(objects, "1") is None and client.zcard(keys.index)
        if ended == "deleted":
            done(objects.delete("conversation", "1"))
        elif ended == "too old":
            clock.now += 2000
            done(objects.tidy())
        else:
            put(objects, entry("1"))
            assert done(objects.delete("conversation", "1"))
        assert not client.zcard(keys.index) and not client.hlen(keys.terms)
        client.flushall()
    objects.table.close()


@pytest.mark.redis
def test_two_gateways_that_share_a_server_count_a_row_out_once(clock: Clock, monkeypatch) -> None:
    with RedisServer() as server:
        one, other = (redis_objects(server, LIMITS, clock) for _ in range(2))
        for id in "12":
            put(one, entry(id), items("i"))
        indexed, others = redis_table._indexed, iter("1")

        def between(*args: Any) -> object:
            for id in others:
                assert done(other.delete("conversation", id))
            return indexed(*args)

        monkeypatch.setattr(redis_table, "_indexed", between)
        assert not done(one.delete("conversation", "1"))
        keys = redis_table.Keys(hidden("a"))
        with redis.Redis.from_url(server.url) as client:
            assert client.hvals(keys.sizes) == [client.get(keys.total)]
            assert done(other.delete("conversation", "2")) and shown(one, "2") is None
            assert {*client.scan_iter()} == {keys.total.encode(), keys.seq.encode()}
        server.kill()
        with pytest.raises(StoreFailed, match="redis does not answer"):
            shown(one, "1")
        one.table.close()
        other.table.close()


@pytest.mark.redis
async def test_all_that_lies_on_a_server_ends_some_time(server: RedisServer, clock: Clock) -> None:
    """Also what is left of releases that sealed nothing."""
    stored = Stored(lambda: ObjectStore(redis_objects(server, LIMITS, clock).table, KEY_OF))
    with redis.Redis.from_url(server.url) as client:
        for i in range(200):
            client.hset(f"thermocline:stored:{{a}}:entry:response:{i}", "body", "plain words")
        client.psetex("thermocline:stored:{a}:entry:response:3", 90_000, "plain words")
        client.set("thermocline:blob", "another's")
        assert not await stored.ask("a", lambda objects: objects.delete("response", "never"), 0)
        assert await stored.ask("a", lambda objects: objects.put(*entry("1")), False)
        assert await stored.ask("a", lambda objects: objects.delete("conversation", "1"), 0)
        stored.start()
        await eventually(lambda: all(client.pttl(x) > 0 for x in client.scan_iter("*stored:*")))
        assert client.pttl("thermocline:stored:{a}:entry:response:3") <= 90_000
        assert client.pttl("thermocline:blob") == -1
        await stored.close()
        client.flushall()


@pytest.mark.redis
@pytest.mark.parametrize("refusal", ["CONFIG SET maxmemory 1", "REPLICAOF localhost 1"])
def test_a_server_that_takes_no_writes_is_read(clock: Clock, refusal: str) -> None:
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        objects = redis_objects(server, LIMITS, clock)
        put(objects, entry("1"), items("i"))
        with redis.Redis.from_url(server.url) as client:
            client.execute_command(*refusal.split())
        assert shown(objects, "1") == {"id": "1"}
        assert read_all(objects, "1") == ids_of(objects, "1") == ["i"]
        with pytest.raises(StoreFailed):
            put(objects, entry("2"))
        objects.table.close()


@pytest.mark.redis
def test_a_full_server_takes_deletions(clock: Clock) -> None:
    with RedisServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        objects = redis_objects(server, StoredLimits(1 << 28, 1e6), clock)
        number = 0
        with pytest.raises(StoreFailed) as caught:
            while True:
                put(objects, entry(str(number), text=text(100_000)), items(f"i{number}"))
                number += 1
        assert caught.value.trouble == "full"
        assert number > 3 and shown(objects, "0")
        assert done(objects.delete("conversation", "0"))
        assert shown(objects, "0") is None
        assert put(objects, entry("again", text=text(50_000)))
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
            assert done(objects.delete("conversation", "again"))
            assert shown(objects, "again") is None
            clock.now += 1e7
            done(objects.tidy())  # which cannot count out what it removes, and ends
            client.config_set("maxmemory", 0)
            done(objects.tidy())
            assert client.get(redis_table.Keys(hidden("a")).total) == b"0"
        objects.table.close()
