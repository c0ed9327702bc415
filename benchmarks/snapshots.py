"""What snapshots cost the gateway: CPU of the event loop, by sessions and readers.

    python benchmarks/snapshots.py [--seconds 20] [--json OUT]

A table of made-up sessions changes as busy ones do: each second one in ten takes a turn, and each
reader asks once. The cost is measured against the same work without a reader, so the figure is the
readers' alone. The bytes go nowhere, as a socket's cost is the system's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from engines.base import EngineReport, SessionReport
from engines.http import CacheOutcome
from engines.wire import CodecReport, KVSize, SessionRef, Welcome
from gateway.watch.live import Live
from gateway.watch.metrics import Metrics, PromptDetails, Usage
from gateway.watch.snapshots import MAX_ROWS
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

    async def stats(self) -> EngineReport:
        return EngineReport(
            hot_bytes=0,
            idle_hot_bytes=0,
            hot_capacity_bytes=0,
            active_bytes=0,
            num_running=0,
            num_waiting=0,
            save_queue_bytes=0,
            tiers=[],
            counters={},
        )


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
    alone = watched = longest = 0.0
    nbytes = num_made = 0
    last = ""
    for _ in range(seconds):
        began = time.process_time()
        busy.second()
        looks = time.process_time()
        for _ in range(num_readers):
            made = await busy.live.snapshots.get(None, MAX_ROWS)
            nbytes += len(made.body) if made.tag != last or num_readers > 1 else 0
        num_made, last = num_made + (made.tag != last), made.tag
        ended = time.process_time()
        alone, watched = alone + looks - began, watched + ended - looks
        longest = max(longest, ended - looks)
    return {
        "sessions": num_sessions,
        "readers": num_readers,
        "turns_per_s": max(1, round(TURNS_PER_SECOND * num_sessions)),
        "turns_ms_per_s": round(alone / seconds * 1000, 3),
        "snapshots_ms_per_s": round(watched / seconds * 1000, 3),
        "snapshots_share_of_a_core": round(watched / seconds, 5),
        "snapshots_per_s": round(num_made / seconds, 2),
        "longest_ms": round(longest * 1000, 3),
        "bytes_per_s": round(nbytes / num_readers / seconds),
    }


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
    alone = rows[0]["snapshots_share_of_a_core"]
    print(f"100 sessions, one reader: {alone:.2%} of a core")
    sys.exit(0 if alone <= 0.01 else 1)


if __name__ == "__main__":
    main()
