"""Opens the tiers that a configuration enables."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from kvstore.config import StoreConfig
from kvstore.errors import TierInUse, TierUnavailable
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_budget import capacity_within
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.seal import Seal, SealedTier, read_secret

_log = logging.getLogger(__name__)


def open_tiers(config: StoreConfig, disk_path: Path) -> list[Tier]:
    """Open the enabled tiers, fastest first; the caller closes them.

    A budget of zero bytes turns a tier off; Redis needs ``redis_url``. The disk tier is in
    ``disk_path / "cold"``, which becomes private to this process. Deletions that wait for Redis
    are kept in a file in ``disk_path``.

    Raises:
        TierUnavailable: the folder cannot be used, or ``disk_bytes`` is too small.
        TierInUse: another process uses the folder.
        ValueError: ``redis_url`` is not a URL of a Redis server, or the secret is missing or bad.
        ImportError: redis is configured but redis-py is not installed.
    """
    secret = read_secret(Path(config.secret_file)) if config.secret_file else b""
    if config.encrypt and not secret:
        raise ValueError("store.encrypt needs store.secret_file")
    tiers: list[Tier] = []
    if config.ram_bytes:
        tiers.append(RamTier(config.ram_bytes))
    if config.disk_bytes:
        capacity_bytes = capacity_within(config.disk_bytes)
        disk = DiskTier(disk_path / "cold", capacity_bytes)
        tiers.append(_sealed(disk, secret, config))
    if config.redis_url:
        if not secret:
            _log.warning("blobs in redis are not sealed: store.secret_file is not set")
        tiers.append(_sealed(_redis(config, disk_path), secret, config))
    return tiers


def _sealed(tier: Tier, secret: bytes, config: StoreConfig) -> Tier:
    if not secret:
        return tier
    return SealedTier(tier, Seal(secret, tier.name, encrypt=config.encrypt))


def open_usable_tiers(config: StoreConfig, disk_path: Path) -> list[Tier]:
    """Open the enabled tiers, without the disk tier if that cannot be used (on a full disk, say).

    Raises:
        TierInUse: another engine has the folder, which is a mistake of the operator.
        ValueError, ImportError: see ``open_tiers``.
    """
    try:
        return open_tiers(config, disk_path)
    except TierInUse:
        raise
    except TierUnavailable as error:
        _log.warning("cold sessions are not kept on disk: %s", error)
    return open_tiers(msgspec.structs.replace(config, disk_bytes=0), disk_path)


def _redis(config: StoreConfig, folder: Path) -> Tier:
    from kvstore.tiers.redis_server.redis_tier import RedisTier  # redis-py is an extra

    ttl_s = min(config.redis_ttl_s, config.ttl_s or config.redis_ttl_s)
    tier = RedisTier(
        config.redis_url, deadline_s=config.redis_deadline_s, ttl_s=ttl_s, folder=folder
    )
    with contextlib.suppress(OSError):  # logged once a deletion cannot be written there
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tier.watch()  # on another thread: a server that hangs must not delay the engine's start
    return tier
