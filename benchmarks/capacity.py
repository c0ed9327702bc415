"""Measures how many of many sessions come back on memory for a few, and whether memory is bounded.

    python -m benchmarks.capacity [--engine vllm] [--sessions 24] [--tokens 1000] [--hot-for 3]
        [--room 24] [--rounds 1] [--plain] [--json OUT]

Every session has a first turn of about ``--tokens`` tokens; then all come back ``--rounds`` times,
in the same order, which is the worst one for a least-recently-used cache. Live KV of ``--hot-for``
sessions fits. The RAM tier, the only one, has room for ``--room`` sessions of that size (0: all); a
first server measures the size of one. Printed for each round: how many came back (half of the first
prompt or more was reused), the share of reusable tokens that was reused, and the median time to
first token; then the engine's memory as the operating system counts it. ``--plain``: the same on
vLLM without us, with the same pool. Takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.processes import rss_mib
from benchmarks.stacks.product_stack import MIB, Client, Reply, Stack, client_of, words_of
from benchmarks.stacks.vllm_stack import BYTES_PER_TOKEN, PlainVllm, with_plugin

TURN_TOKENS = 128  # for a session beside its first message
PROBE_BYTES = 256 * MIB

History = list[dict[str, str]]


async def first_turn(client: Client, i: int, tokens: int) -> tuple[History, Reply]:
    text = f"Notes {i}: {words_of(i, tokens)}\nOne word, please."
    messages = [{"role": "user", "content": text}]
    reply = await client.chat(messages, session=f"s{i}")
    assert reply.ok, reply
    return [*messages, {"role": "assistant", "content": reply.text}], reply


def figures(firsts: list[tuple[History, Reply]], returns: list[Reply]) -> dict[str, Any]:
    """Return the figures of one round."""
    reusable = [first.prompt_tokens + first.completion_tokens - 1 for _, first in firsts]
    shares = [x.cached_tokens / y for x, y in zip(returns, reusable, strict=True)]
    return {
        "came_back": sum(share >= 0.5 for share in shares),
        "failed": sum(not x.ok for x in returns),
        "reused_share": round(statistics.mean(shares), 4),
        "ttft_median_s": round(statistics.median(x.ttft_s for x in returns), 3),
    }


async def cycle(server: Stack | PlainVllm, args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds on one server; return their figures and the engine's memory."""

    def engine_mib() -> float:
        return rss_mib(server.engine) if isinstance(server, Stack) else 0.0

    async with client_of(server) as client:
        await client.chat([{"role": "user", "content": "Hello"}], session="warm")
        before = peak = engine_mib()
        firsts = [await first_turn(client, i, args.tokens) for i in range(args.sessions)]
        question, rounds = {"role": "user", "content": "And another one?"}, []
        for number in range(args.rounds):
            returns = []
            for i, (history, _) in enumerate(firsts):
                returns.append(await client.chat([*history, question], session=f"s{i}"))
                peak = max(peak, engine_mib())
            rounds.append(figures(firsts, returns))
            print(f"  round {number + 1}: {rounds[-1]}", flush=True)
    first_s = statistics.median(x.ttft_s for _, x in firsts)
    grew = {"engine_grew_mib": round(peak - before, 1)} if peak else {}
    return {"first_ttft_median_s": round(first_s, 3), "rounds": rounds, **grew}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    hot_bytes = int(args.hot_for * (args.tokens + TURN_TOKENS) * BYTES_PER_TOKEN)
    context = args.tokens + 4 * TURN_TOKENS

    def product(ram_bytes: int) -> Stack:
        if args.engine == "vllm":
            return with_plugin(hot_bytes, args.codec, ram_bytes, max_context=context)
        settings = {
            "engine": {"kind": "mlx", "hot_bytes": hot_bytes},
            "store": {"ram_bytes": ram_bytes, "disk_bytes": 0, "codec": args.codec},
            "scheduler": {"idle_after_s": 3600.0},
        }
        return Stack(settings)

    async def bytes_of_one(server: Stack) -> int:
        async with client_of(server) as client:
            await first_turn(client, 0, args.tokens)
            return int((await client.sleep("s0"))["cold_bytes"])

    with product(PROBE_BYTES) as server:
        one = asyncio.run(bytes_of_one(server))
    result: dict[str, Any] = {**vars(args), "session_kib": round(one / 1024, 1)}
    room = args.room or args.sessions + 1  # and the first request's
    with product(room * one) as server:
        result["thermocline"] = asyncio.run(cycle(server, args))
    if args.plain:
        with PlainVllm(hot_bytes, max_context=context) as plain:
            result["plain_vllm"] = asyncio.run(cycle(plain, args))
    return result


def main() -> None:
    args = arguments(
        __doc__,
        "--engine mlx|vllm --sessions 24 --tokens 1000 --hot-for 3.0 --room 0 --rounds 1"
        " --codec tq3 --plain",
    )
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
