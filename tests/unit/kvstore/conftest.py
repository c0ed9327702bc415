"""Stores that tests of their upkeep begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.store.token_store import ColdStore
from kvstore.tiers.base import Tier
from tests.kv_sessions import disk, open_store, ram


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [ram(), disk(tmp_path)]


@pytest.fixture
def store(tiers: list[Tier]) -> Iterator[ColdStore]:
    store = open_store(tiers)
    yield store
    store.close()
