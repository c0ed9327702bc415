"""A Redis that is killed and comes back empty, while sessions are asked for: misses, no failure."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.store.cold_store import ColdStore
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.kv_sessions import come_back, open_store, ram, ref, save, tokens
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.redis

PATIENCE_S = 60.0  # the breaker's first waits, on a busy machine


def put_to_rest(store: ColdStore, name: str) -> None:
    """Demote a session to Redis, which may be too slow for it at first on a busy machine."""
    until(lambda: store.demote(ref(name), "redis") == "redis", what=name)


def test_sessions_go_on_while_redis_dies_and_returns() -> None:
    histories = {str(i): tokens(64, i) for i in range(3)}
    stop = threading.Event()
    failures: list[BaseException] = []
    with RedisServer() as server:
        far = RedisTier(server.url, deadline_s=1.0)
        store = open_store([ram(), far])
        for name, history in histories.items():
            save(store, ref(name), history)
            put_to_rest(store, name)
        assert come_back(store, ref("0"), histories["0"])[1].num_tokens == 64
        assert store.flush(PATIENCE_S)  # its copies on their way to memory
        put_to_rest(store, "0")

        def ask(name: str) -> None:
            try:
                while not stop.is_set():  # compares every restored bit
                    come_back(store, ref(name), histories[name])
                    time.sleep(0.01)
            except BaseException as error:
                failures.append(error)

        server.kill()
        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in histories]
        for thread in threads:
            thread.start()
        until(lambda: far.stats().available is False, what="noticed")
        for name, history in histories.items():
            match, restored = come_back(store, ref(name), history)
            assert (match.num_tokens, restored.num_tokens) == (0, 0)
            assert match.reason is not None
        server.start()
        until(lambda: far.stats().available is True, what="asked again")
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        assert come_back(store, ref("1"), histories["1"])[1].num_tokens == 0  # it is empty now
        longer = [*histories["1"], *tokens(20, 9)]
        save(store, ref("1"), longer)
        put_to_rest(store, "1")
        assert come_back(store, ref("1"), longer)[1].num_tokens == 80
        store.close()
