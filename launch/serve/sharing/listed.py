"""Makes the engine that routes to replicas which an orchestrator, such as Ray, starts and ends."""

from __future__ import annotations

import msgspec

from engines.base import Engine, EngineError
from engines.config import WorkerConfig
from engines.fleet.fleet_engine import MOVES_AT, MOVES_AT_ALONE
from engines.fleet.homes import LastHomes
from engines.fleet.listed_fleet import ListedFleet
from engines.fleet.replica_list import ListedReplica, ReplicaList, engine_token, list_token
from engines.registry import create_engine
from launch.errors import UsageError
from launch.settings.schema import Settings


def listed_fleet(settings: Settings, secret: bytes, model_name: str) -> ListedFleet:
    """Make the engine that ``engine.replica_list`` lists; nothing is started yet.

    Args:
        secret: all tokens follow from it.

    Raises:
        UsageError: the list's address is none.
    """
    worker = WorkerConfig(
        engine=settings.engine,
        store=settings.store,
        model_path="",
        served_model_name=model_name,
        runtime_dir="",
        token=engine_token(secret),
        log_level=settings.log_level,
    )

    def client(replica: ListedReplica) -> Engine:
        own = msgspec.structs.replace(settings.engine, url=replica.url, control=replica.control)
        return create_engine("attached", msgspec.structs.replace(worker, engine=own), {})

    try:
        listed = ReplicaList(settings.engine.replica_list, list_token(secret))
    except EngineError as error:
        raise UsageError(str(error).replace("engine.url", "engine.replica_list")) from error
    homes = LastHomes(settings.scheduler.max_sessions)
    moves_at = MOVES_AT if settings.store.redis_url else MOVES_AT_ALONE
    return ListedFleet(listed.read, client, homes, moves_at)
