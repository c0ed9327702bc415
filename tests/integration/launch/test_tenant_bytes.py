"""Two servers on one Redis: a tenant's bytes of memory are within its limit on both together."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.fake_worker.fake_sessions import COLD_BYTES_PER_TOKEN
from gateway.keys import generate_key
from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.redis]

WORDS = 100
SESSION = (2 * WORDS + 10) * COLD_BYTES_PER_TOKEN  # the fake engine repeats the prompt
MOST = 12 * SESSION
PATIENCE_S = 60.0


class Pair:
    """Two servers with one secret, one list of keys and one Redis."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.keys = {}
        lines = []
        for name, limits in {"bounded": f"ram_bytes={MOST}", "free": "sessions=1000"}.items():
            self.keys[name], line = generate_key(name)
            lines.append(f"{line} {limits}\n")
        (folder / "keys").write_text("".join(lines))
        (folder / "secret").write_bytes(b"s" * 32)
        more = ["--api-keys", str(folder / "keys"), "--redis", redis.url, "--set"]
        more.append(f"store.secret_file={folder / 'secret'}")
        homes = [folder / "one", folder / "two"]
        for home in homes:
            home.mkdir()
        self.servers = [Server(home, *more) for home in homes]

    def chat(self, name: str, i: int, session: str) -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "word " * WORDS}]}
        headers = {"authorization": f"Bearer {self.keys[name]}", "x-session-id": session}
        assert ask(self.servers[i], "/v1/chat/completions", body, **headers)[0] == 200

    def listed(self, name: str, i: int) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.servers[i].url}/v1/sessions",
            headers={"authorization": f"Bearer {self.keys[name]}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def held(self) -> int:
        """The bytes of the bounded tenant in memory of both engines, as these said last."""
        shown = [self.listed("bounded", i)["tier_bytes"]["ram"] for i in range(2)]
        assert [x["limit"] for x in shown] == [MOST, MOST]
        assert not any("only_here" in x for x in shown)
        return max(x["held"] for x in shown)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with RedisServer() as redis:
        pair = Pair(tmp_path_factory.mktemp("bytes"), redis)
        yield pair
        for server in pair.servers:
            server.stop()


def test_bytes_of_both_count_and_no_turn_fails(pair: Pair) -> None:
    for i in range(2):
        pair.chat("bounded", i, "first")
    time.sleep(2.0)  # from now on the engines know their limits
    for i in range(40):
        pair.chat("bounded", i % 2, f"s{i}")
        pair.chat("free", i % 2, f"f{i}")
        if i % 4 == 3:
            time.sleep(0.5)
        assert pair.held() <= MOST + SESSION
    end = time.monotonic() + PATIENCE_S
    while pair.held() < 0.7 * MOST:
        assert time.monotonic() < end, pair.held()
        for i in range(2):
            pair.chat("bounded", i, f"more-{time.monotonic()}")
        time.sleep(0.3)
    free = [pair.listed("free", i) for i in range(2)]  # its sessions are not touched
    assert len({x["id"] for each in free for x in each["data"] if x["tier"] == "ram"}) == 40
    assert not any("tier_bytes" in x for x in free)


def test_metrics_count_tenants_at_their_limit_and_why_copies_went(pair: Pair) -> None:
    with urllib.request.urlopen(pair.servers[0].url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'thermocline_tenants_full{tier="ram"}' in text
    assert "bounded" not in text
