"""Makes the limits of keys hold over all gateways that share the store's Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.keys import Tenants
from gateway.limits.limit_scripts import Command, Reply
from gateway.limits.shared_limits import SharedLimits
from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from launch.errors import LaunchError

DEADLINE_S: Final = 0.5  # for the task that asks; requests wait for a part of it at most
_PURPOSE: Final = b"limits"


def shared_limits(store: StoreConfig, tenants: Tenants) -> SharedLimits | None:
    """Make what keeps limits together; nothing is connected yet. None: there is no Redis.

    Raises:
        LaunchError: redis-py is missing, or ``store.redis_url`` is no URL of a Redis.
    """
    if not store.redis_url:
        return None
    try:
        from kvstore.tiers.redis_server.link import RedisLink  # redis-py is an extra

        link = RedisLink(store.redis_url, DEADLINE_S)
    except (ImportError, ValueError) as error:
        raise LaunchError(str(error)) from error

    def ask(commands: Sequence[Command]) -> Sequence[Reply]:
        try:
            return link.run(commands)
        except TierUnavailable as error:
            raise ConnectionError(str(error)) from None

    return SharedLimits(ask, lambda name: tenants.key_of(name, _PURPOSE).hex()[:24])
