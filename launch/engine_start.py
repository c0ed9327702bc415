"""Makes the engine of a model: a child process, an attached server, or a router to replicas.

``ENGINES`` is the table of engines by name. Other engines are named as ``module:Attr``.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from engines.base import Engine, EngineError
from engines.config import WorkerConfig
from engines.pool.listed_pool import (
    ListedPool,
    ListedReplica,
    ReplicaList,
    engine_token,
    list_token,
)
from engines.pool.replica_choice import Homes
from engines.pool.replica_pool import MOVES_AT, MOVES_AT_ALONE
from kvstore.config import StoreConfig
from launch.errors import LaunchError, UsageError
from launch.machine.blas import Blas, find_blas
from launch.machine.folders import compile_environment
from launch.machine.installation import CHILD_ENV
from launch.model.find import Model
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import Settings

ENGINES: Mapping[str, str] = {
    "mlx": "engines.client.child_engine:MlxServer",
    "vllm": "engines.client.child_engine:VllmServer",
    "fake": "engines.client.child_engine:FakeServer",
    "attached": "engines.client.engine_client:AttachedEngine",
}


def engine_of(
    effective: EffectiveSettings,
    model: Model,
    store: StoreConfig,
    runtime_dir: Path | None,
    environ: Mapping[str, str],
) -> tuple[Engine, Blas | None]:
    """Return the engine, which is not started yet, and the BLAS for it (None if it needs none).

    Args:
        store: the settings of the engine's cold store, with all paths filled in.
        runtime_dir: the folder of the engine's sockets; None if it runs elsewhere.

    Raises:
        UsageError, LaunchError: a setting cannot be followed; the message gives the remedy.
    """
    settings, kind = effective.settings, effective.engine_kind
    compiled = compile_folders(effective, environ)
    blas = find_blas(environ, effective.folders.cache) if kind == "mlx" else None
    worker = WorkerConfig(
        engine=settings.engine,
        store=store,
        model_path=model.path,
        served_model_name=model.name,
        runtime_dir=str(runtime_dir or ""),
        token=settings.engine.token or secrets.token_urlsafe(32),
        data_path=str(effective.folders.data),
        log_level=settings.log_level,
    )
    env = {**compiled, **CHILD_ENV, **(blas.env if blas else {})}
    try:
        return create_engine(kind, worker, env), blas
    except EngineError as error:
        raise LaunchError(str(error)) from error


def compile_folders(effective: EffectiveSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Check the folders into which an engine compiles; return the variables that name them."""
    if effective.engine_kind == "attached":  # such an engine has its own folders
        return {}
    return compile_environment(effective.folders.cache, environ)


def listed_pool(settings: Settings, secret: bytes, model_name: str) -> ListedPool:
    """Make the pool of the replicas that ``engine.replica_list`` lists; nothing is started yet.

    Args:
        secret: the secret from which all tokens are derived.

    Raises:
        UsageError: ``engine.replica_list`` is not a valid address.
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
    homes = Homes(settings.scheduler.max_sessions)
    moves_at = MOVES_AT if settings.store.redis_url else MOVES_AT_ALONE
    return ListedPool(listed.read, client, homes, moves_at)


def create_engine(kind: str, worker: WorkerConfig, env: Mapping[str, str]) -> Engine:
    """Make the engine for a name in ``ENGINES`` or an import string; nothing is started yet.

    Raises:
        UsageError: there is no such name, module or attribute, or it does not make an engine.
        EngineError: the settings are not for this engine.
    """
    factory = engine_factory(kind)
    try:
        engine: object = factory(worker, env)
    except EngineError:
        raise
    except Exception as error:  # third-party code, or an object that is no factory
        if kind in ENGINES:
            raise
        raise UsageError(f"engine {kind!r} makes no engine: {error}") from error
    if not isinstance(engine, Engine):
        raise UsageError(f"engine {kind!r} makes a {type(engine).__name__}, which is no engine")
    return engine


def engine_factory(kind: str) -> Callable[..., Engine]:
    """Return the class for a name in ``ENGINES`` or for an import string.

    Call it with a ``WorkerConfig`` and the variables to add to the engine's environment.

    Raises:
        UsageError: there is no such name, module or attribute.
    """
    target = ENGINES.get(kind, kind)
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        known = ", ".join(sorted(ENGINES))
        raise UsageError(f"no engine is called {kind!r}: use {known}, or module:Attr")
    try:
        factory: Callable[..., Engine] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"engine {kind!r} cannot be loaded: {error}") from error
    return factory
