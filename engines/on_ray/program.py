"""Starts Ray on this machine with the replicas of one model, for a gateway of this machine.

    python -m engines.on_ray MODEL --secret-file FILE [--replicas 2] [--redis-url URL] ...

Replicas and their list listen on 127.0.0.1, Ray itself at this machine's address, with a token of
its own. At SIGTERM or SIGINT the replicas are drained, and Ray ends. With
``--address`` (it is printed) the replicas of a running one are changed instead: their number, or a
setting, which Serve rolls out replica by replica. ``launch/ray.sh`` starts it together with a
gateway; on a cluster ``serve deploy`` takes its place.
"""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any, Final

import ray
from ray import serve

from engines.on_ray.application import app
from engines.on_ray.local_ray import local_ray
from kvstore.workers import usable_cores

HOST: Final = "127.0.0.1"
APPLICATION: Final = "thermocline"
PLACES: Final = 2  # of a replica: for its actor, and for vLLM
SPARE: Final = 2  # replicas beside those that are asked for


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
