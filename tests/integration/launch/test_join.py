"""Two servers on one Redis: an invitation has them share sessions, else they say why not."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.membership import Membership
from kvstore.roster import Facts
from kvstore.tiers.redis_server.link import RedisLink
from tests.integration.launch.test_replicas import WORDS, until_in_redis
from tests.integration.launch.test_serve import PROGRAM, Server
from tests.integration.launch.test_several_models import ask, chat
from tests.integration.tiny_models import write_model
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.mlx, pytest.mark.redis]

TOML = """
[engine]
hot_bytes = "64MiB"
served_model_name = "fake"
model = "{model}"
[store]
ram_bytes = "16MiB"
disk_bytes = 0
codec = "raw"
"""


def thermocline(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "THERMOCLINE_DATA_DIR": str(home / "data")}
    return subprocess.run([*PROGRAM, *arguments], env=environ, capture_output=True, text=True)


class First(NamedTuple):
    """The server that was there first."""

    server: Server
    home: Path
    toml: Path


def until_it_says(server: Server, words: str) -> None:
    end = time.monotonic() + 60
    while words not in (text := ask_text(server)):
        assert time.monotonic() < end, text
        time.sleep(0.2)


def ask_text(server: Server) -> str:
    rows = ask(server, "/admin/findings")[2]["data"]
    return " ".join(x["text"] for x in rows if x["about"] == "members")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as redis:
        yield redis


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[First]:
    home = tmp_path_factory.mktemp("first")
    (home / "tiny").mkdir()
    write_model("llama", home / "tiny")
    toml = home / "t.toml"
    toml.write_text(TOML.format(model=home / "tiny") + f'redis_url = "{redis.url}"\n')
    server = Server(home, "--config", str(toml), engine="mlx")
    yield First(server, home, toml)
    server.stop()


def test_a_server_that_joins_wakes_the_others_sessions(first: First, tmp_path: Path):
    said = ["s", WORDS]
    _, _, answer = chat(first.server, "fake", *said)
    said += [answer["choices"][0]["message"]["content"] or "-", "and goes on"]
    until_in_redis(first.server, 1)
    file = tmp_path / "invitation"
    made = thermocline(first.home, "join", "--config", str(first.toml), "--invite", str(file))
    assert made.returncode == 0, made.stderr
    joined = thermocline(tmp_path, "join", str(file))
    assert "1 engines on this Redis have this secret" in joined.stdout, joined.stderr
    settings = Path(joined.stdout.splitlines()[0].removeprefix("wrote "))
    more = f'\n[engine]\nmodel = "{first.home / "tiny"}"\nserved_model_name = "fake"\n'
    settings.write_text(settings.read_text() + more)
    more_flags = ["--ram", "16MiB", "--disk", "0"]
    second = Server(tmp_path, "--config", str(settings), *more_flags, engine="mlx")
    try:
        assert chat(second, "fake", *said)[1].startswith("cold-redis;")
        until_it_says(second, "1 other engines share")
    finally:
        second.stop()


def test_a_server_says_that_another_one_has_another_secret(first: First, redis: RedisServer):
    facts = Facts(model="fake", fingerprint="f")
    other = Membership(RedisLink(redis.url, 2.0), b"o" * 32, lambda: facts)
    try:
        first.server.wait_for(r"other engines on this Redis \(1\) have another secret")
        until_it_says(first.server, "another secret")
        cache = chat(first.server, "fake", "unknown", "hello")[1]
        assert cache == "miss; tokens=0; reason=foreign-secret"
    finally:
        other.close()
