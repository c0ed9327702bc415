"""Opens each kind of tier with real files and a real server, for the shared tests."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server.redis_tier import RedisTier
from kvstore.tiers.seal import Seal, SealedTier
from tests.redis_server import RedisServer

KINDS = ("ram", "disk", "redis", "signed disk", "sealed redis")
LOCAL = ("ram", "disk", "signed disk")  # with a budget of their own, and pins
AMPLE = 1 << 30


class TierRig:
    """Opens tiers of one kind, each empty, and closes them all at the end."""

    def __init__(self, kind: str, stack: ExitStack, server: RedisServer | None) -> None:
        self.kind = kind
        self._stack = stack
        self._server = server
        self._costs: dict[int, int] = {}

    def open(
        self, capacity_bytes: int = AMPLE, monotonic: Callable[[], float] = time.monotonic
    ) -> Tier:
        """An empty tier."""
        tier = self._open(capacity_bytes, monotonic)
        if self.kind in ("signed disk", "sealed redis"):
            encrypt = self.kind == "sealed redis"
            tier = SealedTier(tier, Seal(b"the rig's own secret", tier.name, encrypt=encrypt))
        self._stack.callback(tier.close)
        return tier

    def _open(self, capacity_bytes: int, monotonic: Callable[[], float]) -> Tier:
        if self.kind.endswith("disk"):
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-disk-"))
            return DiskTier(Path(folder) / "cold", capacity_bytes, monotonic)
        if self.kind.endswith("redis"):
            with redis.Redis.from_url(self._server.url) as client:
                client.flushall()
            return RedisTier(self._server.url, deadline_s=10.0)
        return RamTier(capacity_bytes, monotonic)

    @property
    def has_budget(self) -> bool:
        return self.kind in LOCAL

    def cost(self, length: int) -> int:
        """Measure how much of the budget a blob of this length under a ``key()`` takes."""
        if length not in self._costs:
            tier = self.open()
            tier.put_many([(key(0), blob_of(0, length))])
            self._costs[length] = tier.stats().nbytes
            tier.close()
        return self._costs[length]


@contextmanager
def rig(kind: str, request: pytest.FixtureRequest) -> Iterator[TierRig]:
    with ExitStack() as stack:
        server = request.getfixturevalue("server") if kind.endswith("redis") else None
        yield TierRig(kind, stack, server)


def key(i: int) -> bytes:
    """33 bytes, like the store's; the first one names the kind."""
    return b"c%032d" % i


@functools.lru_cache(maxsize=128)
def blob_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)
