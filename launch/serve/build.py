"""The composition root: builds engines, scheduler and gateway from the settings."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
from fastapi import FastAPI

from engines.base import Engine, TierName
from engines.pool.hub_cache import HubCache
from engines.pool.loading import Loading
from engines.pool.on_demand import OnDemand
from engines.pool.replica_choice import Homes
from engines.pool.replica_pool import MOVES_AT, MOVES_AT_ALONE, ReplicaPool
from gateway.app import create_app
from gateway.config import LOOPBACK, GatewayConfig
from gateway.edge.key_list import lines_of
from gateway.identity.names import is_task_session
from gateway.keys import BadKeyLine, Tenants
from gateway.models import ServedModel
from gateway.watch.metrics import Metrics
from gateway.watch.telemetry import Tracing
from kvstore.codecs.names import EXACT
from kvstore.codecs.presets import is_exact
from kvstore.config import AUTO, StoreConfig
from launch.engine_start import compile_folders, engine_of, listed_pool
from launch.errors import UsageError
from launch.families.cache_shape import NotUnderstood
from launch.machine.blas import Blas
from launch.machine.folders import server_folder
from launch.machine.resources import machine_memory
from launch.model.find import Model, find_model
from launch.plan.served_model import check_served, served_cache
from launch.serve.preflight import check_codecs, check_memory, check_tiers
from launch.serve.secret import secret_of, secret_path
from launch.serve.sharing import rates, shared_sessions, stored_objects
from launch.settings.budgets import at_once, weights_bytes
from launch.settings.effective_settings import (
    EffectiveSettings,
    EngineSettings,
    replica_settings,
    require_installed,
)
from launch.settings.schema import EngineEntry, Settings
from scheduler.config import SchedulerConfig
from scheduler.headroom import Headroom
from scheduler.sessions import PLACES_ELSEWHERE, SessionManager

log = logging.getLogger("thermocline.launch")


@dataclass(frozen=True)
class BuiltEngine:
    """An engine, its settings and its model; nothing runs yet."""

    effective: EffectiveSettings
    engine: Engine
    model_name: str
    blas: Blas | None  # None: this kind of engine needs no BLAS of ours
    on_demand: bool = False
    num_replicas: int = 1


@dataclass(frozen=True)
class BuiltServer:
    """An app with all its parts, ready to start; nothing runs yet."""

    app: FastAPI
    engines: Sequence[BuiltEngine]
    tenants: Tenants

    @property
    def gave_up(self) -> bool:
        """True once all engines have given up; on-demand ones count only if there are no others."""
        always = [x for x in self.engines if not x.on_demand] or self.engines
        return all(x.engine.gave_up for x in always)


@contextmanager
def build(effective: EffectiveSettings, environ: Mapping[str, str]) -> Iterator[BuiltServer]:
    """Build the server; the folders of its sockets exist only inside the ``with`` block.

    Raises:
        UsageError, LaunchError: a setting cannot be followed; the message gives the remedy.
    """
    settings = effective.settings
    tenants = _tenants(settings, effective.folders.data)
    entries = effective.each
    for each in entries:
        compile_folders(each.effective, environ)  # checked before the sample model is written there
    models = [_checked_model(x) for x in entries]
    _check_aliases(settings)
    _check_memory(entries, models, settings)
    with ExitStack() as stack:
        metrics, served, engines, on_demand = Metrics(), [], [], []
        headroom = None
        if len(entries) > 1:
            headroom = Headroom(
                machine_memory, settings.scheduler, clock=time.monotonic, observer=metrics
            )
        for (entry, own), model in zip(entries, models, strict=True):
            built = _built_engine(own, model, environ, stack)
            sessions = SessionManager(
                built.engine,
                _limits_of(built, settings.scheduler),
                salt_of=tenants.salt_of,
                observer=metrics,
                memory=machine_memory,
                is_task=is_task_session,
                headroom=headroom,
            )
            if entry.load == "on-demand":
                on_demand.append(_on_demand(entry, own.settings, built.engine, sessions))
            served.append(
                ServedModel(
                    built.engine,
                    sessions,
                    settings.gateway,
                    metrics,
                    given_name=entry.name,
                    aliases=entry.aliases,
                    path=model.path,
                    weights_bytes=weights_bytes(model.folder, False) if model.folder else None,
                    on_demand=on_demand[-1] if entry.load == "on-demand" else None,
                )
            )
            engines.append(replace(built, on_demand=entry.load == "on-demand"))
        loading = None
        if on_demand:
            places, wait_s = settings.capacity.on_demand, settings.scheduler.max_wait_s
            loading = Loading(on_demand, places, wait_s, on_load=metrics.loaded)
        store, data = settings.store, effective.folders.data
        shared = shared_sessions(store, served, tenants)  # the first to check the URL of Redis
        app = create_app(
            settings.gateway,
            served,
            tenants,
            metrics,
            stored_objects(settings.gateway, store, data, tenants.key_of),
            loading,
            headroom,
            rates(store, tenants),
            shared,
        )
        app.state.gateway.tracing = tracing_of(settings.gateway)
        app.state.gateway.hub = HubCache(_hub_python(entries))
        yield BuiltServer(app, engines, tenants)


def _hub_python(entries: Sequence[EngineSettings]) -> str:
    """Return a Python that has the hub's client: that of vLLM if we start it, else our own."""
    found = (x.effective.settings.engine.vllm.python for x in entries)
    return next(filter(None, found), sys.executable)


