"""vLLM: the cost of our plug-in and gateway when nothing is ever reused, against plain vLLM.

    python benchmarks/on_vllm/overhead.py [--rounds 4] [--users 4] [--json OUT]

Two vLLMs stand side by side and take turns, so that both see the same noise: a plain one, asked
directly, and one with the plug-in behind our gateway, where every request is packed and kept. Each
round is ``--users`` users who ask ``--requests`` disjoint prompts each, one after another; a round
of ours ends only when its last save is done. The figure is the ratio of the summed round times.
On a machine that others use, the ratio of the processors' time (of all processes, ours with the
gateway) is the steadier one.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any

import psutil

from benchmarks.overhead import alternate, figures
from benchmarks.soak import gauges_mib
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Stack,
    client_of,
    prose,
    write_json,
)
from benchmarks.stacks.vllm_stack import PlainVllm, with_plugin

MAX_CONTEXT = 2048
POLL_S = 0.05
SAVE_QUEUE = ("thermocline_engine_save_queue_bytes ",)


async def one_user(client: Client, label: str, args: argparse.Namespace) -> None:
    for i in range(args.requests):
        text = f"{label}-{i} {prose(f'{label}-{i}', int(args.tokens / WORD_TOKENS))}"
        messages = [{"role": "user", "content": text}]
        reply = await client.chat(messages, max_tokens=args.answer, ignore_eos=True)
        assert reply.ok and not reply.cached_tokens // 64, reply  # the chat template's, at most


def cpu_s(process: psutil.Process) -> float:
    """Processors' seconds of it and of all its children, so far."""
    times = [x.cpu_times() for x in [process, *process.children(recursive=True)]]
    return float(sum(x.user + x.system for x in times))


async def saved(stack: Stack) -> None:
    while await asyncio.to_thread(gauges_mib, stack, SAVE_QUEUE):
        await asyncio.sleep(POLL_S)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    plain = PlainVllm(args.pool_mib * MIB, MAX_CONTEXT, dtype=args.dtype)
    ours = with_plugin(args.pool_mib * MIB, args.codec, max_context=MAX_CONTEXT, dtype=args.dtype)
    async with AsyncExitStack() as exits:
        off = await exits.enter_async_context(client_of(exits.enter_context(plain)))
        on = await exits.enter_async_context(client_of(exits.enter_context(ours)))

        spent: dict[Client, float] = defaultdict(float)

        async def one_round(client: Client, label: str, args: argparse.Namespace) -> float:
            process = ours.gateway if client is on else plain.process
            before, start = cpu_s(process), time.perf_counter()
            users = [one_user(client, f"{label}-{i}", args) for i in range(args.users)]
            await asyncio.gather(*users)
            if client is on:
                await saved(ours)
            seconds = time.perf_counter() - start
            spent[client] += cpu_s(process) - before
            return seconds

        pairs = await alternate(off, on, args, one_round)
    return {
        "engine": "vllm",
        "codec": args.codec,
        "dtype": args.dtype,
        **figures(pairs),
        "cpu_off_over_on": round(spent[off] / spent[on], 4),
        "cpu_s": {"off": round(spent[off], 1), "on": round(spent[on], 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--requests", type=int, default=3, help="of each user in a round")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
