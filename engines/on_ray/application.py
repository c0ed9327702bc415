"""The application that ``serve run`` and ``serve deploy`` start: replicas and their list.

It also adapts a user's own ``LLMConfig``, so that its replicas keep sessions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from ray import serve
from ray.llm._internal.common.callbacks.base import CallbackBase, CallbackConfig
from ray.serve.config import AutoscalingConfig
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from engines.on_ray.own_settings import SETTINGS, ReplicaSettings
from engines.on_ray.replica_directory import NAME, ReplicaDirectory
from engines.on_ray.server import ThermoclineServer
from engines.vllm_plugin.process.command import is_cpu_build
from kvstore.config import StoreConfig
from kvstore.workers import usable_cores

LOCAL_MODEL: Final = "engines.on_ray.application.LocalModel"
POLICY: Final = "engines.on_ray.scaling:by_waiting_and_heat"
CONNECTOR: Final[Mapping[str, str]] = {
    "kv_connector": "ThermoclineConnector",
    "kv_connector_module_path": "engines.vllm_plugin.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
MIDDLEWARE: Final = "engines.vllm_plugin.process.middleware.CacheHeaderMiddleware"
# Our plug-in needs these, or without them sessions could not move to another replica.
ENGINE: Final[Mapping[str, Any]] = {
    "enable_prefix_caching": True,
    "enable_prompt_tokens_details": True,
    "prefix_caching_hash_algo": "sha256_cbor",
    "scheduler_cls": "engines.vllm_plugin.scheduler.vllm_scheduler.scheduler",
    "logits_processors": ["engines.vllm_plugin.measuring.model_access:ForcedTokens"],
    "worker_extension_cls": "engines.vllm_plugin.measuring.model_access.ModelView",
}
# On CPUs: most multiply float32 several times faster, and the kernels want blocks of 32.
ON_CPU: Final[Mapping[str, Any]] = {"block_size": 32, "dtype": "float32", "enforce_eager": True}
DEPLOYMENT: Final[Mapping[str, Any]] = {
    "graceful_shutdown_timeout_s": 300,  # to end answers and to save sessions
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "max_ongoing_requests": 1000,  # through handles; the gateway has its own limits
}
NO_REPORTS: Final[Mapping[str, str]] = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
SHORT: Final = (
    *("model", "name", "replicas", "hot_bytes", "max_context", "redis_url", "secret_file"),
    *("codec", "threads", "host"),
)


class LocalModel(CallbackBase):
    """Skips Ray's download tasks, which import vLLM once more, for a model on the local disk."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


def with_sessions(config: LLMConfig, store: Mapping[str, object], host: str = "") -> LLMConfig:
    """Return a copy of the configuration whose replicas keep sessions; see ``thermocline.ray``.

    Args:
        store: settings of ``[store]`` by their names, sizes in bytes. ``secret_file`` is required:
            a file that is on every machine of a gateway or a replica. Through ``redis_url``
            sessions move from one replica to another.
        host: the address at which replicas listen; "" = their machine's in the cluster.

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
    engine["kv_transfer_config"] = {**CONNECTOR, "kv_connector_extra_config": {SETTINGS: settings}}
    config.engine_kwargs = engine
    config.deployment_config = _deployment({**config.deployment_config})
    environment = {**(config.runtime_env or {})}
    environment["env_vars"] = {**NO_REPORTS, **environment.get("env_vars", {})}
    config.runtime_env = environment
    if _is_local(config) and config.callback_config.callback_class is CallbackBase:
        config.callback_config = CallbackConfig(callback_class=LOCAL_MODEL)
    # Always the same class: for another one Serve would replace all replicas at once.
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
    scaling = options.get("autoscaling_config")
    if scaling is None:
        options["num_replicas"] = options.get("num_replicas") or 1
        return options
    if isinstance(scaling, AutoscalingConfig):
        scaling = scaling.model_dump(exclude_unset=True)
    options["autoscaling_config"] = {"policy": {"policy_function": POLICY}, **scaling}
    return options


def app(args: Mapping[str, Any]) -> Application:
    """Build the application; see ``thermocline.ray``.

    Args:
        args: ``llm_config``, ``store`` and perhaps ``host``, or in short ``model``,
            ``secret_file`` and perhaps ``name``, ``replicas``, ``hot_bytes``, ``max_context``,
            ``redis_url``, ``codec``, ``host``, ``threads`` (of each replica on CPUs; by default
            half of the machine's cores).

    Raises:
        ValueError: ``args`` has neither form, or a setting is wrong.
    """
    if "llm_config" in args:
        if unknown := set(args) - {"llm_config", "store", "host"}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; give llm_config and store")
        config, store = args["llm_config"], args.get("store", {})
        if not isinstance(config, LLMConfig):
            config = LLMConfig.model_validate(config)
    else:
        config, store = _in_short(args)
    adapted = with_sessions(config, store, str(args.get("host", "")))
    return application(adapted, str(store["secret_file"]))


def application(config: LLMConfig, secret_file: str) -> Application:
    """Return the application of an adapted configuration: the replicas and their list."""
    directory = serve.deployment(
        ReplicaDirectory,
        name=NAME,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # gateways ask every second
    )
    return directory.bind(secret_file, servers=build_llm_deployment(config))


def _in_short(args: Mapping[str, Any]) -> tuple[LLMConfig, dict[str, object]]:
    if unknown := set(args) - set(SHORT):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SHORT)}")
    if missing := {"model", "secret_file"} - set(args):
        raise ValueError(f"{' and '.join(sorted(missing))} must be given")
    model, cpu = str(args["model"]), is_cpu_build()
    name = str(args.get("name") or Path(model).name)
    engine: dict[str, Any] = {}
    if args.get("hot_bytes"):
        engine["kv_cache_memory_bytes"] = int(args["hot_bytes"])
    if args.get("max_context"):
        engine["max_model_len"] = int(args["max_context"])
    num_replicas = int(args.get("replicas", 1))
    config = LLMConfig(
        model_loading_config={"model_id": name, "model_source": model},
        engine_kwargs=engine,
        deployment_config={"num_replicas": num_replicas},
        **(_on_cpu(int(args.get("threads") or max(1, usable_cores() // 2))) if cpu else {}),
    )
    store: dict[str, object] = {"secret_file": str(args["secret_file"])}
    store |= {x: str(args[x]) for x in ("redis_url", "codec") if args.get(x)}
    return config, store


def _on_cpu(threads: int) -> dict[str, Any]:
    env = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    bundles = [{"CPU": 1}]
    return {
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": bundles},
        "runtime_env": {"env_vars": env},
    }
