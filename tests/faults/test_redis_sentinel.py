"""A master that ends, and another one that Sentinels name in its place: misses, no failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.stored.redis_table import RedisTable
from gateway.stored.table import StoredLimits, StoreFailed
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.kv_sessions import come_back, open_store, ram, ref, save, tokens
from tests.redis_server import RedisSentinel, RedisServer
from tests.shared_rig import OneServer
from tests.waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

PATIENCE_S = 90.0  # a failover takes some seconds, on a busy machine more


@pytest.fixture
def master() -> Iterator[RedisServer]:
    with RedisServer(tcp=True) as server:
        yield server


@pytest.fixture
def sentinel(master: RedisServer) -> Iterator[RedisSentinel]:
    replica_of = ("--replicaof", "127.0.0.1", str(master.port))
    with RedisServer(*replica_of, tcp=True) as replica, RedisSentinel(master) as sentinel:
        link = RedisLink(replica.url, 5.0)
        until(lambda: info(link)["master_link_status"] == "up")
        asked = RedisLink(f"redis://127.0.0.1:{sentinel.port}", 5.0)
        until(lambda: len(asked.run([("SENTINEL", "REPLICAS", "main")])[0]) == 1)
        link.close()
        asked.close()
        yield sentinel


def info(link: RedisLink) -> dict[str, Any]:
    return link.call(lambda client: client.info("replication"))


def test_sessions_sleep_and_return_over_a_failover(master: RedisServer, sentinel: RedisSentinel):
    history = tokens(64, 0)
    far = RedisTier(sentinel.url, deadline_s=2.0)
    store = open_store([ram(), far])
    save(store, ref("a"), history)
    until(lambda: store.demote(ref("a"), "redis") == "redis")
    assert come_back(store, ref("a"), history)[1].num_tokens == 64
    master.kill()
    longer = [*history, *tokens(20, 1)]
    save(store, ref("a"), longer)  # compares every bit that comes back
    until(lambda: store.demote(ref("a"), "redis") == "redis")
    assert come_back(store, ref("a"), longer)[1].num_tokens == 80
    store.close()


def test_stored_objects_are_found_over_a_failover(master: RedisServer, sentinel: RedisSentinel):
    table = RedisTable(sentinel.url, StoredLimits(1 << 20, 3600.0), str, 2.0)

    def is_gone() -> bool:
        try:
            return table.find_all("t", ["response:r"], uses=True) == [None]
        except StoreFailed:
            return False

    assert is_gone()
    master.kill()
    with pytest.raises(StoreFailed):
        table.find_all("t", ["response:r"], uses=True)
    until(is_gone)
    table.close()


async def test_deletions_are_heard_of_again_with_the_next_master(master, sentinel):
    a, b = OneServer(sentinel.url), OneServer(sentinel.url)
    for server in (a, b):
        await server.start()
    await a.turn("one")
    assert await b.listed() == ["one"]
    master.kill()
    await a.hears(False)
    await b.hears(False)
    for server in (a, b):
        await server.hears()  # of the other master
        await server.turn("two")
    assert await a.delete("two")
    async with asyncio.timeout(PATIENCE_S):
        while b.own() != []:
            await asyncio.sleep(0.02)
    assert "two" not in await b.listed()
    for server in (a, b):
        await server.stop()
