"""Opens the place for stored responses and chats: Redis, a SQLite file, or none."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.stored.entry_seal import KeyOf
from gateway.stored.shelf import Limits, Shelf, StoreFailed
from gateway.stored.sqlite_shelf import SqliteShelf
from gateway.stored.stored import Stored
from kvstore.config import StoreConfig

FILE = "stored.sqlite"
MARK = "stored.sealed"  # in the data folder, where the secret is
_DAY_S = 86400.0


def stored_objects(
    config: GatewayConfig, store: StoreConfig, data_dir: Path, key_of: KeyOf
) -> Stored:
    """Make the store of responses, conversations and chat completions; nothing is opened yet.

    It is on the server of the cold store's Redis tier if there is one, so that several gateways
    have it in common. ``key_of`` makes the keys that it is sealed with.
    """
    if not config.stored_bytes:
        return Stored()
    limits = Limits(config.stored_bytes, config.stored_days * _DAY_S)
    if store.redis_url:
        return Stored(partial(_redis_shelf, store, limits), key_of)
    folder = Path(config.stored_path).expanduser() if config.stored_path else data_dir / "stored"
    shelf = partial(
        SqliteShelf, folder / FILE, limits, mark=data_dir / MARK, keeps_damaged=not store.encrypt
    )
    return Stored(shelf, key_of)


def _redis_shelf(store: StoreConfig, limits: Limits) -> Shelf:
    try:
        from gateway.stored.redis_shelf import RedisShelf  # redis-py is an extra
    except ImportError as error:
        raise StoreFailed(str(error)) from error
    return RedisShelf(store.redis_url, limits, store.redis_deadline_s)
