"""Starts Ray on this machine with the replicas of one model; see ``engines.on_ray.__main__``.

Ray reads its environment when it is imported, so its token is set before that.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve

from engines.on_ray.application import app
from engines.on_ray.local_ray import local_ray
from engines.replica_tokens import ray_token
from kvstore.cores import usable_cores
from kvstore.tiers.seal import read_secret

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


def main() -> int:
    args = arguments()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", ray_token(read_secret(Path(args.secret_file))))
    from engines.on_ray.__main__ import run

    return run(args)


def arguments() -> argparse.Namespace:
    """Read the command line; ends the program where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m engines.on_ray",
        description="Starts Ray on this machine with the replicas of one model.",
    )
    parser.add_argument("model")
    parser.add_argument("--secret-file", required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--name", help="what clients say as model")
    parser.add_argument("--redis-url")
    parser.add_argument("--codec")
    parser.add_argument("--hot-bytes", type=int, help="live KV of each replica")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--threads", type=int, help="of each replica, on CPUs")
    parser.add_argument("--address", help="of a running Ray, whose replicas are to be changed")
    parser.add_argument("--port", type=int, default=8000, help="of Serve, where the list is")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
