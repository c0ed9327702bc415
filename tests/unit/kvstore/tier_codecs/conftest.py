"""A store with a codec for each tier, whose rows show how often they were packed."""

from __future__ import annotations

import pytest

from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from tests.codec_sessions import BOTH
from tests.unit.kvstore.conftest import Opened


@pytest.fixture
def store(opened: Opened, tiers: list[Tier]) -> ColdStore:
    return opened(tiers, codecs=BOTH)
