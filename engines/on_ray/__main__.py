"""Starts Ray on this machine with the replicas of one model; see ``engines.on_ray.local_ray``.

Ray reads its environment when it is imported, so its token is set before that.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from engines.pool.listed_pool import ray_token
from kvstore.tiers.seal import read_secret


def main() -> int:
    args = arguments()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", ray_token(read_secret(Path(args.secret_file))))
    from engines.on_ray.local_ray import run

    return run(args)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line; exits if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m engines.on_ray",
        description="Starts Ray on this machine with the replicas of one model.",
    )
    parser.add_argument("model")
    parser.add_argument("--secret-file", required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--name", help="the model's name for clients")
    parser.add_argument("--redis-url")
    parser.add_argument("--codec")
    parser.add_argument("--hot-bytes", type=int, help="live KV of each replica")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--threads", type=int, help="threads of each replica, on CPUs")
    parser.add_argument("--address", help="address of a running Ray, to change its replicas")
    parser.add_argument(
        "--port", type=int, default=8000, help="port of Serve, which serves the list of replicas"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
