"""vLLM: many sessions on a pool for a few, with the plug-in and without.

    python benchmarks/on_vllm/capacity.py [--sessions 20] [--tokens 1000] [--pool-for 3]
        [--json OUT]

Every session has a first turn; then each comes back once, in the same order, which is the worst one
for a least-recently-used cache. No session is put to sleep: vLLM evicts, because its pool is full.
Reported is the share of the reusable tokens (all that were computed when the first turn ended) that
were not computed again, once for Thermocline and once for plain vLLM with the same pool.
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
    write_json,
)
from benchmarks.stacks.vllm_stack import BYTES_PER_TOKEN, PlainVllm, with_plugin

TURN_TOKENS = 128  # for a session beside its first message


async def first_turn(client: Client, i: int, words: int) -> tuple[list[dict[str, str]], Reply]:
    messages = [{"role": "user", "content": f"Notes {i}: {prose(i, words)}\nOne word, please."}]
    reply = await client.chat(messages, session=f"s{i}")
    assert reply.status == 200 and reply.error is None, reply
    return [*messages, {"role": "assistant", "content": reply.text}], reply


async def cycle(server: Stack | PlainVllm, count: int, words: int) -> dict[str, Any]:
    async with client_of(server) as client:
        firsts = [await first_turn(client, i, words) for i in range(count)]
        returns = []
        for i, (history, _) in enumerate(firsts):
            question = {"role": "user", "content": "And another one?"}
            returns.append(await client.chat([*history, question], session=f"s{i}"))
            print(f"  return {i}: {returns[-1].cache}, {returns[-1].ttft_s:.2f} s", flush=True)
    shares = [
        back.cached_tokens / (first.prompt_tokens + first.completion_tokens - 1)
        for (_, first), back in zip(firsts, returns, strict=True)
    ]
    return {
        "failed": sum(x.status != 200 or x.error is not None for x in returns),
        "reused_share_min": round(min(shares), 4),
        "reused_share_mean": round(statistics.mean(shares), 4),
        "return_ttft_median_s": round(statistics.median(x.ttft_s for x in returns), 3),
        "first_ttft_median_s": round(statistics.median(x.ttft_s for _, x in firsts), 3),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pool_bytes = args.pool_for * (args.tokens + TURN_TOKENS) * BYTES_PER_TOKEN
    words = int(args.tokens / WORD_TOKENS)
    print("Thermocline", flush=True)
    with with_plugin(pool_bytes, args.codec, max_context=args.tokens + 512) as stack:
        ours = asyncio.run(cycle(stack, args.sessions, words))
    print("plain vLLM", flush=True)
    with PlainVllm(pool_bytes, max_context=args.tokens + 512) as server:
        plain = asyncio.run(cycle(server, args.sessions, words))
    return {
        "sessions": args.sessions,
        "codec": args.codec,
        "pool_mib": round(pool_bytes / MIB, 1),
        "thermocline": ours,
        "plain_vllm": plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--pool-for", type=int, default=3)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
