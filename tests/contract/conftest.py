"""Both cold stores, for the tests that hold for either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.contract.store_rig import MIB, BlockRig, Rig, Store, TokenRig


@pytest.fixture(params=[TokenRig(), BlockRig()], ids=lambda rig: rig.name)
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.param


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)]


@pytest.fixture
def store(rig: Rig, tiers: list[Tier]) -> Iterator[Store]:
    store = rig.open(tiers)
    yield store
    store.close()
