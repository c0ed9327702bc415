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
import sys
import threading
from typing import Final

import ray
from ray import serve

from engines.on_ray.application import app
from engines.on_ray.local_ray import local_ray
from kvstore.cores import usable_cores

HOST: Final = "127.0.0.1"
APPLICATION: Final = "thermocline"
SPARE_PLACES: Final = 2  # for a new replica beside those that it replaces


def main() -> int:
    args = _arguments()
    given = {name: value for name, value in vars(args).items() if value is not None}
    given["host"] = HOST
    port, address = given.pop("port"), given.pop("address", None)
    if address:
        ray.init(address, namespace=APPLICATION, log_to_driver=False)
        serve.run(app(given), name=APPLICATION, route_prefix="/", blocking=False)
        return 0
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    places = max(usable_cores(), args.replicas + SPARE_PLACES)  # no threads
    with local_ray(APPLICATION, places) as address:
        serve.start(http_options={"host": HOST, "port": port})
        serve.run(app(given), name=APPLICATION, route_prefix="/")
        print(f"{args.replicas} replicas are there; Ray's address is {address}", flush=True)
        ended.wait()
        serve.shutdown()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engines.on_ray", description=__doc__)
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
