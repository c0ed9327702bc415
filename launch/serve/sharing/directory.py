"""Connects a server to the directory of sessions on the Redis that it shares."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from engines.fleet.homes import FleetHomes, Homes, LastHomes, SharedHomes
from gateway.directory.directory import Directory
from gateway.keys import Tenants
from gateway.models.loading import Loading
from gateway.models.served_model import ServedModel
from kvstore.config import StoreConfig
from kvstore.directory.entries import Names
from launch.errors import UsageError
from launch.settings.schema import Settings

NAME_FILE: Final = "directory-name"
LONGEST_WAIT_S: Final = 1.0  # until a server that was away is asked again

log = logging.getLogger("thermocline.launch")


def homes_for(
    replicas: Iterable[str], settings: Settings, tenants: Tenants, shared: FleetHomes
) -> Homes:
    """Make what knows the homes of a fleet's sessions.

    Engines that run elsewhere may be used by other servers, too, under the same addresses: then
    these say to each other where they have moved sessions.
    """
    most = settings.scheduler.max_sessions
    if not (settings.engine.url and settings.store.redis_url):
        return LastHomes(most)
    names = Names(tenants.key_of)
    homes = SharedHomes(
        most,
        lambda tenant, id: names.mark(tenant, "", id),
        {names.engine(x): x for x in replicas},
        shared.said,
    )
    shared.fleets.append(homes)
    return homes


def directory_of(
    store: StoreConfig,
    models: Sequence[ServedModel],
    tenants: Tenants,
    loading: Loading | None,
    homes: FleetHomes,
    data_dir: Path,
    stack: ExitStack,
) -> Directory | None:
    """Make it; nothing is connected yet. None where no Redis server is shared.

    Raises ``UsageError``: the URL is none.

    Args:
        data_dir: its name lies there, so that each life of this server goes by the same one.
        stack: lets go of name and connections at its end.
    """
    if not store.redis_url:
        return None
    try:
        from kvstore.tiers.redis_server.book import WriterName
        from kvstore.tiers.redis_server.link import RedisLink  # redis-py is an extra
    except ImportError as error:
        log.warning("sessions of other servers are not known here: %s", error)
        return None
    try:
        link = RedisLink(store.redis_url, store.redis_deadline_s, longest_wait_s=LONGEST_WAIT_S)
    except ValueError as error:
        raise UsageError(f"store.{error}") from error
    stack.callback(link.close)
    name = WriterName(data_dir, NAME_FILE)
    stack.callback(name.release)
    return Directory(models, tenants, link, name.text, loading, homes)
