"""The application that ``serve run`` and ``serve deploy`` start: replicas and their list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ray import serve
from ray.serve.deployment import Application
from ray.serve.llm import LLMConfig, build_llm_deployment

from engines.on_ray.adapted import with_sessions
from engines.on_ray.replica_directory import NAME, ReplicaDirectory
from engines.vllm_plugin.process.command import is_cpu_build
from kvstore.workers import usable_cores

SHORT: Final = (
    *("model", "name", "replicas", "hot_bytes", "max_context", "redis_url", "secret_file"),
    *("codec", "threads", "host"),
)


def app(args: Mapping[str, Any]) -> Application:
    """Build the application; see ``thermocline.ray``.

    Args:
        args: ``llm_config``, ``store`` and perhaps ``host``, or in short ``model``,
            ``secret_file`` and perhaps ``name``, ``replicas``, ``hot_bytes``, ``max_context``,
            ``redis_url``, ``codec``, ``host``, ``threads`` (of each replica on CPUs; by default
            half of the machine's cores).

    Raises:
        ValueError: they are neither, or a setting is wrong.
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
    """Join the replicas of an adapted configuration and their list to one application."""
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
