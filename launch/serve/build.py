"""The composition root: wires engine, scheduler and gateway by the settings."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import msgspec
from fastapi import FastAPI

from engines.base import Engine, EngineError
from engines.config import WorkerConfig
from engines.registry import UnknownEngine, create_engine
from gateway.app import create_app
from gateway.config import LOOPBACK, GatewayConfig
from gateway.keys import BadKeyLine, Tenants
from gateway.metrics import Metrics
from gateway.models.served_model import ServedModel
from gateway.telemetry.tracing import PassOn, Tracing
from kvstore.codecs.names import EXACT
from kvstore.codecs.presets import check_name, is_exact
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.tiers.seal import read_secret
from launch.errors import LaunchError, UsageError
from launch.machine.blas import Blas, find_blas
from launch.machine.interpreters import CHILD_ENV
from launch.machine.memory import machine_memory
from launch.machine.private_folders import compile_environment, server_folder
from launch.model import Model, find_model
from launch.plan.cache_shape import NotUnderstood
from launch.plan.serve_checks import check_family, check_hot_budget, check_hot_codec
from launch.plan.served_cache import served_cache
from launch.serve.keys import key_lines
from launch.serve.preflight import check_memory, check_tiers
from launch.serve.secret import secret_path, server_secret
from launch.serve.stored import stored_objects
from launch.settings.default_budgets import weights_bytes
from launch.settings.effective_settings import EffectiveSettings, require_installed
from launch.settings.schema import Settings
from scheduler.sessions import SessionManager

log = logging.getLogger("thermocline.launch")


@dataclass(frozen=True)
class BuiltServer:
    """An app with everything behind it, ready to start; nothing runs yet."""

    app: FastAPI
    engine: Engine
    model_name: str
    tenants: Tenants
    blas: Blas | None  # None: the engine is not one that needs it


@contextmanager
def build(effective: EffectiveSettings, environ: Mapping[str, str]) -> Iterator[BuiltServer]:
    """Wire everything together; the folder of the sockets exists inside the block only.

    Raises:
        UsageError, LaunchError: a setting cannot be followed; says what to do.
    """
    settings, kind = effective.settings, effective.engine_kind
    tenants = _tenants(settings, effective.folders.data)
    _check_reach(settings, tenants)
    _check_admins(settings.gateway, tenants)
    _check_codecs(settings.store)
    require_installed(effective)
    attached = kind == "attached"  # it has folders of its own
    cache = effective.folders.cache
    compiled = {} if attached else compile_environment(cache, environ)
    blas = find_blas(environ, cache) if kind == "mlx" else None
    model = _model(effective)
    check_family(effective, model)
    check_hot_codec(effective, model)
    _check_memory(effective, model)
    check_hot_budget(effective, model)
    store = _store(effective, model)
    if kind in ("mlx", "vllm"):
        ranks = settings.engine.vllm.tensor_parallel if kind == "vllm" else 0
        check_tiers(store, vllm_ranks=ranks)
    with nullcontext("") if attached else server_folder(cache, environ) as runtime_dir:
        worker = WorkerConfig(
            engine=settings.engine,
            store=store,
            model_path=model.path,
            served_model_name=model.name,
            runtime_dir=str(runtime_dir),
            token=settings.engine.token or secrets.token_urlsafe(32),
            data_path=str(effective.folders.data),
            log_level=settings.log_level,
        )
        engine = _engine(kind, worker, {**compiled, **CHILD_ENV, **(blas.env if blas else {})})
        metrics = Metrics()
        sessions = SessionManager(
            engine,
            settings.scheduler,
            salt_of=tenants.salt_of,
            observer=metrics,
            memory=machine_memory,
        )
        stored = stored_objects(
            settings.gateway, settings.store, effective.folders.data, tenants.key_of
        )
        served = ServedModel.of(engine, sessions, settings.gateway, metrics.saved)
        app = create_app(settings.gateway, [served], tenants, metrics, stored)
        app.state.gateway.tracing = _tracing(settings.gateway)
        yield BuiltServer(app, engine, model.name, tenants, blas)


def _tracing(config: GatewayConfig) -> Tracing:
    if not config.otlp_endpoint:
        return PassOn()
    try:
        from gateway.telemetry.otlp import OtlpTracing
    except ImportError as error:
        raise UsageError(
            "gateway.otlp_endpoint needs OpenTelemetry's packages: pip install 'thermocline[otlp]'"
        ) from error
    return OtlpTracing(config.otlp_endpoint, version("thermocline"))


def _engine(kind: str, worker: WorkerConfig, env: Mapping[str, str]) -> Engine:
    try:
        return create_engine(kind, worker, env)
    except UnknownEngine as error:
        raise UsageError(str(error)) from error
    except EngineError as error:
        raise LaunchError(str(error)) from error


def _model(effective: EffectiveSettings) -> Model:
    """The model that the engine is to load, under the name that clients use."""
    engine = effective.settings.engine
    if effective.engine_kind in (
        "attached",
        "fake",
    ):  # the first has its model, the second needs none
        return Model(engine.model, engine.served_model_name or effective.engine_kind, None)
    model = find_model(engine.model, effective.folders.cache)
    model.require_weights()
    return replace(model, name=engine.served_model_name or model.name)


def _check_memory(effective: EffectiveSettings, model: Model) -> None:
    if effective.engine_kind in ("attached", "fake"):  # its memory is taken already, or not ours
        return
    settings, elsewhere = effective.settings, effective.hot_on_gpu
    check_memory(
        weights=None if elsewhere or model.folder is None else weights_bytes(model.folder, False),
        hot_bytes=0 if elsewhere else settings.engine.hot_bytes,
        ram_bytes=settings.store.ram_bytes,
        free_bytes=settings.scheduler.memory_low_bytes,
        available=machine_memory(),
    )


def _store(effective: EffectiveSettings, model: Model) -> StoreConfig:
    """The store's settings with its folder filled in, and ``raw`` where the model allows no loss.

    Cold sessions lie beside the secret that their keys are derived from.
    """
    config = effective.settings.store
    path = config.disk_path or str(effective.folders.data)
    secret = config.secret_file or str(secret_path(effective.folders.data))
    config = msgspec.structs.replace(config, disk_path=path, secret_file=secret)
    reason = _exact_only(effective, model)
    names = [x for x in (config.codec, config.disk_codec, config.redis_codec) if x]
    lossy = [x for x in names if x == AUTO or not is_exact(x)]
    if not reason or not lossy:
        return config
    named = [x for x in lossy if x != AUTO]
    level = logging.WARNING if named else logging.INFO
    log.log(level, "cold sessions are kept with codec raw instead of %s: %s", lossy[0], reason)
    return msgspec.structs.replace(config, codec=EXACT, disk_codec="", redis_codec="")


def _exact_only(effective: EffectiveSettings, model: Model) -> str:
    """The reason why this model's cache must not be packed with loss; "" if none is known."""
    if model.folder is None:
        return ""
    try:
        return served_cache(effective, model.config()).exact_only
    except NotUnderstood:  # the engine looks at the real cache and decides for itself
        return ""


