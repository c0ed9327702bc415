"""Starts Ray on this machine with the replicas of one model, for a gateway of this machine.

    python -m engines.on_ray MODEL --secret-file FILE [--replicas 2] [--redis-url URL] ...

Ray's own program runs as a child in the foreground. Replicas and their list listen on 127.0.0.1,
Ray itself at this machine's address, with a token of its own. At SIGTERM or SIGINT the replicas are
drained, and Ray ends. With ``--address`` (which an earlier start has printed) this changes the
replicas of a running Ray instead: their number, or a setting, which Serve rolls out replica by
replica. ``ray.sh`` beside this file starts it together with a gateway; on a cluster use ``serve
deploy`` instead.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray import serve

from engines.on_ray.application import app
from engines.on_ray.own_settings import free_port
from kvstore.workers import usable_cores

log = logging.getLogger("thermocline.ray")

ATTEMPTS: Final = 3  # some of Ray's timeouts cannot be set
OBJECT_STORE_BYTES: Final = 256 << 20  # KV never goes through it
START_S: Final = 600.0
POLL_S: Final = 1.0
END_S: Final = 60.0  # Ray gives its own processes 30 seconds
# Without these, Ray's processes wait 15 seconds for each other's ports, and then exit.
AGENT_PORTS: Final = (
    *("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port"),
    *("--metrics-export-port", "--runtime-env-agent-port"),
)
# By default a few seconds, which are too few to import Python's modules on a busy machine.
LONG_STARTS: Final = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "600",
}
HOST: Final = "127.0.0.1"
APPLICATION: Final = "thermocline"
CPUS_OF_REPLICA: Final = 2  # one for its actor, one for vLLM
SPARE: Final = 2  # room for two more replicas, if their number is changed


@contextmanager
def local_ray(namespace: str, num_cpus: int) -> Iterator[str]:
    """Start Ray, and connect to it; yields its address.

    Args:
        num_cpus: Ray's logical CPUs, of which each replica takes ``CPUS_OF_REPLICA``.

    Raises:
        RuntimeError: Ray did not start; its own messages are on standard error.
    """
    for attempt in range(ATTEMPTS):
        process, address = _started(num_cpus)
        try:
            if _connected(address, namespace, process):
                yield address
                return
        finally:
            ray.shutdown()
            _end(process)
        log.warning("Ray ended while it started (%d of %d tries)", attempt + 1, ATTEMPTS)
    raise RuntimeError("Ray does not start; its own messages are above")


def _started(num_cpus: int) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port("127.0.0.1")
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", str(port), "--num-cpus", str(num_cpus), "--include-dashboard=false"),
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats"),
    ]
    for name in AGENT_PORTS:
        command += [name, str(free_port("127.0.0.1"))]
    process = subprocess.Popen(command, env={**LONG_STARTS, **os.environ}, stdout=sys.stderr)
    return process, f"{ray.util.get_node_ip_address()}:{port}"


def _connected(address: str, namespace: str, process: subprocess.Popen[bytes]) -> bool:
    """Connect to Ray once it runs; return False if it has ended."""
    end = time.monotonic() + START_S
    while process.poll() is None:
        try:
            ray.init(address, namespace=namespace)
            return True
        except (ConnectionError, RuntimeError):  # it is starting
            if time.monotonic() > end:
                raise
            time.sleep(POLL_S)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(args: argparse.Namespace) -> int:
    """Start Ray and the replicas, or change those of a running Ray; return the exit code."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    given["host"] = HOST
    port, address = given.pop("port"), given.pop("address", None)
    if address:
        ray.init(address, namespace=APPLICATION, log_to_driver=False)
        serve.run(app(given), name=APPLICATION, route_prefix="/", blocking=False)
        return 0
    _on_signal(_leave)  # while Ray starts
    num_cpus = max(usable_cores(), CPUS_OF_REPLICA * (args.replicas + SPARE))
    with local_ray(APPLICATION, num_cpus) as address:
        _on_signal(_leave)  # again: Ray has set handlers that end the process at once
        try:
            serve.start(http_options={"host": HOST, "port": port})
            serve.run(app(given), name=APPLICATION, route_prefix="/")
            print(f"{args.replicas} replicas are ready; Ray's address is {address}", flush=True)
            threading.Event().wait()
        finally:
            serve.shutdown()
    return 0


def _on_signal(action: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


def _leave(number: int, frame: object) -> None:
    _on_signal(signal.SIG_IGN)
    raise SystemExit(0)
