"""Measures the cost of the cold store if nothing is ever reused: throughput with and without it.

    python -m benchmarks.overhead [--engine vllm] [--rounds 6] [--users 4] [--json OUT]

Two servers run side by side and take turns, so that both see the same noise. On mlx one stores
sessions and the other does not; on vLLM a plain one is asked directly, and one with the plug-in
through our gateway. In each round ``--users`` users send ``--requests`` new prompts each, one after
another; it ends when the last save is done. The figure is the ratio of the summed round times; on a
machine that others use, the ratio of the processor time of all processes is steadier. Takes some
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.processes import cpu_s, gauges, tree
from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of, words_of
from benchmarks.stacks.vllm_stack import PlainVllm, with_plugin

MAX_CONTEXT = 2048
SAVE_QUEUE = "thermocline_engine_save_queue_bytes "


class Side:
    """One of the two servers, with the seconds of each round and the processor time of all."""

    def __init__(self, server: Stack | PlainVllm, client: Client) -> None:
        self._server, self._client = server, client
        self.process = server.gateway if isinstance(server, Stack) else server.process
        self.seconds: list[float] = []
        self.cpu_s = 0.0

    async def round(self, label: str, args: argparse.Namespace) -> None:
        before, start = cpu_s(tree(self.process)), time.perf_counter()
        await asyncio.gather(*(self._user(f"{label}-{i}", args) for i in range(args.users)))
        if isinstance(self._server, Stack):
            while await asyncio.to_thread(gauges, self._server, SAVE_QUEUE):
                await asyncio.sleep(0.05)
        self.seconds.append(time.perf_counter() - start)
        self.cpu_s += cpu_s(tree(self.process)) - before

    async def _user(self, label: str, args: argparse.Namespace) -> None:
        for i in range(args.requests):
            text = f"{label}-{i} {words_of(f'{label}-{i}', args.tokens)}"
            message = {"role": "user", "content": text}
            reply = await self._client.chat([message], max_tokens=args.answer, ignore_eos=True)
            assert reply.ok and not reply.cached_tokens // 64, reply  # the chat template's, at most


def servers(args: argparse.Namespace) -> tuple[Stack | PlainVllm, Stack]:
    """Return a server without the cold store and one with it, not started yet."""
    if args.engine == "vllm":
        pool = args.pool_mib * MIB
        plain = PlainVllm(pool, MAX_CONTEXT, dtype=args.dtype)
        return plain, with_plugin(pool, args.codec, max_context=MAX_CONTEXT, dtype=args.dtype)
    off = {"store": {"ram_bytes": 0, "disk_bytes": 0}}
    return Stack(off), Stack({"store": {"codec": args.codec}})


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as exits:
        sides = []
        for server in servers(args):
            exits.enter_context(server)
            client = await exits.enter_async_context(client_of(server))
            sides.append(Side(server, client))
        off, on = sides
        for i in range(-1, args.rounds):  # the first one warms up
            # The first server alternates, so that a drift of the machine cancels out.
            for side in (on, off) if i % 2 else (off, on):
                await side.round(f"r{i}", args)
            if i < 0:
                for side in (off, on):
                    side.seconds, side.cpu_s = [], 0.0
            else:
                print(f"  off {off.seconds[-1]:.2f} s, on {on.seconds[-1]:.2f} s", flush=True)
    ratios = [x / y for x, y in zip(off.seconds, on.seconds, strict=True)]
    return {
        **{key: getattr(args, key) for key in ("engine", "codec", "dtype")},
        "throughput_on_over_off": round(sum(off.seconds) / sum(on.seconds), 4),
        "median_of_rounds": round(statistics.median(ratios), 4),
        "cpu_off_over_on": round(off.cpu_s / on.cpu_s, 4),
        "seconds": {"off": off.seconds, "on": on.seconds},
    }


def main() -> None:
    args = arguments(
        __doc__,
        "--engine mlx|vllm --rounds 6 --users 4 --requests 1 --tokens 300 --answer 24"
        " --codec tq3 --dtype float32|bfloat16 --pool-mib 512",
    )
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
