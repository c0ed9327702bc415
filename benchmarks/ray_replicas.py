"""Replicas on Ray: sessions stay, one is killed under load, all are replaced, one goes.

python -m benchmarks.ray_replicas [--sessions 12] [--tokens 300] [--json OUT]

The sample model on a Ray of this machine, two replicas with small pools of KV, a gateway before
them, one Redis. Sessions are stored exactly (``raw``). Every session takes a turn in each of five
rounds: at first, again, while a replica is killed, after all replicas were replaced by two new
ones, and by a single one. The texts are compared with those of one vLLM that nothing happens to
(``--engine vllm`` of the product). A stream that had begun when its replica was killed ends in an
error, as any engine's does; its client asks again, and that is counted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.program import arguments, write_json
from benchmarks.stacks.lifeline import Lifeline
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    free_port,
    prose,
)
from launch.machine.folders import folders
from launch.model.find import sample_model
from tests.redis_server import RedisServer

AT_ONCE = 4
ROUNDS = ("first", "second", "killed", "replaced", "one left")
ANSWER_TOKENS = 8
KILL_AFTER = 1 / 3  # of the round's turns


ROOT = Path(__file__).parents[1]
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


@dataclass
class Conversations:
    """Sessions, their histories, and the answers."""

    num_sessions: int
    num_tokens: int
    texts: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_answered: int = 0
    num_cut: int = 0  # streams that had begun when their replica ended

    def __post_init__(self) -> None:
        words = int(self.num_tokens / WORD_TOKENS)
        self._histories = {
            f"s{i}": [{"role": "user", "content": prose(f"ray {i}", words)}]
            for i in range(self.num_sessions)
        }

    async def round(self, name: str, client: Client) -> None:
        """Have every session take a turn, a few at once."""
        self.num_answered = 0
        places = asyncio.Semaphore(AT_ONCE)
        sources = self.sources[name] = Counter()

        async def turn(session: str, history: list[dict[str, str]]) -> None:
            async with places:
                reply = await client.chat(history, session=session, max_tokens=ANSWER_TOKENS)
                if _was_cut(reply):
                    self.num_cut += 1
                    reply = await client.chat(history, session=session, max_tokens=ANSWER_TOKENS)
            self.num_answered += 1
            sources[_source(reply)] += 1
            if not reply.ok:
                self.failures.append(f"{name}, {session}: {reply.status} {reply.error}")
            self.texts.setdefault(session, []).append(reply.text)
            history.append({"role": "assistant", "content": reply.text})
            history.append({"role": "user", "content": "And what comes next?"})

        await asyncio.gather(*(turn(x, history) for x, history in self._histories.items()))
        print(f"  {name}: {dict(sources)}", flush=True)


def _was_cut(reply: Reply) -> bool:
    """A stream that has begun cannot be asked again by the gateway: its client asks again."""
    return reply.status == 200 and reply.error is not None


def _source(reply: Reply) -> str:
    return reply.cache.partition(";")[0] or "no header"


def on_ray(talks: Conversations) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="thermocline-ray-bench-") as folder,
        RedisServer("--maxmemory", "2gb", tcp=True) as redis,
        RayReplicas(Path(folder), redis.url) as ray,
        Stack(ray.settings, start_timeout_s=120) as stack,
    ):
        try:
            return asyncio.run(_rounds(talks, ray, stack))
        except BaseException:
            print(stack.tail(), ray.tail(), sep="\n", flush=True)
            raise


async def _rounds(talks: Conversations, ray: RayReplicas, stack: Stack) -> dict[str, Any]:
    seconds = {}
    async with client_of(stack) as client:

        async def ready(num_replicas: int) -> None:
            async with asyncio.timeout(1500):
                while sum(x["ready"] for x in await _replicas(client)) != num_replicas:
                    await asyncio.sleep(0.5)

        await ready(2)
        await talks.round("first", client)
        await talks.round("second", client)
        killing = asyncio.create_task(_kill_one(talks, ray))
        await talks.round("killed", client)
        await killing
        await ready(2)  # Ray has started another
        for name, change in (
            ("replaced", {"max_context": 1984}),
            ("one left", {"num_replicas": 1}),
        ):
            began = time.perf_counter()
            names = {x["name"] for x in await _replicas(client)}
            await asyncio.to_thread(ray.change, **change)
            seconds[name] = round(time.perf_counter() - began)
            await ready(ray.num_replicas)
            now = {x["name"] for x in await _replicas(client)}
            assert not now & names, (names, now)  # ``serve.run`` replaces all replicas each time
            await talks.round(name, client)
    return {"seconds_to_change": seconds}


async def _replicas(client: Client) -> list[dict[str, Any]]:
    models = (await client.get("/v1/models"))["data"]
    return list(models[0].get("replicas", []))


async def _kill_one(talks: Conversations, ray: RayReplicas) -> None:
    """kill -9 a replica's process once some turns of the round are answered."""
    victim = ray.replicas()[0]
    while talks.num_answered < talks.num_sessions * KILL_AFTER:
        await asyncio.sleep(0.02)
    victim.kill()


def undisturbed(talks: Conversations, python: str) -> None:
    """The same turns on one vLLM with room for all."""
    settings = {
        "engine": {"kind": "vllm", "hot_bytes": 1024 * MIB, "max_context": 2048},
        "store": {"codec": "raw", "ram_bytes": 512 * MIB, "disk_bytes": 0},
        "engine.vllm": {"python": python},
    }

    async def rounds(stack: Stack) -> None:
        async with client_of(stack) as client:
            for name in ROUNDS:
                await talks.round(name, client)

    with Stack(settings, start_timeout_s=900) as stack:
        asyncio.run(rounds(stack))


def measure(num_sessions: int, num_tokens: int) -> dict[str, Any]:
    if not is_installed():
        raise SystemExit(MISSING)
    talks = Conversations(num_sessions, num_tokens)
    result = on_ray(talks)
    alone = Conversations(num_sessions, num_tokens)
    undisturbed(alone, PYTHON)
    other = [x for x, texts in talks.texts.items() if texts != alone.texts[x]]
    return {
        "sessions": num_sessions,
        "rounds": {name: dict(found) for name, found in talks.sources.items()},
        "failures": talks.failures,
        "streams_cut": talks.num_cut,
        "sessions_with_other_texts": len(other),
        **result,
    }


def main() -> None:
    args = arguments(__doc__, "--sessions 12 --tokens 300")
    write_json(args.json, measure(args.sessions, args.tokens))


if __name__ == "__main__":
    main()
