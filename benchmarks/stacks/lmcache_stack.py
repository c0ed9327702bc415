"""vLLM with LMCache's multiprocess server, in an environment of their own.

The environment sees the packages of vLLM's environment and adds LMCache with the few that are
missing; nothing is installed into vLLM's environment. LMCache's CUDA packages are left out: its
server and its connector, LMCache's only way to work with vLLM on a CPU, do not need them there.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import free_port
from benchmarks.stacks.vllm_stack import START_S, FloatName, PlainVllm, python_with_vllm

LMCACHE = "lmcache==0.5.6"
ITS_NEEDS = (
    *("aiofile", "aiofiles", "awscrt", "caio", "grpcio-observability==1.78.0", "nvtx"),
    *("opentelemetry-exporter-prometheus", "redis", "sortedcontainers"),
)
GIB = 1 << 30
STORED_S = 0.5  # from an answer until LMCache has stored its KV
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}


def python_with_lmcache(folder: Path) -> Path:
    """Return the interpreter of the environment in ``folder``; make the environment if needed."""
    base, python = python_with_vllm(), folder / "bin" / "python"
    stamp, wanted = folder / "made-of", f"{base} {LMCACHE}"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    (_packages_of(str(python)) / "vllm.pth").write_text(f"{_packages_of(base)}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", LMCACHE, *ITS_NEEDS]
    subprocess.run(install, check=True)
    stamp.write_text(wanted)
    return python


def _packages_of(python: str) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(answer.stdout.strip())


class LmcacheVllm:
    """LMCache's server with ``ram_bytes``, and vLLM with LMCache's connector.

    A chunk is one block of vLLM's, which wastes least. Once a second LMCache evicts until its
    memory is below a watermark; chunks that do not fit in between are not stored at all. So it
    gets ``headroom_bytes`` more for the newest chunks, and ``settle`` waits until these bytes are
    free again. Thus it can keep ``ram_bytes`` of KV.
    """

    def __init__(
        self,
        python: Path,
        ram_bytes: int,
        headroom_bytes: int,
        pool_bytes: int,
        max_context: int,
        dtype: FloatName,
        model_path: str = "",
    ) -> None:
        """``model_path``: "" = the sample model."""
        self._python = python
        self._ram_bytes, self._all_bytes = ram_bytes, ram_bytes + headroom_bytes
        self._watermark = ram_bytes / self._all_bytes
        self._port, self._http_port = free_port(), free_port()
        server = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port}
        transfer: dict[str, Any] = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = server
        self.vllm = PlainVllm(
            pool_bytes,
            max_context,
            dtype=dtype,
            python=str(python),
            model_path=model_path,
            arguments=(
                "--disable-hybrid-kv-cache-manager",
                *("--kv-transfer-config", json.dumps(transfer)),
            ),
        )

    @property
    def url(self) -> str:
        return self.vllm.url

    @property
    def ram_used(self) -> int:
        """Bytes of KV that the server holds now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/status") as answer:
            return int(json.load(answer)["storage_manager"]["l1_manager"]["memory_used_bytes"])

    def settle(self) -> None:
        """Wait until LMCache has stored the last answer's KV and evicted down to ``ram_bytes``."""
        time.sleep(STORED_S)
        while self.ram_used > self._ram_bytes:
            time.sleep(0.2)

    def _command(self) -> list[str]:
        return [
            *(str(self._python), "-m", "lmcache.cli.main", "server"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--prometheus-port", str(free_port())),
            *("--chunk-size", "32", "--l1-size-gb", repr(self._all_bytes / GIB)),
            "--no-l1-use-lazy",
            *("--eviction-policy", "LRU"),
            *("--eviction-trigger-watermark", repr(self._watermark), "--eviction-ratio", "0.05"),
            # With the default transfer mode LMCache reuses nothing on a CPU.
            *("--supported-transfer-mode", "auto"),
            *("--shm-name", f"thermocline-bench-{os.getpid()}"),
        ]

    def __enter__(self) -> LmcacheVllm:
        with ExitStack() as exits:
            folder = exits.enter_context(tempfile.TemporaryDirectory())
            env = {**os.environ, **QUIET}
            # The server removes its shared memory when it ends.
            server = Running(self._command(), Path(folder) / "log.txt", env=env, patience_s=30)
            exits.callback(server.end)
            server.wait_for(f"http://127.0.0.1:{self._http_port}/status", START_S)
            exits.enter_context(self.vllm)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
