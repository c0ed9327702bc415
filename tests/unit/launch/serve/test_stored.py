"""The place that is chosen for what clients ask to be stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.stored.shelf import Entry, Shelf
from kvstore.config import StoreConfig
from launch.serve.stored import stored_objects
from tests.redis_server import RedisServer

ENTRY = Entry("response", "1", "s", b"{}")


def put(shelf: Shelf) -> bool:
    return shelf.put("a", ENTRY)


def found(shelf: Shelf) -> bool:
    return shelf.get("a", "response", "1") is not None


async def test_a_file_in_the_data_folder(tmp_path: Path) -> None:
    for config, path in (
        (GatewayConfig(), tmp_path / "stored" / "stored.sqlite"),
        (GatewayConfig(stored_path=str(tmp_path / "x")), tmp_path / "x" / "stored.sqlite"),
    ):
        stored = stored_objects(config, StoreConfig(), tmp_path)
        assert stored.enabled and not path.exists()
        assert await stored.ask(put, False)
        assert path.exists()
        await stored.close()


async def test_nowhere(tmp_path: Path) -> None:
    stored = stored_objects(GatewayConfig(stored_bytes=0), StoreConfig(), tmp_path)
    assert not stored.enabled
    assert await stored.ask(put, False) is False
    await stored.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.redis
async def test_redis_if_there_is_one(tmp_path: Path) -> None:
    with RedisServer() as server:
        store = StoreConfig(redis_url=server.url)
        one, other = (stored_objects(GatewayConfig(), store, tmp_path) for _ in range(2))
        assert await one.ask(put, False)
        assert await other.ask(found, False)
        await one.close()
        await other.close()
    assert list(tmp_path.iterdir()) == []
