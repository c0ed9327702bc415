"""Starts Ray on this machine with the replicas of one model, for a gateway of this machine.

    python -m engines.on_ray MODEL --secret-file FILE [--replicas 2] [--redis-url URL] ...

Ray's own program is a child that stays in front. Replicas and their list listen on 127.0.0.1, Ray
itself at this machine's address, with a token of its own. At SIGTERM or SIGINT the replicas are
drained, and Ray ends. With ``--address`` (it is printed) the replicas of a running one are changed
instead: their number, or a setting, which Serve rolls out replica by replica. ``ray.sh``
beside this file starts it together with a gateway; on a cluster ``serve deploy`` takes its place.
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

ATTEMPTS: Final = 3  # some of its waits have no setting
OBJECT_STORE_BYTES: Final = 256 << 20  # KV never goes through it
START_S: Final = 600.0
POLL_S: Final = 1.0
END_S: Final = 60.0  # it gives its own processes 30 seconds
# Ray's processes wait for each other's ports for 15 seconds, and then end, if these are not given.
AGENT_PORTS: Final = (
    *("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port"),
    *("--metrics-export-port", "--runtime-env-agent-port"),
)
# Some seconds by default: on a busy machine they are not enough to import Python's modules.
LONG_STARTS: Final = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "600",
}
HOST: Final = "127.0.0.1"
APPLICATION: Final = "thermocline"
PLACES: Final = 2  # of a replica: for its actor, and for vLLM
SPARE: Final = 2  # replicas beside those that are asked for


@contextmanager
def local_ray(namespace: str, num_places: int) -> Iterator[str]:
    """Start Ray, and connect to it; yields its address.

    Args:
        num_places: logical CPUs, of which each replica takes some.

    Raises:
        RuntimeError: it did not start; its own words are on standard error.
    """
    for attempt in range(ATTEMPTS):
        process, address = _started(num_places)
        try:
            if _connected(address, namespace, process):
                yield address
                return
        finally:
            ray.shutdown()
            _end(process)
        log.warning("Ray ended while it started (%d of %d tries)", attempt + 1, ATTEMPTS)
    raise RuntimeError("Ray does not start; its own words are above")


def _started(num_places: int) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port("127.0.0.1")
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", str(port), "--num-cpus", str(num_places), "--include-dashboard=false"),
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--disable-usage-stats"),
    ]
    for name in AGENT_PORTS:
        command += [name, str(free_port("127.0.0.1"))]
    process = subprocess.Popen(command, env={**LONG_STARTS, **os.environ}, stdout=sys.stderr)
    return process, f"{ray.util.get_node_ip_address()}:{port}"


def _connected(address: str, namespace: str, process: subprocess.Popen[bytes]) -> bool:
    """Connect once it runs; False if it has ended."""
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
    """Do what the command line says; returns the exit code."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    given["host"] = HOST
    port, address = given.pop("port"), given.pop("address", None)
    if address:
        ray.init(address, namespace=APPLICATION, log_to_driver=False)
        serve.run(app(given), name=APPLICATION, route_prefix="/", blocking=False)
        return 0
    _on_signal(_leave)  # while Ray starts
    places = max(usable_cores(), PLACES * (args.replicas + SPARE))  # no threads
    with local_ray(APPLICATION, places) as address:
        _on_signal(_leave)  # Ray has set its own, which end the process at once
        try:
            serve.start(http_options={"host": HOST, "port": port})
            serve.run(app(given), name=APPLICATION, route_prefix="/")
            print(f"{args.replicas} replicas are there; Ray's address is {address}", flush=True)
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
