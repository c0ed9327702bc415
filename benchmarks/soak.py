"""Thirty-two users at once, several turns each, for minutes: errors, memory, fairness.

    python benchmarks/soak.py [--users 32] [--minutes 5] [--json OUT]

Users chat, pause and come back; conversations that grow long are replaced by new sessions. Memory
is what the engine and the gateway hold of their own: the second quarter of the run against the
last, the slope of a line through the last half, and the series itself. Of the engine also what is
neither tensors nor the RAM tier, which come and go with the conversations: a leak would be there.
Fairness is Jain's index of the turns that each user got.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
import urllib.request
from collections import Counter
from typing import Any

from stack import MIB, Client, Reply, Stack, client_of, prose, rss_mib, write_json

SAMPLE_S = 2.0
SERIES_EVERY = 3  # samples
ACCOUNTED = ("thermocline_engine_active_bytes ", 'thermocline_tier_bytes{tier="ram"} ')


async def user(client: Client, number: int, until: float, replies: list[Reply]) -> int:
    rng, turns, conversation = random.Random(number), 0, 0
    history: list[dict[str, str]] = []
    longest = 2 * rng.randint(1, 4)  # differs, or all would begin anew at the same time for ever
    while time.monotonic() < until:
        if len(history) >= longest:
            conversation, history, longest = conversation + 1, [], 8
        history.append({"role": "user", "content": prose(f"{number}-{turns}", rng.randint(8, 40))})
        reply = await client.chat(
            history, session=f"u{number}-{conversation}", max_tokens=rng.randint(4, 12)
        )
        replies.append(reply)
        turns += reply.status == 200 and reply.error is None
        history.append({"role": "assistant", "content": reply.text})
        await asyncio.sleep(rng.random() * 2)
    return turns


def accounted_mib(stack: Stack) -> float:
    """Tensors and the RAM tier, by the engine's own account."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith(ACCOUNTED)) / MIB


async def watch(stack: Stack, until: float) -> dict[str, list[float]]:
    engine, gateway = stack.engine, stack.gateway
    samples: dict[str, list[float]] = {"engine": [], "engine_unaccounted": [], "gateway": []}
    while time.monotonic() < until:
        used, accounted = rss_mib(engine), await asyncio.to_thread(accounted_mib, stack)
        for name, mib in zip(samples, (used, used - accounted, rss_mib(gateway)), strict=True):
            samples[name].append(mib)
        await asyncio.sleep(SAMPLE_S)
    return samples


def growth(samples: list[float]) -> dict[str, Any]:
    quarter = max(1, len(samples) // 4)
    late = samples[len(samples) // 2 :]
    slope = statistics.linear_regression(range(len(late)), late).slope
    return {
        "second_quarter_mib": round(statistics.mean(samples[quarter : 2 * quarter]), 1),
        "last_quarter_mib": round(statistics.mean(samples[-quarter:]), 1),
        "last_half_mib_per_min": round(slope * 60 / SAMPLE_S, 2),
        f"every_{SAMPLE_S * SERIES_EVERY:g}_s_mib": [round(x) for x in samples[::SERIES_EVERY]],
    }


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
        **{f"{name}_rss": growth(x) for name, x in samples.items()},
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
