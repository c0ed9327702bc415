"""Two gateways on one Redis: what keys use in a minute, and their sessions, count at both."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask, metrics
from tests.integration.launch.two_servers import Pair
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.redis]

LIMITS = {
    "few": "requests_per_minute=60",
    "free": "requests_per_minute=1000",
    "wordy": "tokens_per_minute=3000",
    "many": "sessions=10",
}
PATIENCE_S = 60.0


class Limited(Pair):
    """The pair whose tenants have the limits above."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        super().__init__(folder, redis, LIMITS)
        self.numbers = count()  # of sessions: equal turns of one would be served as one
        for server in self.servers:
            self.until_shared(server, 1)

    def until_shared(self, server: Server, value: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while f"thermocline_limits_shared {value}.0" not in (text := metrics(server)):
            assert time.monotonic() < end, text
            time.sleep(0.1)

    def chat(
        self, name: str, i: int, chunks: int = 1, delay_s: float = 0.0, session: str = ""
    ) -> int:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "metadata": {"fake": f"chunks={chunks} delay_s={delay_s}"},
        }
        headers = self.headers(name)
        headers["x-session-id"] = session or f"{name}-{next(self.numbers)}"
        server = self.servers[i % len(self.servers)]
        return ask(server, "/v1/chat/completions", body, **headers)[0]

    def burst(self, name: str, number: int, **more: float) -> Counter[int]:
        with ThreadPoolExecutor(number) as pool:
            return Counter(pool.map(lambda i: self.chat(name, i, **more), range(number)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    with RedisServer() as redis:
        pair = Limited(tmp_path_factory.mktemp("shared"), redis)
        yield pair
        pair.stop()


def test_requests_per_minute_hold_over_both(pair: Limited) -> None:
    counts = Counter[int]()
    for _ in range(4):
        counts += pair.burst("few", 20)
    said = [x for server in pair.servers for x in server.log if "gateway alone" in x]
    assert counts == {200: 60, 429: 20}, said


def test_tokens_per_minute_hold_over_both(pair: Limited) -> None:
    num_served = 0
    each = 101  # tokens of a turn: one of the prompt
    for i in range(80):
        num_served += pair.chat("wordy", i, chunks=100) == 200
        time.sleep(0.05)
    assert 0.9 * 3000 <= num_served * each <= 1.1 * 3000 + 2 * each


def test_sessions_of_both_count(pair: Limited) -> None:
    assert [pair.chat("many", i, session=f"m{i}") for i in range(8)] == [200] * 8
    time.sleep(2.0)  # until each knows of the other's
    statuses = []
    for i in range(8, 12):
        statuses.append(pair.chat("many", i, session=f"m{i}"))
        time.sleep(1.0)
    assert statuses == [200] * 2 + [429] * 2
    assert pair.chat("many", 1, session="m0") == 200  # it moves to the other one


def test_without_redis_each_counts_for_itself_and_says_so(pair: Limited) -> None:
    pair.redis.stop()
    try:
        began = time.monotonic()
        assert [pair.chat("free", i) for i in range(6)] == [200] * 6
        assert time.monotonic() - began < 30
        for server in pair.servers:
            pair.until_shared(server, 0)
            server.wait_for("limits hold at this gateway alone")
    finally:
        pair.redis.cont()
    for server in pair.servers:
        pair.until_shared(server, 1)
