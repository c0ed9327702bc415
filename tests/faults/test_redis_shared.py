"""Engines that share a server: one leaves what only another can read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.errors import Corrupt, ForeignCodec, RefusedCodec, Unusable
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.tiers.base import Blob
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis


def test_what_only_another_engine_can_read_is_left_to_it(server: RedisServer):
    """In memory of its own it goes if it is refused: no readable one would be stored there."""
    key, near = b"c" + bytes(32), RamTier(1 << 30)
    tier = RedisTier(server.url, deadline_s=10.0)
    stack = TierStack([near, tier], Counters())

    def refused(by: type[Unusable]) -> Callable[[Blob], bytes]:
        def use(blob: Blob) -> bytes:
            raise by("no")

        return use

    for level in (0, 1):
        stack.put(level, [(key, b"segments")])
    assert stack.good_copy(key, [0, 1], refused(ForeignCodec)) == "fingerprint"
    assert near.get_many([key]) == [b"segments"]
    assert stack.good_copy(key, [0, 1], refused(RefusedCodec)) == "fingerprint"
    assert near.get_many([key]) == [None]
    assert tier.get_many([key]) == [b"segments"]
    assert stack.good_copy(key, [1], refused(Corrupt)) == "corrupt"
    assert tier.get_many([key]) == [None]
    tier.close()
