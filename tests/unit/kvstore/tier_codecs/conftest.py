"""A store with a codec for each tier, whose rows show how often they were packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.store.token_store import ColdStore
from kvstore.tiers.base import Tier
from tests.codec_sessions import BOTH
from tests.kv_sessions import open_store


@pytest.fixture
def store(tiers: list[Tier]) -> Iterator[ColdStore]:
    store = open_store(tiers, codecs=BOTH)
    yield store
    store.close()
