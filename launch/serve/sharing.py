"""Makes the parts that several servers share on one Redis: sessions, keys' limits, stored objects.

``differences_from_redis`` compares, without an engine, the data there with the data that this
server's engine would store.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.config import GatewayConfig
from gateway.edge.rates import Rates
from gateway.keys import Tenants
from gateway.models import ServedModel
from gateway.shared.redis_client import AsyncRedis
from gateway.shared.shared_sessions import SharedSessions
from gateway.stored.objects import ObjectStore
from gateway.stored.older import bring_over
from gateway.stored.rows import KeyOf
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.stored import Stored
from gateway.stored.table import StoredLimits, StoreFailed
from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.likeness import WORDS, StoredAs, differences, there
from kvstore.session import CHUNK_TOKENS
from kvstore.tiers.seal import read_secret
from launch.calibrate.profile_notes import noted_fingerprint
from launch.errors import LaunchError, UsageError
from launch.model.find import find_model
from launch.serve.secret import secret_path
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import masked

if TYPE_CHECKING:
    from kvstore.tiers.redis_server.link import RedisLink

log = logging.getLogger("thermocline.launch")
DEADLINE_S: Final = 0.5
RATES_DEADLINE_S: Final = 1.0  # a request waits so long for Redis before it counts as away
_PURPOSE: Final = b"limits"
FILE = "stored.sqlite"
MARK = "stored.sealed"  # in the data folder, where the secret is
_DAY_S = 86400.0
SEED_VARIABLE = "PYTHONHASHSEED"


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
    """Make the part that lists and deletes sessions of all servers; None without Redis.

    Nothing is connected yet.

    Raises:
        UsageError: ``store.redis_url`` is not a URL of a Redis server.
        LaunchError: redis-py is not installed.
    """
    if not store.redis_url:
        return None
    redis_link(store, store.redis_deadline_s).close()  # checks the URL
    return SharedSessions(models, tenants, AsyncRedis(store.redis_url, DEADLINE_S))


def rates(store: StoreConfig, tenants: Tenants) -> Rates:
    """Make the counters of keys' use, on Redis if there is one; nothing is connected yet."""
    if not store.redis_url:
        return Rates()
    redis = AsyncRedis(store.redis_url, RATES_DEADLINE_S)
    return Rates(redis, lambda name: tenants.key_of(name, _PURPOSE).hex()[:24])


def stored_objects(
    config: GatewayConfig, store: StoreConfig, data_dir: Path, key_of: KeyOf
) -> Stored:
    """Make the store of responses, conversations and chat completions; nothing is opened yet.

    If the cold store has a Redis tier, the objects are on that server, too, so that several
    gateways share them. ``key_of`` derives the keys that encrypt them.
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
) -> ObjectStore:
    """Open a file of stored objects, and convert those of earlier releases.

    Raises ``StoreFailed`` if not all can be converted, as on a full disk: otherwise an object that
    a user deletes meanwhile would come back with the next conversion.
    """
    table = SqliteTable(path, limits, keeps_damaged=keeps_damaged)
    try:
        bring_over(table, key_of, mark)
    except StoreFailed:
        table.close()
        raise
    return ObjectStore(table, key_of)


def _in_redis(store: StoreConfig, limits: StoredLimits, key_of: KeyOf) -> ObjectStore:
    try:
        from gateway.stored.redis_table import RedisTable  # redis-py is an extra
    except ImportError as error:
        raise StoreFailed(str(error)) from error

    def hidden(tenant: str) -> str:
        return key_of(tenant, b"names of keys").hex()[:32]

    table = RedisTable(store.redis_url, limits, hidden, store.redis_deadline_s)
    return ObjectStore(table, key_of)


def differences_from_redis(
    effective: EffectiveSettings, environ: Mapping[str, str], deadline_s: float
) -> list[str]:
    """List the reasons why this server cannot read the data on its Redis, each with the remedy.

    Empty if it can. The model's fingerprint is that of the last start here; before the first start
    it is not compared. For vLLM the chunk size is not compared, since it depends on the size of
    blocks, which is part of the fingerprint.

    Raises:
        UsageError: ``store.redis_url`` is no address of a Redis.
        LaunchError: redis-py is missing, the server does not answer, or the secret cannot be read.
    """
    settings, store = effective.settings, effective.settings.store
    is_vllm = effective.engine_kind == "vllm"
    model = find_model(settings.engine.model, effective.folders.cache)
    own = StoredAs(
        model=settings.engine.served_model_name or model.name,
        part="rank 0" if is_vllm else "",
        fingerprint=noted_fingerprint(effective),
        chunk_tokens=CHUNK_TOKENS,
        encrypt=store.encrypt,
        hash_seed=environ.get(SEED_VARIABLE, "") if is_vllm else "",
    )
    unknown = {"chunks"} if is_vllm else set()
    if not own.fingerprint:
        unknown.add("fingerprint")
    try:
        with closing(redis_link(store, deadline_s)) as link:
            value = there(link.run, own.key)
    except TierUnavailable as error:
        raise LaunchError(f"{masked('', store.redis_url)} does not answer: {error}") from error
    if value is None:
        return []
    found = differences(own.value(_secret(effective)), value)
    return [WORDS[x] for x in found if x not in unknown]


def _secret(effective: EffectiveSettings) -> bytes:
    """Return the secret; b"" if the first start has not made it yet, which equals no other."""
    given = effective.settings.store.secret_file
    path = Path(given).expanduser() if given else secret_path(effective.folders.data)
    if not given and not path.exists():
        return b""
    try:
        return read_secret(path)
    except ValueError as error:
        raise LaunchError(str(error)) from error
