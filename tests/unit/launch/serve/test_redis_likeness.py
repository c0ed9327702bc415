"""``doctor`` says what keeps a server from the data on its Redis, before it is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from kvstore.likeness import WORDS, StoredAs
from kvstore.session import CHUNK_TOKENS
from launch.calibrate.profile_notes import write_note
from launch.doctor import examine
from launch.settings.effective_settings import EffectiveSettings
from tests.redis_server import RedisServer
from tests.unit.launch.conftest import TINY_LLAMA
from tests.unit.launch.plan.test_serve_checks import served_settings

pytestmark = pytest.mark.redis
SECRET = b"s" * 32


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


def settings(folder: Path, redis_url: str) -> EffectiveSettings:
    (folder / "secret").write_bytes(SECRET)
    values = {"store__redis_url": redis_url, "store__secret_file": str(folder / "secret")}
    return served_settings(folder, TINY_LLAMA, {"engine__kind": "mlx", **values})


def found(effective: EffectiveSettings) -> tuple[str, str]:
    (row,) = (x for x in examine(effective, {}) if x.about == "redis data")
    return row.verdict, row.text


@pytest.mark.parametrize(
    ("change", "secret", "differs"),
    [
        ({}, SECRET, ""),
        ({"fingerprint": "f2"}, SECRET, "fingerprint"),
        ({"chunk_tokens": 7}, SECRET, "chunks"),
        ({"encrypt": True}, SECRET, "secret"),
        ({}, b"o" * 32, "secret"),
        ({"model": "another", "fingerprint": "f2"}, b"o" * 32, ""),
    ],
)
def test_doctor_names_what_differs(tmp_path, redis_url, change, secret, differs):
    effective = settings(tmp_path, redis_url)
    write_note(effective, "f1")  # it was served here before
    there = StoredAs(
        model=tmp_path.name,
        fingerprint="f1",
        chunk_tokens=CHUNK_TOKENS,
        encrypt=False,
    )
    other = msgspec.structs.replace(there, **change)
    with redis.Redis.from_url(redis_url) as client:
        client.set(other.key, other.value(secret))
    expected = ("warning", WORDS[differs]) if differs else ("ok", "nothing on this Redis differs")
    verdict, text = found(effective)
    assert (verdict, text[: len(expected[1])]) == expected


def test_a_redis_that_is_away_is_a_failure(tmp_path: Path):
    verdict, text = found(settings(tmp_path, f"unix://{tmp_path}/none.sock"))
    assert verdict == "failure"
    assert "does not answer" in text
