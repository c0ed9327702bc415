"""Which tiers a configuration asks for."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore.config import StoreConfig
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_budget import capacity_within
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier


def open_tiers(config: StoreConfig, disk_path: Path) -> list[Tier]:
    """The enabled tiers, fastest first; the caller closes them.

    A budget of zero bytes turns a tier off; redis needs ``redis_url``. The disk tier lives in
    ``disk_path / "cold"``, which becomes private to this process.

    Raises:
        TierUnavailable: the folder cannot be used, another process uses it, or ``disk_bytes`` is
            too little.
        ValueError: ``redis_url`` is not a URL of a Redis server.
        ImportError: redis is asked for and redis-py not installed.
    """
    tiers: list[Tier] = []
    if config.ram_bytes:
        tiers.append(RamTier(config.ram_bytes))
    if config.disk_bytes:
        tiers.append(DiskTier(disk_path / "cold", capacity_within(config.disk_bytes)))
    if config.redis_url and config.redis_bytes:
        tiers.append(_redis(config))
    return tiers


def _redis(config: StoreConfig) -> Tier:
    from kvstore.tiers.redis_tier import RedisTier  # redis-py is an extra

    tier = RedisTier(
        config.redis_url,
        config.redis_bytes,
        deadline_s=config.redis_deadline_s,
        ttl_s=config.ttl_s,
    )
    # Nobody waits for the answer: a server that hangs must not hold up the engine's start.
    threading.Thread(target=tier.greet, name="kvstore-redis-greeting", daemon=True).start()
    return tier
