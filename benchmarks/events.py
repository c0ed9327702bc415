"""What streams of events cost the gateway: CPU of the event loop, by sessions, turns and readers.

    python benchmarks/events.py [--seconds 20] [--json OUT]

A table of made-up sessions changes as busy ones do: each second one in ten takes a turn. Looks are
made as the server makes them, once a second of the sessions' life; their cost is measured
against the same work without a reader, so the figure is the readers' alone. The bytes go nowhere,
as a socket's cost is the system's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.base import SessionReport
from engines.http import CacheOutcome
from engines.wire import CodecReport, KVSize, SessionRef, Welcome
from gateway.watch.live import Live
from gateway.watch.metrics import Metrics, PromptDetails, Usage
from gateway.watch.scope import Scope
from scheduler.config import SchedulerConfig
from scheduler.sessions import SessionManager

TURNS_PER_SECOND = 0.1  # of each session


class NoEngine:
    """As much of an engine as a table needs that is filled by hand."""

    welcome = Welcome(
        engine="none",
        engine_version="",
        model="m",
        max_context=8192,
        codec=CodecReport(name="raw"),
        hibernation=True,
        live_kv=KVSize(1000),
        bf16_kv=KVSize(1000),
    )
    codec = welcome.codec
    ready = True
    trouble = ""


class Busy:
    """Sessions that take turns."""

    def __init__(self, num_sessions: int) -> None:
        engine: Any = NoEngine()
        self.now = 1000.0

        def clock() -> float:
            return self.now

        config = SchedulerConfig()
        self.manager = SessionManager(engine, config, salt_of=lambda name: b"", clock=clock)
        self.live = Live(engine, self.manager, Metrics(), clock=clock, wall=clock)
        self.refs = [SessionRef(f"tenant{i % 5}", f"s{i}", b"") for i in range(num_sessions)]
        self.turns = 0
        for ref in self.refs:
            self.turn(ref)

    def second(self) -> None:
        self.now += 1.0
        for _ in range(max(1, round(TURNS_PER_SECOND * len(self.refs)))):
            self.turns += 1
            self.turn(self.refs[self.turns * 7919 % len(self.refs)])

    def turn(self, ref: SessionRef) -> None:
        table = self.manager.table
        with self.live.request(ref, "req_1", "chat", "curl") as request:
            row = table.begin(ref)
            request.admitted()
            request.cache = CacheOutcome("hot", 90)
            request.took(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
            request.usage = Usage(100, 20, PromptDetails(90))
            row.known = True
            table.end(row)
        table.take(row, _report(ref))


def _report(ref: SessionRef) -> SessionReport:
    return SessionReport(
        tenant=ref.tenant,
        id=ref.id,
        hot=True,
        tier="ram",
        tokens=120,
        hot_bytes=120_000,
        cold_bytes=24_000,
        idle_s=0.0,
        pinned=False,
        busy=False,
    )


async def cost(num_sessions: int, num_readers: int, seconds: int) -> dict[str, Any]:
    """Measure one case; CPU in milliseconds for each second of the sessions' life."""
    busy = Busy(num_sessions)
    alone = _cpu(lambda: _seconds(busy, None, seconds))
    with busy.live.reading(None) as scope:
        first = _cpu(lambda: sum(len(x) for x in scope.snapshot()))
        seen = [scope.moment] * num_readers
        longest, nbytes = [0.0], [0]

        def notify() -> None:
            began = time.process_time()
            busy.live.look()
            for i, moment in enumerate(seen):
                if scope.moment > moment:
                    nbytes[0] += len(scope.change_since(moment))
                    seen[i] = scope.moment
            longest[0] = max(longest[0], time.process_time() - began)

        watched = _cpu(lambda: _seconds(busy, notify, seconds))
        quiet = _cpu(lambda: _looks(busy, scope, seconds))
    await busy.live.close()
    return {
        "sessions": num_sessions,
        "readers": num_readers,
        "turns_per_s": max(1, round(TURNS_PER_SECOND * num_sessions)),
        "turns_ms_per_s": round(alone / seconds * 1000, 3),
        "events_ms_per_s": round((watched - alone) / seconds * 1000, 3),
        "events_share_of_a_core": round((watched - alone) / seconds, 5),
        "quiet_ms_per_s": round(quiet / seconds * 1000, 3),
        "longest_look_ms": round(longest[0] * 1000, 3),
        "snapshot_ms": round(first * 1000, 3),
        "bytes_per_s": round(nbytes[0] / max(1, num_readers) / seconds),
    }


def _seconds(busy: Busy, after: Callable[[], None] | None, seconds: int) -> None:
    for _ in range(seconds):
        busy.second()
        if after:
            after()


def _looks(busy: Busy, scope: Scope, seconds: int) -> None:
    """Looks while nothing happens."""
    for _ in range(seconds):
        busy.now += 1.0
        busy.live.look()
        scope.change_since(scope.moment)


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


async def measure(seconds: int) -> list[dict[str, Any]]:
    cases = ((100, 1), (100, 8), (1000, 1), (10_000, 1), (10_000, 8))
    return [await cost(*case, seconds) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = asyncio.run(measure(given.seconds))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    alone = rows[0]["events_share_of_a_core"]
    print(f"100 sessions, one reader: {alone:.2%} of a core")
    sys.exit(0 if alone <= 0.01 else 1)


if __name__ == "__main__":
    main()
