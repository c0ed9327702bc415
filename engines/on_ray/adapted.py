"""Makes of a user's ``LLMConfig`` one whose replicas keep sessions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackConfig
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.llm import LLMConfig

from engines.on_ray.own_settings import SETTINGS, ReplicaSettings
from engines.on_ray.server import ThermoclineServer
from kvstore.config import StoreConfig

LOCAL_MODEL: Final = "engines.on_ray.local_model.LocalModel"
ROUTER: Final = "engines.on_ray.session_router:SessionRouter"
POLICY: Final = "engines.on_ray.scaling:by_waiting_and_heat"
CONNECTOR: Final[Mapping[str, str]] = {
    "kv_connector": "ThermoclineConnector",
    "kv_connector_module_path": "engines.vllm_plugin.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
MIDDLEWARE: Final = "engines.vllm_plugin.process.middleware.CacheHeaderMiddleware"
# Without these vLLM would not be what our plug-in needs, or sessions could not move.
ENGINE: Final[Mapping[str, Any]] = {
    "enable_prefix_caching": True,
    "enable_prompt_tokens_details": True,
    "prefix_caching_hash_algo": "sha256_cbor",
    "scheduler_cls": "engines.vllm_plugin.scheduler.fair_scheduler.fair_scheduler",
    "logits_processors": ["engines.vllm_plugin.measuring.model_access:ForcedTokens"],
    "worker_extension_cls": "engines.vllm_plugin.measuring.model_access.ModelView",
}
# On CPUs: most multiply float32 several times faster, and the kernels want blocks of 32.
ON_CPU: Final[Mapping[str, Any]] = {"block_size": 32, "dtype": "float32", "enforce_eager": True}
DEPLOYMENT: Final[Mapping[str, Any]] = {
    "graceful_shutdown_timeout_s": 300,  # to end answers and to save sessions
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "max_ongoing_requests": 1000,  # of handles: the gateway has limits of its own
}
NO_REPORTS: Final[Mapping[str, str]] = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}


def with_sessions(config: LLMConfig, store: Mapping[str, object], host: str = "") -> LLMConfig:
    """Return a copy of the configuration whose replicas keep sessions; see ``thermocline.ray``.

    Args:
        store: settings of ``[store]`` by their names, sizes in bytes. ``secret_file`` is required:
            a file that gateways and replicas find on each machine. ``redis_url`` is where sessions
            go from one replica to another.
        host: the address that replicas listen at; "" = that of their machine in the cluster.

    Raises:
        ValueError: a setting is wrong, or the configuration has a connector of its own.
    """
    own = _store(store)
    config = config.model_copy(deep=True)
    engine: dict[str, Any] = {**copy.deepcopy(config.engine_kwargs)}
    if engine.get("kv_transfer_config"):
        raise ValueError(
            "engine_kwargs.kv_transfer_config names another connector; thermocline.ray brings its"
            " own, and vLLM has room for one: leave it out"
        )
    for name, value in ENGINE.items():
        if engine.setdefault(name, value) != value:
            raise ValueError(f"engine_kwargs.{name} must be {value!r} for sessions, or left out")
    if _is_cpu(config):
        engine = {**ON_CPU, **engine}
    engine["middleware"] = [*engine.get("middleware", []), MIDDLEWARE]
    settings = msgspec.to_builtins(ReplicaSettings(store=own, host=host))
    engine["kv_transfer_config"] = {
        **CONNECTOR,
        "kv_connector_extra_config": {SETTINGS: settings},
    }
    config.engine_kwargs = engine
    config.deployment_config = _deployment({**config.deployment_config})
    environment = {**(config.runtime_env or {})}
    environment["env_vars"] = {**NO_REPORTS, **environment.get("env_vars", {})}
    config.runtime_env = environment
    if _is_local(config) and config.callback_config.callback_class is CallbackBase:
        config.callback_config = CallbackConfig(callback_class=LOCAL_MODEL)
    # The same always: under another name Serve would replace all replicas at once.
    config.server_cls = ThermoclineServer
    return config


def _store(store: Mapping[str, object]) -> StoreConfig:
    own = msgspec.convert({"disk_bytes": 0, **store}, StoreConfig)
    if not own.secret_file:
        raise ValueError(
            "store.secret_file is missing: a file of 32 random bytes that gateways and replicas"
            " share (head -c 32 /dev/urandom > FILE; chmod 600 FILE)"
        )
    return own


def _is_local(config: LLMConfig) -> bool:
    source = config.model_loading_config.model_source
    return isinstance(source, str) and Path(source).is_dir()


def _is_cpu(config: LLMConfig) -> bool:
    return getattr(config.accelerator_config, "kind", "") == "cpu"


def _deployment(options: dict[str, Any]) -> dict[str, Any]:
    options = {**DEPLOYMENT, **options}
    options.setdefault("request_router_config", RequestRouterConfig(request_router_class=ROUTER))
    scaling = options.get("autoscaling_config")
    if scaling is None:
        options["num_replicas"] = options.get("num_replicas") or 1
        return options
    if isinstance(scaling, AutoscalingConfig):
        scaling = scaling.model_dump(exclude_unset=True)
    options["autoscaling_config"] = {"policy": {"policy_function": POLICY}, **scaling}
    return options
