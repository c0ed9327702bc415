"""Many sessions on memory for a few: how many come back, round after round, and is memory bounded?

    python -m benchmarks.capacity [--engine vllm] [--sessions 24] [--tokens 1000] [--hot-for 3]
        [--room 24] [--rounds 1] [--plain] [--json OUT]

Every session has a first turn of about ``--tokens`` tokens; then all come back ``--rounds`` times,
in the same order, which is the worst one for a least-recently-used cache. The RAM tier, which is
the only one, is for ``--room`` sessions of that size, by what one of them takes in a first server.
Printed for each round: how many came back (half of the first prompt or more was reused), what was
reused of what could be, and the median time to first token; then the engine's memory as the
operating system counts it. ``--plain``: the same on vLLM without us, with the same pool.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    prose,
    rss_mib,
    write_json,
)
from benchmarks.stacks.vllm_stack import BYTES_PER_TOKEN, PlainVllm, with_plugin

TURN_TOKENS = 128  # for a session beside its first message
PROBE_BYTES = 256 * MIB

History = list[dict[str, str]]


async def first_turn(client: Client, i: int, tokens: int) -> tuple[History, Reply]:
    words = prose(i, int(tokens / WORD_TOKENS))
    messages = [{"role": "user", "content": f"Notes {i}: {words}\nOne word, please."}]
    reply = await client.chat(messages, session=f"s{i}")
    assert reply.ok, reply
    return [*messages, {"role": "assistant", "content": reply.text}], reply


def figures(firsts: list[tuple[History, Reply]], returns: list[Reply]) -> dict[str, Any]:
    """Sum up one round."""
    reusable = [first.prompt_tokens + first.completion_tokens - 1 for _, first in firsts]
    shares = [x.cached_tokens / y for x, y in zip(returns, reusable, strict=True)]
    return {
        "came_back": sum(share >= 0.5 for share in shares),
        "failed": sum(not x.ok for x in returns),
        "reused_share": round(statistics.mean(shares), 4),
        "ttft_median_s": round(statistics.median(x.ttft_s for x in returns), 3),
    }


async def cycle(server: Stack | PlainVllm, args: argparse.Namespace) -> dict[str, Any]:
    """Play all rounds on one server."""
    async with client_of(server) as client:
        await client.chat([{"role": "user", "content": "Hello"}], session="warm")
        before = rss_mib(server.engine) if isinstance(server, Stack) else 0.0
        firsts = [await first_turn(client, i, args.tokens) for i in range(args.sessions)]
        question, peak, rounds = {"role": "user", "content": "And another one?"}, before, []
        for number in range(args.rounds):
            returns = []
            for i, (history, _) in enumerate(firsts):
                returns.append(await client.chat([*history, question], session=f"s{i}"))
                if isinstance(server, Stack):
                    peak = max(peak, rss_mib(server.engine))
            rounds.append(figures(firsts, returns))
            print(f"  round {number + 1}: {rounds[-1]}", flush=True)
    first_s = statistics.median(x.ttft_s for _, x in firsts)
    grew = {"engine_grew_mib": round(peak - before, 1)} if peak else {}
    return {"first_ttft_median_s": round(first_s, 3), "rounds": rounds, **grew}


def product(args: argparse.Namespace, ram_bytes: int) -> Stack:
    hot_bytes = int(args.hot_for * (args.tokens + TURN_TOKENS) * BYTES_PER_TOKEN)
    if args.engine == "vllm":
        context = args.tokens + 4 * TURN_TOKENS
        return with_plugin(hot_bytes, args.codec, ram_bytes, max_context=context)
    settings = {
        "engine": {"kind": "mlx", "hot_bytes": hot_bytes},
        "store": {"ram_bytes": ram_bytes, "disk_bytes": 0, "codec": args.codec},
        "scheduler": {"idle_after_s": 3600.0},
    }
    return Stack(settings)


async def bytes_of_one(server: Stack, args: argparse.Namespace) -> int:
    """Return the packed bytes of one session."""
    async with client_of(server) as client:
        await first_turn(client, 0, args.tokens)
        await client.post("/v1/sessions/s0/demote")
        return int((await client.until("s0", "cold"))["cold_bytes"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with product(args, PROBE_BYTES) as server:
        one = asyncio.run(bytes_of_one(server, args))
    result: dict[str, Any] = {**vars(args), "session_kib": round(one / 1024, 1)}
    with product(args, args.room * one) as server:
        result["thermocline"] = asyncio.run(cycle(server, args))
    if args.plain:
        pool = int(args.hot_for * (args.tokens + TURN_TOKENS) * BYTES_PER_TOKEN)
        with PlainVllm(pool, max_context=args.tokens + 4 * TURN_TOKENS) as plain:
            result["plain_vllm"] = asyncio.run(cycle(plain, args))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["mlx", "vllm"], default="mlx")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--hot-for", type=float, default=3, help="sessions whose KV fits unpacked")
    parser.add_argument("--room", type=int, default=0, help="sessions that fit packed; 0 = all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--plain", action="store_true", help="plain vLLM afterwards, too")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    args.room = args.room or args.sessions + 1  # and the first request's
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
