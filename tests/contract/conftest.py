"""A cold store on memory and disk, for the tests of what it promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.contract.store_rig import MIB, Rig, Store
from tests.redis_server import server  # noqa: F401


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as opened:
        yield Rig(opened)


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)]


@pytest.fixture
def store(rig: Rig, tiers: list[Tier]) -> Store:
    return rig.open(tiers)
