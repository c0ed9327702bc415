"""How long does it take to choose one of many replicas for a session?

python -m benchmarks.replicas [--engines 1000] [--sessions 20000] [--json OUT]

Times ``ReplicaPool.choose`` for sessions that are new and for sessions that have a home, beside
hashing every replica's name for each session, which is rendezvous hashing as it is written down. A
fifth of the replicas is away.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, cast

from benchmarks.stacks.product_stack import write_json
from engines.base import Engine, SessionRef
from engines.pool.choice import Homes
from engines.pool.replica_pool import ReplicaPool


class Named:
    """As much of an engine as a choice looks at."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready
        self.welcome = object() if ready else None
        self.trouble = "" if ready else "away"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    names = [f"http://10.0.{i // 250}.{i % 250}:9000" for i in range(args.engines)]
    engines = {name: cast(Engine, Named(i % 5 > 0)) for i, name in enumerate(names)}
    homes = Homes(args.sessions)
    began = time.perf_counter()
    fleet = ReplicaPool(engines, homes)
    built_s = time.perf_counter() - began
    sessions = [SessionRef("tenant", f"session-{i}", b"") for i in range(args.sessions)]
    new_us = _microseconds(fleet.choose, sessions)
    for session in sessions:
        homes.put(session, fleet.choose(session).name)
    known_us = _microseconds(fleet.choose, sessions)
    all_us = _microseconds(lambda x: _by_all_names(x, names), sessions[:100])
    return {
        "engines": args.engines,
        "ring_built_s": round(built_s, 3),
        "new_session_us": round(new_us, 2),
        "known_session_us": round(known_us, 2),
        "hashing_all_names_us": round(all_us),
        "times_faster": round(all_us / new_us),
    }


def _by_all_names(session: SessionRef, names: list[str]) -> list[str]:
    def weight(name: str) -> bytes:
        key = f"{name}\0{session.tenant}\0{session.id}"
        return blake2b(key.encode(), digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


def _microseconds(choose: Callable[[SessionRef], object], sessions: list[SessionRef]) -> float:
    began = time.perf_counter()
    for session in sessions:
        choose(session)
    return (time.perf_counter() - began) / len(sessions) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
