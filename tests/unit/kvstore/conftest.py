"""Stores that tests of their upkeep begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from tests.kv_sessions import disk, open_store, opener, ram
from tests.redis_server import client, server  # noqa: F401

Opened = Callable[..., ColdStore]


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [ram(), disk(tmp_path)]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens stores as ``open_store`` does, and closes them at the end."""
    with opener(open_store) as opened:
        yield opened


@pytest.fixture
def store(opened: Opened, tiers: list[Tier]) -> ColdStore:
    return opened(tiers)
