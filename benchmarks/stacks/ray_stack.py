"""Replicas of the sample model on a Ray of this machine, as ``launch/ray.sh`` starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stacks.lifeline import Lifeline
from benchmarks.stacks.product_stack import free_port
from launch.machine.folders import folders
from launch.model import sample_model

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("THERMOCLINE_RAY_PYTHON", str(ROOT / ".venv-ray/bin/python"))
MISSING = "no Ray here; run: bash launch/install.sh ray"
NAME = "sample"
START_S = 1500.0
CHANGE_S = 1500.0
END_S = 420.0
READY = "replicas are there; Ray's address is "


def is_installed() -> bool:
    """Return whether there is an environment with Ray and vLLM."""
    return Path(PYTHON).is_file()


@dataclass
class RayReplicas:
    """The replicas, on small budgets.

    Attributes:
        folder: for the secret and the log.
    """

    folder: Path
    redis_url: str
    num_replicas: int = 2
    hot_bytes: int = 256 << 20
    max_context: int = 2048
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.secret = self.folder / "secret"
        self.secret.touch(mode=0o600)
        self.secret.write_bytes(os.urandom(32))
        self.log = self.folder / "ray.txt"
        self._address = ""
        self._process: subprocess.Popen[str] | None = None
        self._lifeline: Lifeline | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a gateway before them."""
        return {
            "engine": {
                "replica_list": f"http://127.0.0.1:{self.port}/",
                "replicas": self.num_replicas,
                "served_model_name": NAME,
            },
            "store": {
                "codec": "raw",
                "secret_file": str(self.secret),
                "redis_url": self.redis_url,
            },
        }

    def _command(self) -> list[str]:
        model = sample_model(folders("", "", os.environ).cache)
        return [
            *(PYTHON, "-m", "engines.on_ray", str(model)),
            *("--name", NAME, "--replicas", str(self.num_replicas)),
            *("--secret-file", str(self.secret), "--redis-url", self.redis_url),
            *("--hot-bytes", str(self.hot_bytes), "--max-context", str(self.max_context)),
            *("--codec", "raw", "--port", str(self.port)),
        ]

    def __enter__(self) -> RayReplicas:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all anew
        self._environment = environment
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        self._lifeline = Lifeline(self._process)
        giving_up = threading.Timer(START_S, self._process.kill)
        giving_up.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if READY in line:
                self._address = line.split(READY)[1].strip()
                break
        giving_up.cancel()
        # What is not read stops Ray's threads, and with them its end.
        threading.Thread(target=deque, args=(self._process.stdout, 0), daemon=True).start()
        if not self._address:
            self.__exit__()
            raise RuntimeError(f"the replicas did not start:\n{self.tail()}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None and self._lifeline is not None
        self._process.send_signal(signal.SIGTERM)  # it drains
        try:
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._lifeline.let_go()

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def change(self, **changes: int) -> None:
        """Deploy again with other settings, and wait until Serve has rolled them out."""
        for name, value in changes.items():
            setattr(self, name, value)
        command = [*self._command(), "--address", self._address]
        with self.log.open("ab") as log:
            subprocess.run(
                command,
                stdout=log,
                stderr=log,
                env=self._environment,
                timeout=CHANGE_S,
                check=True,
            )

    def replicas(self) -> list[psutil.Process]:
        """List the replicas' processes."""
        assert self._process is not None
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [x for x in found if _is_replica(_title(x))]


def _is_replica(title: str) -> bool:
    return title.startswith("ray::") and "ThermoclineServer" in title


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""