def _checked_model(named: EngineSettings) -> Model:
    """Return the model of an engine. Raises ``UsageError`` if its settings cannot serve it."""
    effective = named.effective
    try:
        check_codecs(effective.settings.store)
        require_installed(effective)
        model = _model(effective)
        each = next(iter(replica_settings(effective).values()))  # all replicas pass or none
        check_served(each, model)
        return model
    except UsageError as error:
        if not named.entry.name:
            raise
        raise UsageError(f"engines, {named.entry.name}: {error}") from error


def _check_aliases(settings: Settings) -> None:
    names = {name for x in settings.engines for name in (x.name, *x.aliases)}
    for alias in settings.gateway.model_aliases:
        if alias in names:
            raise UsageError(f"gateway.model_aliases: {alias!r} is a model's name; leave it out")
    if settings.engines and settings.engine.served_model_name:
        raise UsageError("engine.served_model_name: with [[engines]], set the name of each instead")


def _built_engine(
    effective: EffectiveSettings, model: Model, environ: Mapping[str, str], stack: ExitStack
) -> BuiltEngine:
    """Make the engine of a model; with replicas it is a pool that routes to them."""
    settings = effective.settings
    if settings.engine.replica_list:
        listed = listed_pool(settings, secret_of(settings, effective.folders.data), model.name)
        return BuiltEngine(
            effective, listed, model.name, None, num_replicas=settings.engine.replicas
        )
    each = {
        name: _replica(x, model, environ, stack) for name, x in replica_settings(effective).items()
    }
    built = next(iter(each.values()))
    if len(each) == 1:
        return built
    pool = ReplicaPool(
        {name: x.engine for name, x in each.items()},
        Homes(settings.scheduler.max_sessions),
        MOVES_AT if settings.store.redis_url else MOVES_AT_ALONE,
    )
    return replace(built, effective=effective, engine=pool, num_replicas=len(each))


def _limits_of(built: BuiltEngine, config: SchedulerConfig) -> SchedulerConfig:
    """Return ``config`` with ``max_running``: the turns that all replicas can run at once."""
    own = built.effective
    places = own.settings.engine.max_batch if own.is_ours else PLACES_ELSEWHERE
    num = (config.max_running or places) * built.num_replicas
    return msgspec.structs.replace(config, max_running=num)


def _replica(
    effective: EffectiveSettings, model: Model, environ: Mapping[str, str], stack: ExitStack
) -> BuiltEngine:
    kind = effective.engine_kind
    store = _store(effective, model)
    if effective.is_ours:
        ranks = effective.settings.engine.vllm.tensor_parallel if kind == "vllm" else 0
        check_tiers(store, vllm_ranks=ranks)
    runtime_dir = None
    if kind != "attached":
        runtime_dir = stack.enter_context(server_folder(effective.folders.cache, environ))
    engine, blas = engine_of(effective, model, store, runtime_dir, environ)
    return BuiltEngine(effective, engine, model.name, blas)


def _on_demand(
    entry: EngineEntry, settings: Settings, engine: Engine, sessions: SessionManager
) -> OnDemand:
    """Make the loader of an on-demand model.

    Raises ``UsageError`` if we cannot unload the engine, or its sessions would then be lost.
    """
    if settings.engine.url or settings.engine.replica_list:
        raise UsageError(
            f"engines, {entry.name}: this server cannot unload an engine that runs elsewhere; leave"
            " out load = on-demand"
        )
    store = settings.store
    rests_in: TierName | None = "disk" if store.disk_bytes else "redis" if store.redis_url else None
    if rests_in is None:
        raise UsageError(
            f"engines, {entry.name}: load = on-demand needs a disk tier (--disk) or Redis"
            " (--redis) for its sessions while it is not loaded"
        )
    timeout_s = settings.engine.start_timeout_s
    return OnDemand(entry.name, engine, sessions, entry.unload_after_s, timeout_s, rests_in)