def _tenants(settings: Settings, data_dir: Path) -> Tenants:
    file = settings.gateway.api_keys_file
    try:
        tenants = Tenants(_secret(settings, data_dir), *key_lines(settings.gateway))
    except BadKeyLine as error:
        raise UsageError(str(error)) from error
    if file and tenants.open_to_all:
        raise UsageError(
            f"{file} holds no API key; add one: thermocline keys new TENANT --append {file}"
        )
    return tenants


def _secret(settings: Settings, data_dir: Path) -> bytes:
    """The secret that salts and seals come from: the server's own, or one that several share."""
    if not settings.store.secret_file:
        return server_secret(data_dir)
    try:
        return read_secret(Path(settings.store.secret_file))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_reach(settings: Settings, tenants: Tenants) -> None:
    gateway: GatewayConfig = settings.gateway
    if tenants.open_to_all and not gateway.on_loopback and not settings.allow_anonymous:
        raise UsageError(
            f"{gateway.host} can be reached from other machines, and no API key is set; make one"
            " with `thermocline keys new TENANT` and pass --api-keys FILE, or say"
            " --allow-anonymous"
        )


def _check_admins(config: GatewayConfig, tenants: Tenants) -> None:
    if config.admin_port and config.admin_host not in LOOPBACK and not tenants.num_admin_keys:
        raise UsageError(
            f"gateway.admin_host {config.admin_host} can be reached from other machines, and there"
            " is no admin key; make one with `thermocline keys new NAME` and put its line into"
            " gateway.admin_keys_file"
        )


def _check_codecs(store: StoreConfig) -> None:
    """Check the names only. Whether a codec may serve this model, the engine decides."""
    for field in ("codec", "disk_codec", "redis_codec"):
        try:
            if (name := getattr(store, field)) not in ("", AUTO):
                check_name(name)
        except UnknownCodec as error:
            raise UsageError(f"store.{field}: {error}") from error
