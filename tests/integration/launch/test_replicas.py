"""Several engines of one model behind one gateway; one of them is killed under load."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from redis import Redis

from kvstore.tiers.redis_server.redis_tier import PREFIX
from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask, chat, metrics, start
from tests.integration.tiny_models import write_model
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAKES = """
[[engines]]
name = "fake"
kind = "fake"
replicas = 3
"""


def engines(server: Server) -> list[int]:
    children = psutil.Process(server.process.pid).children()
    return [x.pid for x in children if "engines." in " ".join(x.cmdline())]


def replicas(server: Server) -> list[bool]:
    (model,) = ask(server, "/v1/models")[2]["data"]
    return [x["ready"] for x in model["replicas"]]


def until_all_ready(server: Server, number: int) -> None:
    until(lambda: replicas(server) == [True] * number, every_s=0.1)


def killed_in_the_midst(server: Server, turns: list[tuple[str, list[str]]]) -> list[str]:
    """Take all turns, six at once, and kill an engine that serves some; returns where KV was."""
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(chat, server, "fake", *(name, *said)) for name, said in turns]
        while sum(x.done() for x in asked) < len(asked) // 4:
            time.sleep(0.01)
        os.kill(engines(server)[0], signal.SIGKILL)
        answers = [x.result() for x in asked]
    assert [status for status, _, _ in answers] == [200] * len(turns)
    return [cache.partition(";")[0] for _, cache, _ in answers]


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tmp_path_factory.mktemp("replicas"), FAKES)
    yield server
    server.stop()


def test_all_is_answered_while_a_replica_is_killed_and_it_comes_back(fakes):
    until_all_ready(fakes, 3)
    assert len(engines(fakes)) == 3
    said = [(f"s{i}", [f"s{i} begins with these words"]) for i in range(60)]
    assert Counter(killed_in_the_midst(fakes, said))["miss"] == 60
    until_all_ready(fakes, 3)
    for _, history in said:
        history += ["well", "and goes on"]
    caches = Counter(chat(fakes, "fake", name, *history)[1].split(";")[0] for name, history in said)
    assert caches["hot"] >= 20  # those of the others are where they were
    rows = ask(fakes, "/v1/sessions?limit=100")[2]["data"]
    assert sorted(x["id"] for x in rows) == sorted(name for name, _ in said)
    assert {ask(fakes, f"/v1/sessions/s{i}", method="DELETE")[0] for i in range(60)} == {200}
    assert ask(fakes, "/v1/sessions")[2]["data"] == []
    assert 'thermocline_engine_replicas{model="fake",state="ready"} 3.0' in metrics(fakes)


REPLICAS = """
[engine]
hot_bytes = "64MiB"
served_model_name = "fake"
model = "{model}"
replicas = 2
[store]
ram_bytes = "64MiB"
disk_bytes = 0
redis_url = "{redis}"
codec = "raw"
"""
WORDS = "the ship sailed over the cold sea towards the far coast " * 8


@pytest.mark.mlx
@pytest.mark.redis
def test_sessions_of_a_killed_engine_return_from_the_shared_tier(tmp_path: Path):
    (tmp_path / "tiny").mkdir()
    write_model("llama", tmp_path / "tiny")
    with RedisServer() as redis:
        toml = REPLICAS.format(model=tmp_path / "tiny", redis=redis.url)
        (tmp_path / "t.toml").write_text(toml)
        server = Server(tmp_path, "--config", str(tmp_path / "t.toml"), engine="mlx")
        try:
            until_all_ready(server, 2)
            said = [(f"s{i}", [f"s{i} {WORDS}"]) for i in range(12)]
            for name, history in said:
                status, cache, answer = chat(server, "fake", name, *history)
                assert (status, cache.split(";")[0]) == (200, "miss")
                history += [answer["choices"][0]["message"]["content"] or "-", f"{name} goes on"]
            until_in_redis(redis.url, len(said))
            caches = Counter(killed_in_the_midst(server, said))
            assert caches["cold-redis"] > 0 and caches["hot"] > 0
            assert caches["miss"] == 0, caches
        finally:
            server.stop()


def until_in_redis(redis_url: str, number: int) -> None:
    """Wait until the shared tier has every session, and no more comes."""
    end, before = time.monotonic() + 60, 0
    with Redis.from_url(redis_url) as client:
        while time.monotonic() < end:
            now = sum(1 for _ in client.scan_iter(PREFIX + b"*"))
            if now == before and now >= 2 * number:  # a record and a blob at least
                return
            before = now
            time.sleep(1.5)
    raise TimeoutError("the sessions are not all in Redis")
