"""Checks that sessions on Ray's replicas survive a kill, a replacement of all, and a removal.

    python -m benchmarks.ray_replicas [--sessions 12] [--tokens 300] [--json OUT]

The sample model on a local Ray, two replicas with small pools of KV, a gateway before them, one
Redis. Sessions are stored exactly (``raw``). Every session takes a turn in each of five rounds: at
first, again, while a replica is killed, after all replicas were replaced by two new ones, and after
they were replaced by one. The texts are compared with those of one undisturbed vLLM (``--engine
vllm`` of the product). A stream that had begun when its replica was killed ends in an error, as any
engine's does; its client asks again, and that is counted.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.program import arguments, write_json
from benchmarks.stacks.lifeline import Running
from benchmarks.stacks.product_stack import MIB, Stack, client_of, free_port
from benchmarks.stacks.rounds import Rounds
from launch.machine.folders import folders
from launch.model.find import sample_model
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("THERMOCLINE_RAY_PYTHON", str(ROOT / ".venv-ray/bin/python"))
MISSING = "no Ray here; run: bash launch/install.sh ray"
NAME = "sample"
START_S = 1500.0
CHANGE_S = 1500.0
END_S = 420.0
READY = "replicas are ready; Ray's address is "


def is_installed() -> bool:
    """Return whether there is an environment with Ray and vLLM."""
    return Path(PYTHON).is_file()


@dataclass
class RayReplicas:
    """The replicas, on small budgets.

    Attributes:
        folder: where the secret and the log are written.
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

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of a gateway before the replicas."""
        return {
            "engine": {
                "replica_list": f"http://127.0.0.1:{self.port}/",
                "replicas": self.num_replicas,
                "served_model_name": NAME,
            },
            "store": {"codec": "raw", "secret_file": str(self.secret), "redis_url": self.redis_url},
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
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all anew
        self._running = Running(self._command(), self.log, env=self._env, patience_s=END_S)
        end = time.monotonic() + START_S
        while READY not in self.log.read_text(errors="replace"):
            if time.monotonic() > end or self._running.process.poll() is not None:
                self._running.end()
                raise RuntimeError(f"the replicas did not start:\n{self._running.tail()}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.end()  # it drains

    def change(self, **changes: int) -> None:
        """Deploy with changed settings, and wait until Serve has rolled them out."""
        for name, value in changes.items():
            setattr(self, name, value)
        address = self.log.read_text(errors="replace").split(READY)[1].split()[0]
        command = [*self._command(), "--address", address]
        with self.log.open("ab") as log:
            subprocess.run(
                command, stdout=log, stderr=log, env=self._env, timeout=CHANGE_S, check=True
            )

    def replicas(self) -> list[psutil.Process]:
        """Return the replicas' processes."""
        found = psutil.Process(self._running.process.pid).children(recursive=True)
        titles = {x: _title(x) for x in found}
        return [x for x, y in titles.items() if y.startswith("ray::") and "ThermoclineServer" in y]


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it ended meanwhile
        return " ".join(process.cmdline())
    return ""


def on_ray(talks: Rounds) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="thermocline-ray-bench-") as folder,
        RedisServer("--maxmemory", "2gb", tcp=True) as redis,
        RayReplicas(Path(folder), redis.url) as ray,
        Stack(ray.settings, start_timeout_s=120) as stack,
    ):
        return asyncio.run(_rounds(talks, ray, stack))


async def _rounds(talks: Rounds, ray: RayReplicas, stack: Stack) -> dict[str, Any]:
    seconds = {}
    async with client_of(stack) as client:

        async def replicas() -> list[dict[str, Any]]:
            return list((await client.get("/v1/models"))["data"][0].get("replicas", []))

        async def ready(num_replicas: int) -> None:
            async with asyncio.timeout(1500):
                while sum(x["ready"] for x in await replicas()) != num_replicas:
                    await asyncio.sleep(0.5)

        await ready(2)
        await talks.round("first", [client])
        await talks.round("second", [client])
        kill = ray.replicas()[0].kill
        await asyncio.gather(talks.round("killed", [client]), talks.in_the_middle(kill))
        await ready(2)  # Ray has started another
        changes = {"replaced": {"max_context": 1984}, "one left": {"num_replicas": 1}}
        for name, change in changes.items():
            began = time.perf_counter()
            names = {x["name"] for x in await replicas()}
            await asyncio.to_thread(ray.change, **change)
            seconds[name] = round(time.perf_counter() - began)
            await ready(ray.num_replicas)
            now = {x["name"] for x in await replicas()}
            assert not now & names, (names, now)  # ``serve.run`` replaces all replicas each time
            await talks.round(name, [client])
    return {"seconds_to_change": seconds}


def measure(num_sessions: int, num_tokens: int) -> dict[str, Any]:
    if not is_installed():
        raise SystemExit(MISSING)
    talks = Rounds(num_sessions, num_tokens)
    result = on_ray(talks)
    settings = {
        "engine": {"kind": "vllm", "hot_bytes": 1024 * MIB, "max_context": 2048},
        "store": {"codec": "raw", "ram_bytes": 512 * MIB, "disk_bytes": 0},
        "engine.vllm": {"python": PYTHON},
    }
    return {
        "sessions": num_sessions,
        "rounds": talks.sources,
        "failures": talks.failures,
        "asked_again": talks.asked_again,
        "sessions_with_other_texts": talks.other_texts(Stack(settings, start_timeout_s=900)),
        **result,
    }


def main() -> None:
    args = arguments(__doc__, "--sessions 12 --tokens 300")
    write_json(args.json, measure(args.sessions, args.tokens))


if __name__ == "__main__":
    main()
