"""vLLM for the benchmarks, with equal settings: with gateway and plug-in, and plain."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import MIB, Stack, free_port
from engines.config import EngineConfig, WorkerConfig
from engines.vllm_plugin.process.command import command, default_environment, environment
from engines.vllm_plugin.process.server import SERVER
from kvstore.config import StoreConfig
from kvstore.workers import memory_nodes, usable_cores
from launch.machine.installation import CHILD_ENV, find_python
from launch.model.find import sample_model

FloatName = Literal["float32", "bfloat16"]

MODEL_NAME = "SmolLM2-135M-Instruct"
START_S = 900.0
OURS = (
    "--kv-transfer-config",
    "--middleware",
    "--scheduler-cls",
    "--long-prefill-token-threshold",
    "--tool-parser-plugin",
    "--uds",
)  # flags of the plug-in, which plain vLLM does not get; each has a value
# SmolLM2-135M in float32: 30 layers x 3 heads x (64 + 64) values of four bytes.
BYTES_PER_TOKEN = 30 * 3 * 128 * 4


def python_with_vllm() -> str:
    """Return the interpreter of vLLM's environment. Raises ``SystemExit`` if there is none."""
    python = find_python(os.environ.get("THERMOCLINE_ENGINE__VLLM__PYTHON", ""))
    if not python:
        raise SystemExit("vLLM is not installed; run: bash launch/install.sh vllm")
    return python


def with_plugin(
    pool_bytes: int,
    codec: str = "tq3",
    ram_bytes: int = 1024 * MIB,
    max_context: int = 8192,
    dtype: FloatName = "float32",
    disk_bytes: int = 0,
    idle_after_s: float = 3600.0,
    folder: Path | None = None,
) -> Stack:
    """Return a stack of gateway and vLLM, not started yet.

    Sessions hibernate when the benchmark demotes them, or after ``idle_after_s``. ``folder``: the
    stack's folder, which may have measurements of the model in ``data``.
    """
    settings: dict[str, dict[str, Any]] = {
        "engine": {
            "kind": "vllm",
            "vllm.python": python_with_vllm(),
            "hot_bytes": pool_bytes,
            "max_context": max_context,
            "dtype": dtype,
        },
        "store": {"codec": codec, "ram_bytes": ram_bytes, "disk_bytes": disk_bytes},
        "scheduler": {"idle_after_s": idle_after_s},
    }
    return Stack(settings, folder, start_timeout_s=START_S)


@dataclass
class PlainVllm:
    """vLLM with the flags and environment with which the gateway starts it, without the plug-in.

    ``python`` and ``arguments`` are those of another connector.
    """

    pool_bytes: int
    max_context: int = 8192
    prefix_caching: bool = True
    dtype: FloatName = "float32"
    python: str = field(default_factory=python_with_vllm)
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    model_path: str = ""  # "" = the sample model

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._running.process.pid)

    def _settings(self) -> WorkerConfig:
        engine = EngineConfig(
            kind="vllm", hot_bytes=self.pool_bytes, max_context=self.max_context, dtype=self.dtype
        )
        return WorkerConfig(
            engine=engine,
            store=StoreConfig(),
            model_path=self.model_path or str(sample_model(Path.home() / ".cache" / "thermocline")),
            served_model_name=MODEL_NAME,
            runtime_dir=self._folder.name,
            token="",
        )

    def command(self) -> list[str]:
        flags = without_ours(command(self._settings(), Path(), cpu=True)[3:])
        if not self.prefix_caching:
            flags[flags.index("--enable-prefix-caching")] = "--no-enable-prefix-caching"
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        return [self.python, "-m", SERVER, *flags, *where, *self.arguments]

    def environment(self) -> dict[str, str]:
        settings = self._settings()
        ours = environment(settings, os.environ.get("PYTHONPATH", ""))
        return {
            **default_environment(
                settings, cpu=True, cores=usable_cores(), memory_nodes=memory_nodes()
            ),
            **os.environ,
            **CHILD_ENV,
            **ours,
            "TMPDIR": self._folder.name,
        }

    def __enter__(self) -> PlainVllm:
        self._folder = tempfile.TemporaryDirectory(prefix="plain-vllm-")  # for vLLM's sockets
        log = Path(self._folder.name) / "log.txt"
        self._running = Running(
            self.command(), log, env=self.environment(), group=True, patience_s=10
        )
        self._running.wait_for(f"{self.url}/health", START_S)
        return self

    def __exit__(self, *_: object) -> None:
        """End vLLM with all its processes, which do not always end with the first one."""
        self._running.end()
        self._folder.cleanup()


def without_ours(flags: list[str]) -> list[str]:
    """Return the flags without those of the plug-in and their values."""
    kept: list[str] = []
    values = iter(flags)
    for flag in values:
        if flag in OURS:
            next(values)
        else:
            kept.append(flag)
    return kept
