"""Opens what servers share on one Redis: sessions, keys' limits, and stored responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.config import GatewayConfig
from gateway.edge.rates import Rates
from gateway.keys import Tenants
from gateway.models import ServedModel
from gateway.shared.redis_client import AsyncRedis
from gateway.shared.shared_sessions import SharedSessions
from gateway.stored.objects import Objects
from gateway.stored.older import NotMarked, bring_over
from gateway.stored.seal import KeyOf
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.stored import Stored
from gateway.stored.table import StoredLimits, StoreFailed
from kvstore.config import StoreConfig
from launch.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from kvstore.tiers.redis_server.link import RedisLink

log = logging.getLogger("thermocline.launch")
DEADLINE_S: Final = 0.5
RATES_DEADLINE_S: Final = 1.0  # requests wait for it, until one has shown that Redis is away
_PURPOSE: Final = b"limits"
FILE = "stored.sqlite"
MARK = "stored.sealed"  # in the data folder, where the secret is
_DAY_S = 86400.0


def redis_link(store: StoreConfig, deadline_s: float) -> RedisLink:
    """Make a link to the Redis of these settings; nothing is connected yet.

    Raises:
        UsageError: ``store.redis_url`` is not a URL of a Redis server.
        LaunchError: redis-py is not installed.
    """
    try:
        from kvstore.tiers.redis_server.link import RedisLink  # redis-py is an extra

        return RedisLink(store.redis_url, deadline_s)
    except ImportError as error:
        raise LaunchError(f"store.redis_url is set, but {error}") from error
    except ValueError as error:
        raise UsageError(f"store.{error}") from error


def shared_sessions(
    store: StoreConfig, models: Sequence[ServedModel], tenants: Tenants
) -> SharedSessions | None:
    """Make what lists and deletes sessions together; nothing is connected yet.

    None: there is no Redis.

    Raises:
        UsageError: ``store.redis_url`` is not a URL of a Redis server.
        LaunchError: redis-py is not installed.
    """
    if not store.redis_url:
        return None
    redis_link(store, store.redis_deadline_s).close()  # checks the URL
    return SharedSessions(models, tenants, AsyncRedis(store.redis_url, DEADLINE_S))


def rates(store: StoreConfig, tenants: Tenants) -> Rates:
    """Make what counts keys' use, on the Redis if there is one; nothing is connected yet."""
    if not store.redis_url:
        return Rates()
    redis = AsyncRedis(store.redis_url, RATES_DEADLINE_S)
    return Rates(redis, lambda name: tenants.key_of(name, _PURPOSE).hex()[:24])


def stored_objects(
    config: GatewayConfig, store: StoreConfig, data_dir: Path, key_of: KeyOf
) -> Stored:
    """Make the store of responses, conversations and chat completions; nothing is opened yet.

    It is on the server of the cold store's Redis tier if there is one, so that several gateways
    have it in common. ``key_of`` makes the keys that it is sealed with.
    """
    if not config.stored_bytes:
        return Stored()
    limits = StoredLimits(config.stored_bytes, config.stored_days * _DAY_S)
    if store.redis_url:
        return Stored(partial(_in_redis, store, limits, key_of))
    path, mark = data_dir / "stored" / FILE, data_dir / MARK
    return Stored(partial(in_sqlite, path, limits, key_of, mark, not store.encrypt))


def in_sqlite(
    path: Path, limits: StoredLimits, key_of: KeyOf, mark: Path, keeps_damaged: bool = True
) -> Objects:
    """Open a file of stored objects, with all that earlier releases have left in it.

    Raises ``StoreFailed``, as for a full disk: a half of it is not served, or what users delete
    meanwhile would come back.
    """
    table = SqliteTable(path, limits, keeps_damaged=keeps_damaged)
    objects = Objects(table, key_of)
    try:
        bring_over(objects, table, key_of, mark)
    except NotMarked as error:
        log.warning("plain text of an earlier release would still be believed: %s", error)
    except StoreFailed:
        table.close()
        raise
    return objects


def _in_redis(store: StoreConfig, limits: StoredLimits, key_of: KeyOf) -> Objects:
    try:
        from gateway.stored.redis_table import RedisTable  # redis-py is an extra
    except ImportError as error:
        raise StoreFailed(str(error)) from error

    def hidden(tenant: str) -> str:
        return key_of(tenant, b"names of keys").hex()[:32]

    table = RedisTable(store.redis_url, limits, hidden, store.redis_deadline_s)
    return Objects(table, key_of)
