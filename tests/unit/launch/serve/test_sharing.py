"""The place that is chosen for clients' stored objects, which no other user can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from gateway.config import GatewayConfig
from gateway.stored.objects import Objects
from gateway.stored.table import Steps
from kvstore.config import StoreConfig
from kvstore.likeness import WORDS, StoredAs
from kvstore.session import CHUNK_TOKENS
from launch.calibrate.profile_notes import write_note
from launch.doctor import examine
from launch.serve.sharing import stored_objects
from launch.settings.effective_settings import EffectiveSettings
from tests.old_stored import OldFile
from tests.redis_server import RedisServer
from tests.stored_objects import KEY_OF, content_of, entry, items
from tests.unit.launch.conftest import TINY_LLAMA
from tests.unit.launch.plan.test_served_model import served_settings

MARKER = "the words of a prompt"


def put(objects: Objects) -> Steps[bool]:
    made = entry("1", kind="completion", text=MARKER, metadata={MARKER: MARKER})
    return objects.put(*made, items("i", text=MARKER))


def found(objects: Objects) -> Steps[bytes | None]:
    return objects.show("completion", "1")


async def test_nowhere(tmp_path: Path) -> None:
    stored = stored_objects(GatewayConfig(stored_bytes=0), StoreConfig(), tmp_path, KEY_OF)
    assert not stored.enabled
    assert await stored.ask("a", put, False) is False
    await stored.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.redis
async def test_redis_if_there_is_one(tmp_path: Path) -> None:
    with RedisServer() as server:
        store = StoreConfig(redis_url=server.url)
        one, other = (stored_objects(GatewayConfig(), store, tmp_path, KEY_OF) for _ in range(2))
        assert await one.ask("a", put, False)
        assert MARKER.encode() in (await other.ask("a", found, None) or b"")
        assert MARKER.encode() not in all_of(server)
        assert b"{a}" not in all_of(server)  # names of keys do not show tenants
        await one.close()
        await other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encrypt", [False, True])
async def test_no_file_has_a_word_of_a_prompt(tmp_path: Path, encrypt: bool) -> None:
    """Looked for while the file is in use, its log beside it, as a copy of the folder would."""
    stored = stored_objects(GatewayConfig(), StoreConfig(encrypt=encrypt), tmp_path, KEY_OF)
    assert stored.enabled and not (tmp_path / "stored" / "stored.sqlite").exists()
    assert await stored.ask("a", put, False)
    assert (tmp_path / "stored.sealed").exists()  # beside the secret, and not in their folder
    assert MARKER.encode() in (await stored.ask("a", found, None) or b"")
    assert (tmp_path / "stored" / "stored.sqlite-wal").stat().st_size
    assert MARKER.encode() not in content_of(tmp_path)
    await stored.close()
    assert MARKER.encode() not in content_of(tmp_path)


async def test_nor_one_that_an_older_release_left(tmp_path: Path) -> None:
    """Its log, and a damaged file that it put aside, hold plain text at first."""
    path = tmp_path / "stored" / "stored.sqlite"
    old = OldFile(path)
    old.put("a", "completion", {"id": "1", "text": MARKER, "metadata": {}}, [{"id": MARKER[:3]}])
    (path.parent / "stored.sqlite.damaged").write_bytes(MARKER.encode())
    old.commit()  # and no more: as after a kill
    assert content_of(tmp_path).count(MARKER.encode()) >= 2
    store = StoreConfig(encrypt=True)
    stored = stored_objects(GatewayConfig(), store, tmp_path, KEY_OF)
    await stored.ask("", Objects.tidy, None)
    assert MARKER.encode() in (await stored.ask("a", found, None) or b"")
    assert MARKER.encode() not in content_of(tmp_path)
    old.close()
    await stored.close()


async def test_a_deletion_reaches_the_file_that_was_put_aside(tmp_path: Path) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    (folder / "stored.sqlite").write_bytes(b"no database" * 400)
    stored = stored_objects(GatewayConfig(), StoreConfig(), tmp_path, KEY_OF)
    aside = folder / "stored.sqlite.damaged"
    deletions: list[Callable[[Objects], Steps[int]]] = [
        lambda objects: objects.delete("response", "of the lost ones"),
        lambda objects: objects.forget("a session"),
    ]
    for delete in deletions:
        aside.write_bytes(b"no database")
        assert await stored.ask("a", put, False)
        assert aside.exists()
        assert await stored.ask("a", delete, 1) == 0
        assert not aside.exists()
    await stored.close()


def all_of(server: RedisServer) -> bytes:
    """All names and values that a server holds."""
    with redis.Redis.from_url(server.url) as client:
        read = {
            b"string": client.get,
            b"hash": client.hgetall,
            b"zset": lambda key: client.zrange(key, 0, -1),
        }
        values = [read[client.type(key)](key) for key in client.scan_iter()]
        return b" ".join(client.scan_iter()) + repr(values).encode()


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


def doctor_finds(effective: EffectiveSettings) -> tuple[str, str]:
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
    verdict, text = doctor_finds(effective)
    assert (verdict, text[: len(expected[1])]) == expected


def test_a_redis_that_is_away_is_a_failure(tmp_path: Path):
    verdict, text = doctor_finds(settings(tmp_path, f"unix://{tmp_path}/none.sock"))
    assert verdict == "failure"
    assert "does not answer" in text
