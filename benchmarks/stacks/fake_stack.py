"""The real gateway with the fake engine, as processes: for tests and benchmarks without a model.

``python benchmarks/stacks/fake_stack.py FILE`` is the gateway's process; ``FakeStack`` runs it.
Unlike ``product_stack.Stack`` it also gives access to the engine's process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stacks.constants import configured
from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import free_port
from engines.config import EngineConfig, WorkerConfig
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.edge.key_list import lines_of
from gateway.keys import Tenants
from gateway.models import ServedModel
from gateway.server import server_of
from gateway.watch.metrics import Metrics
from kvstore.config import StoreConfig
from launch.engine_start import engine_factory
from launch.serve.sharing import stored_objects
from scheduler.config import SchedulerConfig
from scheduler.sessions import SessionManager

MODEL = "fake-1"
START_TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]


class FakeStack:
    """A gateway with the fake engine.

    ``settings``: fields of the sections ``gateway``, ``engine`` and ``scheduler``.
    """

    def __init__(self, folder: Path, **settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log.txt"
        self._settings = folder / "settings.json"
        settings["gateway"] = {"port": self.port, **settings.get("gateway", {})}
        self.runtime_dir = folder / "run"
        self.token = os.urandom(16).hex()
        own = {"runtime_dir": str(self.runtime_dir), "token": self.token}
        self._settings.write_text(json.dumps({**own, **settings}))

    def __enter__(self) -> FakeStack:
        command = [sys.executable, str(Path(__file__)), str(self._settings)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._running = Running(command, self.log, env=env, cwd=ROOT, patience_s=20)
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.end()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._running.process.pid)

    @property
    def engine(self) -> psutil.Process:
        """The running engine. It changes when the engine is started again."""
        (child,) = self._engines()
        return child

    def _engines(self) -> list[psutil.Process]:
        """Return the engine's process in a list, or [] while the engine is started again."""
        found = []
        for child in self.process.children():
            with suppress(psutil.NoSuchProcess):  # it has ended
                if "fake_worker" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        return self._running.process.wait(timeout_s)

    def status(self, path: str) -> int:
        """Return the status of a GET; 0 if no server answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the gateway is ready and an engine runs.

        The gateway's answer is not enough: for a moment it calls a dead engine ready.
        """
        end = time.monotonic() + timeout_s
        while True:
            if time.monotonic() > end or self._running.process.poll() is not None:
                raise AssertionError("the gateway is not ready:\n" + self.log.read_text()[-4000:])
            if self._engines() and self.status("/readyz") == 200:
                return
            time.sleep(0.05)


def main(settings_file: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = json.loads(Path(settings_file).read_text())
    config = configured(GatewayConfig, **settings["gateway"])
    worker = WorkerConfig(
        engine=configured(EngineConfig, kind="fake", **settings.get("engine", {})),
        store=StoreConfig(),
        model_path="",
        served_model_name=settings.get("engine", {}).get("served_model_name") or MODEL,
        runtime_dir=settings["runtime_dir"],
        token=settings["token"],
    )
    engine = engine_factory("fake")(worker)
    tenants = Tenants(b"a secret of the tests", *lines_of(config))
    metrics = Metrics()
    sessions = SessionManager(
        engine,
        configured(SchedulerConfig, **settings.get("scheduler", {})),
        salt_of=tenants.salt_of,
        observer=metrics,
    )
    stored = stored_objects(config, StoreConfig(), Path(settings_file).parent, tenants.key_of)
    model = ServedModel(engine, sessions, config, metrics)
    server_of(create_app(config, [model], tenants, metrics, stored), config).run()
    logging.info("ended in good order")


if __name__ == "__main__":
    main(sys.argv[1])
