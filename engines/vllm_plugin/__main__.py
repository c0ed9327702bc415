"""Starts vLLM with the plug-in, and ends it.

    python -m engines.vllm_plugin      in vLLM's own environment

The settings come as one line on standard input. When the pipe closes, the gateway has died or wants
vLLM to end: vLLM then gets SIGTERM, so that it completes the waiting saves, and is killed if that
takes too long. However vLLM's first process ends, this process ends all others before it exits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from engines.config import WRONG_SETTINGS, WorkerConfig
from engines.host.lifeline import Lifeline, first_line
from engines.runtime_folder import held, runtime_folder
from engines.vllm_plugin.config import write_settings
from engines.vllm_plugin.process.command import (
    command,
    default_environment,
    environment,
    is_cpu_build,
    plugin_settings,
    refusal,
)
from engines.vllm_plugin.process.processes import adopt_orphans, die_with_parent, end_descendants
from kvstore.workers import memory_nodes, usable_cores

END_S: Final = 25.0  # shorter than the gateway waits before it kills this process
# How long all of vLLM may take to end after SIGTERM, and each worker within that. By default vLLM
# kills its processes at once, and waiting saves are lost.
ENGINE_END_S: Final = 20
WORKER_END_S: Final = 15
# A socket's path has at most 103 bytes (macOS; Linux: 107), and vLLM appends "/UUID" to the folder.
LONGEST_FOLDER: Final = 103 - 37
SOCKETS_PREFIX: Final = "thermocline-sockets-"


def main() -> int:
    worker = msgspec.json.decode(first_line(), type=WorkerConfig)
    if refused := refusal(worker, cpu=is_cpu_build()):
        print(f"ERROR vLLM cannot serve with these settings: {refused}", file=sys.stderr)
        return WRONG_SETTINGS
    folder = Path(worker.runtime_dir)
    settings = write_settings(plugin_settings(worker))
    _remove_sockets(folder)
    defaults = default_environment(
        worker, cpu=is_cpu_build(), cores=usable_cores(), memory_nodes=memory_nodes()
    )
    argv = command(worker, settings, cpu=is_cpu_build())
    argv += ["--shutdown-timeout", str(ENGINE_END_S)]
    adopt_orphans()
    lifeline = Lifeline()
    with held(folder, lifeline.gateway_died), _socket_folder(folder) as sockets:
        env = {
            **defaults,
            **os.environ,
            **environment(worker, os.environ.get("PYTHONPATH", ""), str(sockets)),
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKER_END_S),
        }
        with subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
        ) as server:
            signal.signal(signal.SIGTERM, lambda *_: server.terminate())
            threading.Thread(target=_end_with_input, args=(server, lifeline), daemon=True).start()
            code = server.wait()
        end_descendants()
    return code if code >= 0 else 128 - code  # the exit code that a shell uses for a signal


@contextmanager
def _socket_folder(folder: Path) -> Iterator[Path]:
    """Yield the folder for vLLM's own sockets: ``folder``, or a new one if its path is too long.

    The next start removes sockets that a killed engine left in either of them.
    """
    if len(os.fsencode(folder)) <= LONGEST_FOLDER:
        yield folder
    else:
        with runtime_folder(Path("/tmp"), SOCKETS_PREFIX) as own:
            yield own


def _remove_sockets(folder: Path) -> None:
    """Remove all sockets that a killed engine left in a folder, including vLLM's own."""
    for path in folder.iterdir():
        if path.is_socket():
            path.unlink()


def _end_with_input(server: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
    while lifeline.read():
        pass
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(END_S)
    server.kill()


if __name__ == "__main__":
    raise SystemExit(main())
