"""Two gateways on one Redis: what keys use in a minute, and their sessions, count at both.

A tenant's bytes of memory are within its limit on each engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engines.fake_worker.fake_sessions import COLD_BYTES_PER_TOKEN
from gateway.keys import generate_key
from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask, metrics
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.redis]

WORDS = 100
SESSION = (2 * WORDS + 10) * COLD_BYTES_PER_TOKEN  # the fake engine repeats the prompt
MOST = 12 * SESSION
LIMITS = {
    "bounded": f"ram_bytes={MOST}",
    "few": "requests_per_minute=60",
    "free": "requests_per_minute=1000",
    "many": "sessions=10",
}


class Limited:
    """Two servers of the fake engine with one secret, one list of keys with limits, one Redis."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.redis = redis
        keys = {name: generate_key(name) for name in LIMITS}
        self.keys = {name: key for name, (key, _) in keys.items()}
        lines = [f"{line} {LIMITS[name]}\n" for name, (_, line) in keys.items()]
        (folder / "keys").write_text("".join(lines))
        (folder / "secret").write_bytes(b"s" * 32)
        more = ["--api-keys", str(folder / "keys"), "--redis", redis.url, "--set"]
        more.append(f"store.secret_file={folder / 'secret'}")
        homes = [folder / "one", folder / "two"]
        for home in homes:
            home.mkdir()
        self.servers = [Server(home, *more) for home in homes]
        self.numbers = count()  # of sessions: equal turns of one would be served as one
        for server in self.servers:
            self.until_shared(server, 1)

    def listed(self, name: str, i: int) -> dict[str, Any]:
        """What the server lists for that tenant."""
        found: dict[str, Any] = ask(self.servers[i], "/v1/sessions", key=self.keys[name])[2]
        return found

    def until_shared(self, server: Server, value: int) -> None:
        until(lambda: f"thermocline_limits_shared {value}.0" in metrics(server), every_s=0.1)

    def chat(
        self, name: str, i: int, chunks: int = 1, session: str = "", said: str = "hello"
    ) -> int:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": said}],
            "metadata": {"fake": f"chunks={chunks}"},
        }
        session = session or f"{name}-{next(self.numbers)}"
        server, key = self.servers[i % len(self.servers)], self.keys[name]
        return ask(server, "/v1/chat/completions", body, key=key, session=session)[0]

    def burst(self, name: str, number: int, **more: float) -> Counter[int]:
        with ThreadPoolExecutor(number) as pool:
            return Counter(pool.map(lambda i: self.chat(name, i, **more), range(number)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    with RedisServer() as redis:
        pair = Limited(tmp_path_factory.mktemp("shared"), redis)
        yield pair
        for server in pair.servers:
            server.stop()


def test_each_engine_holds_to_the_bytes_and_no_turn_fails(pair: Limited) -> None:
    def turn(name: str, i: int, session: str) -> None:
        said = "word " * WORDS
        assert pair.chat(name, i, chunks=WORDS, session=session, said=said) == 200

    for i in range(2):
        turn("bounded", i, "first")
    time.sleep(2.0)  # from now on the engines know their limits
    for i in range(40):
        turn("bounded", i % 2, f"s{i}")
        turn("free", i % 2, f"f{i}")
    time.sleep(2.0)  # from now on the gateways know what they hold
    for i in range(2):
        shown = pair.listed("bounded", i)["tier_bytes"]["ram"]
        assert shown["limit"] == MOST
        assert MOST - 2 * SESSION < shown["held"] <= MOST
        free = pair.listed("free", i)
        assert "tier_bytes" not in free
        own = [x for x in free["data"] if "elsewhere" not in x]
        assert len(own) == 20  # its sessions are not touched
    text = metrics(pair.servers[0])
    assert 'thermocline_tenants_full{tier="ram"} 1.0' in text
    assert "bounded" not in text


def test_requests_per_minute_hold_over_both(pair: Limited) -> None:
    counts = Counter[int]()
    for _ in range(4):
        counts += pair.burst("few", 20)
    said = [x for server in pair.servers for x in server.log if "gateway alone" in x]
    assert counts == {200: 60, 429: 20}, said


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
            server.wait_for("limits of keys hold for this gateway alone")
    finally:
        pair.redis.cont()
    for server in pair.servers:
        pair.until_shared(server, 1)
