"""Starts vLLM with the plug-in, and ends it: ``python -m engines.vllm_plugin`` in vLLM's own
environment.

The settings come as one line on standard input. The pipe's end means that the gateway is gone, or
wants vLLM to go: vLLM is then asked to end, which saves what waits, and is killed with its whole
process group if it takes too long. vLLM's own processes ignore SIGTERM at times and outlive their
parents; the group is what makes an end certain.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from engines.config import WorkerConfig
from engines.vllm_plugin.command import command, environment, on_cpu, plugin_settings
from engines.vllm_plugin.config import CONTROL_SOCKET, HUB_SOCKET, write_settings

END_S: Final = 25.0  # below the gateway's own patience


def main() -> int:
    worker = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    settings = write_settings(plugin_settings(worker))
    for socket in ("http.sock", CONTROL_SOCKET, HUB_SOCKET):
        (Path(worker.runtime_dir) / socket).unlink(missing_ok=True)
    env = {**os.environ, **environment(worker, os.environ.get("PYTHONPATH", ""))}
    argv = command(worker, settings, cpu=on_cpu())
    with subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
        return server.wait()


def _end_with_input(server: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(END_S)
    # Whatever is left of vLLM, and this process with it, unless the group is somebody else's.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    server.kill()


if __name__ == "__main__":
    raise SystemExit(main())
