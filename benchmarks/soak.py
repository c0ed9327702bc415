"""Thirty-two users at once, several turns each, for minutes: errors, memory, fairness.

    python benchmarks/soak.py [--users 32] [--minutes 5] [--json OUT]

Users chat, pause and come back; conversations that grow long are replaced. Memory
is the engine's and the gateway's resident set, the mean of the second quarter of the run against
the mean of the last. Fairness is Jain's index of the turns that each user got.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from typing import Any

from stack import MIB, Client, Reply, Stack, client_of, prose, rss_mib, write_json


async def user(client: Client, number: int, until: float, replies: list[Reply]) -> int:
    rng, turns, conversation = random.Random(number), 0, 0
    history: list[dict[str, str]] = []
    while time.monotonic() < until:
        if len(history) >= 8:
            conversation, history = conversation + 1, []
        history.append({"role": "user", "content": prose(f"{number}-{turns}", rng.randint(8, 40))})
        reply = await client.chat(
            history, session=f"u{number}-{conversation}", max_tokens=rng.randint(4, 12)
        )
        replies.append(reply)
        turns += reply.status == 200 and reply.error is None
        history.append({"role": "assistant", "content": reply.text})
        await asyncio.sleep(rng.random() * 2)
    return turns


async def watch(stack: Stack, until: float) -> list[tuple[float, float]]:
    samples = []
    while time.monotonic() < until:
        samples.append((rss_mib(stack.engine), rss_mib(stack.gateway)))
        await asyncio.sleep(1)
    return samples


def growth(samples: list[float]) -> dict[str, float]:
    quarter = max(1, len(samples) // 4)
    early = statistics.mean(samples[quarter : 2 * quarter])
    late = statistics.mean(samples[-quarter:])
    return {"second_quarter_mib": round(early, 1), "last_quarter_mib": round(late, 1)}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "engine": {"hot_bytes": args.hot_mib * MIB},
        "store": {"ram_bytes": args.ram_mib * MIB},
        "scheduler": {"idle_after_s": 5.0},
    }
    replies: list[Reply] = []
    with Stack(settings) as stack:
        async with client_of(stack) as client:
            until = time.monotonic() + args.minutes * 60
            watcher = asyncio.create_task(watch(stack, until))
            turns = await asyncio.gather(
                *(user(client, i, until, replies) for i in range(args.users))
            )
            samples = await watcher
    good = [x for x in replies if x.status == 200 and not x.error]
    return {
        "users": args.users,
        "minutes": args.minutes,
        "turns": len(replies),
        "errors": len(replies) - len(good),
        "error_samples": [str(x.error) for x in replies if x.error][:3],
        "sources": Counter(x.cache.split(";")[0] for x in good),
        "ttft_p50_s": round(statistics.median(x.ttft_s for x in good), 3),
        "turns_per_user_min": min(turns),
        "turns_per_user_max": max(turns),
        "jain_fairness": round(sum(turns) ** 2 / (len(turns) * sum(x * x for x in turns)), 4),
        "engine_rss": growth([x for x, _ in samples]),
        "gateway_rss": growth([x for _, x in samples]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--hot-mib", type=int, default=512)
    parser.add_argument("--ram-mib", type=int, default=128)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
