"""Many sessions on hot memory for a few: do all come back, and is memory really bounded?

    python benchmarks/capacity.py [--sessions 24] [--tokens 1000] [--hot-for 3] [--json OUT]

Every session has a first turn of about ``--tokens`` tokens; later each comes back once, in the same
order, which is the worst one for a least-recently-used cache. Reported: the share of the reusable
prefix (all that was in the cache when the first turn ended) that was not prefilled again, failures,
and the engine's memory as the operating system and mlx measure it.
"""

from __future__ import annotations

import argparse
import asyncio
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

# SmolLM2-135M on CPU: 30 layers x 3 heads x (64 + 64) values of four bytes.
BYTES_PER_TOKEN = 30 * 3 * 128 * 4


async def first_turns(client: Client, count: int, words: int) -> list[list[dict[str, str]]]:
    histories = []
    for i in range(count):
        messages = [{"role": "user", "content": f"Notes {i}: {prose(i, words)}\nOne word, please."}]
        reply = await client.chat(messages, session=f"s{i}")
        assert reply.status == 200 and reply.error is None, reply
        histories.append([*messages, {"role": "assistant", "content": reply.text}])
        print(f"  first turn {i}: {reply.prompt_tokens} tokens, {reply.cache}", flush=True)
    return histories


async def second_turns(
    client: Client, stack: Stack, histories: list[list[dict[str, str]]], peaks: dict[str, float]
) -> list[Reply]:
    replies = []
    for i, history in enumerate(histories):
        question = {"role": "user", "content": "And another one?"}
        reply = await client.chat([*history, question], session=f"s{i}")
        replies.append(reply)
        peaks["rss_mib"] = max(peaks["rss_mib"], rss_mib(stack.engine))
        print(f"  return {i}: {reply.cache}, TTFT {reply.ttft_s:.2f} s", flush=True)
    return replies


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    hot_bytes = int(args.hot_for * (args.tokens + 128) * BYTES_PER_TOKEN)
    ram_bytes = args.ram_mib * MIB
    settings = {
        "engine": {"hot_bytes": hot_bytes},
        "store": {"ram_bytes": ram_bytes, "codec": args.codec},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings) as stack:
        async with client_of(stack) as client:
            await client.chat([{"role": "user", "content": "Hello"}], session="warm")
            before, peaks = rss_mib(stack.engine), {"rss_mib": 0.0}
            histories = await first_turns(client, args.sessions, int(args.tokens / WORD_TOKENS))
            reusable = [x["tokens"] for x in (await client.get("/v1/sessions"))["data"]]
            replies = await second_turns(client, stack, histories, peaks)
    failed = [x for x in replies if x.status != 200 or x.error]
    # What could be reused: everything of the prompt but the new user message.
    shares = [x.cached_tokens / max(1, x.prompt_tokens - args.new_tokens) for x in replies]
    return {
        "sessions": args.sessions,
        "codec": args.codec,
        "hot_budget_mib": round(hot_bytes / MIB, 1),
        "all_sessions_hot_would_need_mib": round(sum(reusable) * BYTES_PER_TOKEN / MIB, 1),
        "failed": len(failed),
        "reused_share_min": round(min(shares), 4),
        "reused_share_mean": round(sum(shares) / len(shares), 4),
        "sources": {
            x: sum(r.cache.startswith(x) for r in replies) for x in ("hot", "cold", "miss")
        },
        "engine_rss_before_mib": round(before, 1),
        "engine_rss_peak_mib": round(peaks["rss_mib"], 1),
        "engine_rss_grew_mib": round(peaks["rss_mib"] - before, 1),
        "budgets_mib": round((hot_bytes + ram_bytes) / MIB, 1),
        "return_ttft_median_s": round(sorted(x.ttft_s for x in replies)[len(replies) // 2], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--hot-for", type=float, default=3)
    parser.add_argument("--ram-mib", type=int, default=256)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--new-tokens", type=int, default=12, help="of the second message")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
