"""Ten thousand idle connections beside active requests: their extra waiting, and the memory.

    python benchmarks/idle_connections.py [--idle 10000] [--seconds 15] [--json OUT]

The real gateway with the fake engine. Active requests are short streams, sixteen at a time: their
whole time, median and p99, and the gateway's CPU time for each, with no other client, then
beside connections that send nothing (a tenth of them sent half a head), then alone again. Where the
limit of open files, of this process or of the gateway, allows fewer connections, as many as it
allows are opened, and the result says how many.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from benchmarks.stacks.product_stack import rss_mib, write_json

ACTIVE = 16
SPARE_FILES = 512
SETTLE_S = 5.0
TARGET = 2.0
HALF_A_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


class Phase(NamedTuple):
    """The times of all requests of a phase, and the processor's time that they took."""

    times: list[float]
    cpu_s: float

    def quantile_ms(self, share: float) -> float:
        return round(sorted(self.times)[int(share * (len(self.times) - 1))] * 1e3, 1)

    @property
    def cpu_ms(self) -> float:
        return round(self.cpu_s / len(self.times) * 1e3, 2)


def phase(stack: FakeStack, seconds: float) -> Phase:
    before = cpu_s(stack.process)
    times = asyncio.run(active(stack.url, seconds))
    return Phase(times, cpu_s(stack.process) - before)


def cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


async def active(url: str, seconds: float) -> list[float]:
    """The times of all requests of so many seconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "say something"}],
        "stream": True,
        "metadata": {"fake": "chunks=20"},
    }

    async def user(http: aiohttp.ClientSession) -> None:
        while (began := time.perf_counter()) < until:
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(user(http) for _ in range(ACTIVE)))
    return times


def connections(stack: ExitStack, port: int, wanted: int) -> int:
    """Open connections that send nothing, or half a head; returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    number = min(wanted, hard - SPARE_FILES)
    for i in range(number):
        sock = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
        if i % 10 == 0:
            sock.sendall(HALF_A_HEAD)
    return number


def held(gateway: psutil.Process) -> int:
    return sum(x.status == psutil.CONN_ESTABLISHED for x in gateway.net_connections("tcp"))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, FakeStack(Path(name)) as server:
        gateway = server.process
        phase(server, 2.0)
        quiet, before = phase(server, args.seconds), rss_mib(gateway)
        with ExitStack() as stack:
            opened = connections(stack, server.port, args.idle)
            time.sleep(1.0)
            there = held(gateway)
            beside, after = phase(server, args.seconds), rss_mib(gateway)
        time.sleep(SETTLE_S)  # ten thousand ends are work, too
        phases = (quiet, beside, phase(server, args.seconds))
    p99 = [x.quantile_ms(0.99) for x in phases]
    ratio = p99[1] / ((p99[0] + p99[2]) / 2)
    return {
        "opened": opened,
        "held_by_the_gateway": there,
        "requests": [len(x.times) for x in phases],
        "median_ms": [x.quantile_ms(0.5) for x in phases],
        "p99_ms": p99,
        "cpu_ms_per_request": [x.cpu_ms for x in phases],
        "p99_ratio": round(ratio, 2),
        "memory_mib_more": round(after - before, 1),
        "target": TARGET,
        "met": ratio < TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
