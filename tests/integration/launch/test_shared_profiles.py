"""Two servers on one Redis: one measures the model, and each finds the other's sessions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch.test_first_calibration import codec_of
from tests.integration.launch.test_serve import PROGRAM, Server
from tests.integration.launch.test_several_models import ask, chat
from tests.integration.tiny_models import write_model
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(900)]

TOML = """
[engine]
kind = "mlx"
model = "{model}"
max_context = 512
[store]
redis_url = "{redis}"
secret_file = "{secret}"
disk_bytes = 0
"""
SAID = "word " * 60  # more than a chunk, and less than the context
WITHIN_S = 800.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "tiny").mkdir()
    write_model("llama", folder / "tiny")
    (folder / "secret").write_bytes(b"one secret of several servers")
    (folder / "secret").chmod(0o600)
    return folder


def start(folder: Path, name: str, redis: RedisServer) -> Server:
    own = folder / name
    own.mkdir()
    config = own / "t.toml"
    known = {"model": folder / "tiny", "redis": redis.url, "secret": folder / "secret"}
    config.write_text(TOML.format(**known))
    return Server(own, "--config", str(config), engine="mlx", calibrate=True)


def doctor(folder: Path, name: str) -> str:
    """Return the report about a server of this configuration."""
    own = folder / name
    words = ["doctor", "--config", str(own / "t.toml"), "--set", f"data_dir={own / 'data'}"]
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=120).stdout


def test_the_second_server_takes_over_what_the_first_has_measured(folder: Path, redis: RedisServer):
    one = start(folder, "one", redis)
    try:
        until(lambda: not codec_of(one)["unmeasured"], WITHIN_S)
        measured = codec_of(one)
        assert measured["origin"] == "learned here"
        one.wait_for("published the profile for other engines")
        assert chat(one, "tiny", "travels", SAID)[0] == 200
        assert ask(one, "/v1/sessions/travels/demote", {"tier": "redis"})[0] == 200
        two = start(folder, "two", redis)
        try:
            until(lambda: not codec_of(two)["unmeasured"], WITHIN_S)
            taken = codec_of(two)
            assert taken["origin"].startswith("shared by ")
            assert (taken["id"], taken["tiers"]) == (measured["id"], measured["tiers"])
            log = "".join(two.log)
            assert "packs by the profile that" in log and "measured in" not in log
            outcome = chat(two, "tiny", "travels", SAID)[1]
            assert outcome.startswith("cold-redis") and "tokens=0" not in outcome
            until(lambda: "shared by " in doctor(folder, "two"), WITHIN_S)
        finally:
            assert two.stop() == 0
    finally:
        assert one.stop() == 0
