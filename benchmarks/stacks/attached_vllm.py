"""A vLLM that is started without a gateway, as docs/hardware.md shows, to attach a gateway to."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import free_port
from engines.vllm_environment.environment import import_path
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

DOC = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
HEADING = "### A vLLM that was started elsewhere"
TOKEN = "a-token-of-the-test"
SMALL = (  # vLLM's options for little memory
    *("--kv-cache-memory-bytes", str(512 << 20), "--dtype", "float32", "--enforce-eager"),
    *("--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "4"),
)


@dataclass
class Elsewhere:
    """A vLLM that no gateway started. ``log`` has its output."""

    folder: Path
    port: int
    control_port: int
    argv: list[str]
    env: dict[str, str]

    @property
    def log(self) -> Path:
        return self.folder / "vllm.log"

    def start(self) -> None:
        self._running = Running(self.argv, self.log, env=self.env, group=True)
        self.process = self._running.process

    def end(self, within_s: float) -> int:
        """End vLLM as a container is stopped: by SIGTERM; then kill what is left of its group.

        Returns the exit code of its first process.
        """
        self.process.terminate()
        code = self.process.wait(within_s)
        self._running.end()
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._running.end()

    @property
    def settings(self) -> dict[str, dict[str, object]]:
        """The settings with which a gateway attaches to this vLLM."""
        return {
            "engine": {
                "url": f"http://127.0.0.1:{self.port}",
                "control": f"tcp://127.0.0.1:{self.control_port}",
                "token": TOKEN,
            },
            # The gateway puts no session to sleep, so only vLLM's own eviction makes one cold.
            "scheduler": {"idle_after_s": 3600.0},
        }

    def wait_for_port(self, within_s: float = 900.0) -> None:
        end = time.monotonic() + within_s
        while self.process.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-4000:])

    def drop_blocks(self, within_s: float = 60.0) -> None:
        """Empty vLLM's prefix cache; try again while it refuses because a save holds blocks."""
        url = f"http://127.0.0.1:{self.port}/reset_prefix_cache"
        request = urllib.request.Request(url, method="POST")
        request.add_header("authorization", f"Bearer {TOKEN}")
        end = time.monotonic() + within_s
        while True:
            with urllib.request.urlopen(request, timeout=60) as answer:
                if json.load(answer)["success"]:
                    return
            assert time.monotonic() < end, "blocks are still held"
            time.sleep(0.05)


def documented() -> tuple[dict[str, object], dict[str, str], list[str]]:
    """Return what docs/hardware.md shows: the plug-in's settings, the environment, the options."""
    text = DOC.read_text().partition(HEADING)[2]
    settings, commands = re.findall(r"```(?:json)?\n(.*?)```", text, re.DOTALL)[:2]
    words = shlex.split(commands.split("\n\n")[0].replace("\\\n", ""))
    program = words.index("vllm")
    assert words[program : program + 3] == ["vllm", "serve", "MODEL"]
    return json.loads(settings), dict(x.split("=") for x in words[:program]), words[program + 3 :]


def started(python: str, folder: Path, store: dict[str, Any], options: Sequence[str]) -> Elsewhere:
    """Start vLLM with the sample model, without waiting for it.

    Args:
        python: the interpreter of vLLM's environment.
        store: the plug-in's settings of the store.
        options: vLLM's options, after those of the document.
    """
    settings, variables, words = documented()
    port, control_port = free_port(), free_port()
    run = folder / "run"
    run.mkdir(mode=0o700)
    plugin = folder / "plugin.json"
    plugin.touch(mode=0o600)
    own = {
        "store": store,
        "runtime_dir": str(run),
        "disk_path": str(folder / "cold"),
        "token": TOKEN,
        "control": f"tcp://127.0.0.1:{control_port}",
    }
    assert own.keys() <= settings.keys()
    plugin.write_text(json.dumps(settings | own))
    shown = [x.replace("/run/thermocline/plugin.json", str(plugin)) for x in words]
    shown[shown.index("--port") + 1] = str(port)
    model = str(sample_model(default_cache_dir(os.environ)))
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    argv += [*shown, *options]
    env = {
        **os.environ,
        **variables,
        "VLLM_API_KEY": TOKEN,
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "PYTHONPATH": import_path(),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(run),
        "VLLM_NO_USAGE_STATS": "1",
    }
    engine = Elsewhere(folder, port, control_port, argv, env)
    engine.start()
    return engine