def _model(effective: EffectiveSettings) -> Model:
    """Return the model that the engine is to load, with the name that clients use."""
    engine = effective.settings.engine
    if not engine.served_model_name.isprintable():
        raise UsageError("engine.served_model_name has control characters, which terminals obey")
    if effective.engine_kind in ("attached", "fake"):  # these load no model of ours
        return Model(engine.model, engine.served_model_name or effective.engine_kind, None)
    model = find_model(engine.model, effective.folders.cache)
    model.require_weights()
    return replace(model, name=engine.served_model_name or model.name)


def _check_memory(
    entries: Sequence[EngineSettings], models: Sequence[Model], settings: Settings
) -> None:
    """Check that all models that may be loaded at once fit into the machine's memory."""
    weights: list[int | None] = []
    hot, ram, is_ours = [], [], False
    for (_, own), model in zip(entries, models, strict=True):
        # An attached engine already has its memory, or has it elsewhere; a fake one needs none.
        ours = own.engine_kind not in ("attached", "fake")
        here, engine = ours and not own.hot_on_gpu, own.settings.engine
        nbytes = weights_bytes(model.folder, False) if here and model.folder else 0
        weights.append(nbytes and nbytes * engine.replicas)
        hot.append(engine.hot_bytes * here)
        ram.append(own.settings.store.ram_bytes * ours)
        is_ours = is_ours or ours
    if not is_ours:
        return
    rows, places = [x.entry for x in entries], settings.capacity.on_demand
    known = None if None in weights else at_once(rows, places, [x or 0 for x in weights])
    check_memory(
        weights=known,
        hot_bytes=at_once(rows, places, hot),
        ram_bytes=at_once(rows, places, ram),
        free_bytes=settings.scheduler.memory_low_bytes,
        available=machine_memory(),
    )


def _store(effective: EffectiveSettings, model: Model) -> StoreConfig:
    """Return the store's settings with its paths filled in, and the codec ``raw`` where the model
    allows no lossy one.

    By default cold sessions are stored beside the secret from which their keys are derived.
    """
    config = effective.settings.store
    path = config.disk_path or str(effective.folders.data)
    secret = config.secret_file or str(secret_path(effective.folders.data))
    config = msgspec.structs.replace(config, disk_path=path, secret_file=secret)
    reason, codec = "", config.codec
    with suppress(NotUnderstood):  # the engine looks at the real cache and decides for itself
        reason = served_cache(effective, model.config()).exact_only if model.folder else ""
    if not reason or (codec != AUTO and is_exact(codec)):
        return config
    level = logging.INFO if codec == AUTO else logging.WARNING
    log.log(level, "cold sessions are kept with codec raw instead of %s: %s", codec, reason)
    return msgspec.structs.replace(config, codec=EXACT)


def _tenants(settings: Settings, data_dir: Path) -> Tenants:
    """Read the API keys.

    Raises:
        UsageError: the keys cannot be read, or other machines could use the server without one.
    """
    config = settings.gateway
    try:
        tenants = Tenants(secret_of(settings, data_dir), *lines_of(config))
    except BadKeyLine as error:
        raise UsageError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        files = " and ".join(x for x in (config.api_keys_file, config.admin_keys_file) if x)
        raise UsageError(f"the API keys {files} cannot be read: {error}") from error
    if (file := config.api_keys_file) and tenants.open_to_all:
        raise UsageError(
            f"{file} holds no API key; add one: thermocline keys new TENANT --append {file}"
        )
    if tenants.open_to_all and not config.on_loopback and not settings.allow_anonymous:
        raise UsageError(
            f"{config.host} can be reached from other machines, and no API key is set; make one"
            " with `thermocline keys new TENANT` and pass --api-keys FILE, or say"
            " --allow-anonymous"
        )
    if config.admin_port and config.admin_host not in LOOPBACK and not tenants.num_admin_keys:
        raise UsageError(
            f"gateway.admin_address {config.admin_address} can be reached from other machines, and"
            " there is no admin key; make one with `thermocline keys new NAME` and put its line"
            " into gateway.admin_keys_file"
        )
    return tenants


def tracing_of(config: GatewayConfig) -> Tracing:
    """Make the tracing of turns. Raises ``UsageError`` if its packages are not installed."""
    if not config.otlp_endpoint:
        return Tracing()
    try:
        from gateway.watch.otlp import OtlpTracing
    except ImportError as error:
        raise UsageError(
            "gateway.otlp_endpoint needs OpenTelemetry's packages: pip install 'thermocline[otlp]'"
        ) from error
    return OtlpTracing(config.otlp_endpoint, version("thermocline"))
