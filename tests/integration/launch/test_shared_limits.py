"""Two gateways on one Redis: a key's limits hold over both, also when one is killed."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask
from tests.integration.launch.two_servers import Pair, metrics
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.redis]

LIMITS = {
    "few": "requests_per_minute=60",
    "busy": "concurrent_requests=6",
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
    began, counts = time.monotonic(), Counter[int]()
    while counts[200] < 54 and time.monotonic() - began < PATIENCE_S:
        counts += pair.burst("few", 20)
    counts += pair.burst("few", 40)
    refilled = time.monotonic() - began  # one in a second
    assert set(counts) == {200, 429}
    assert 54 <= counts[200] <= 1.1 * 60 + refilled


def test_tokens_per_minute_hold_over_both(pair: Limited) -> None:
    began, num_served = time.monotonic(), 0
    each = 101  # tokens of a turn: one of the prompt
    for i in range(80):
        num_served += pair.chat("wordy", i, chunks=100) == 200
        time.sleep(0.05)
    refilled = (time.monotonic() - began) * 3000 / 60
    assert 0.9 * 3000 <= num_served * each <= 1.1 * 3000 + refilled + 2 * each


def test_sessions_of_both_count(pair: Limited) -> None:
    statuses = [pair.chat("many", i, session=f"m{i}") for i in range(16)]
    assert statuses == [200] * 10 + [429] * 6
    assert pair.chat("many", 1, session="m0") == 200  # it moves to the other one


def test_requests_at_once_hold_over_both_and_are_free_after_a_kill(pair: Limited) -> None:
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(until_let_in, pair, i) for i in (0, 0, 0, 0, 1, 1)]
        end = time.monotonic() + PATIENCE_S
        while sum(map(num_running, pair.servers)) < 6:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert pair.burst("busy", 8) == {429: 8}
        pair.servers[0].process.kill()
        while pair.chat("busy", 1) != 200:
            assert time.monotonic() < end
            time.sleep(0.2)
        assert sum(x.exception() is not None for x in asked) == 4  # those of the killed one


def num_running(server: Server) -> int:
    found = re.search(r"thermocline_turns_running (\d+)", metrics(server))
    return int(found[1])


def until_let_in(pair: Limited, i: int) -> None:
    """Take a turn that lasts, or try again until there is a place for it."""
    while pair.chat("busy", i, 300, 0.1) == 429:
        time.sleep(0.2)


def test_without_redis_each_counts_for_itself_and_says_so(pair: Limited) -> None:
    """The first server is dead by now."""
    second = pair.servers[1]
    pair.redis.stop()
    try:
        assert pair.chat("busy", 1) == 200
        pair.until_shared(second, 0)
        began = time.monotonic()
        assert [pair.chat("busy", 1) for _ in range(5)] == [200] * 5
        assert time.monotonic() - began < 30
        second.wait_for("limits hold at this gateway alone")
    finally:
        pair.redis.cont()
    pair.until_shared(second, 1)
