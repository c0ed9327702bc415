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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.stacks.product_stack import (
    MIB,
    Client,
    Reply,
    Server,
    Stack,
    client_of,
    prose,
    rss_mib,
    write_json,
)

SAMPLE_S = 2.0
SERIES_EVERY = 3  # samples
ACCOUNTED = ("thermocline_engine_active_bytes ", 'thermocline_tier_bytes{tier="ram"} ')


@dataclass(frozen=True)
class Habits:
    """The habits of simulated users; pairs are the least and the most."""

    words: tuple[int, int] = (8, 40)  # of a message
    first_words: tuple[int, int] | None = None  # of a conversation's first one; None = ``words``
    answer_tokens: tuple[int, int] = (4, 12)
    most_turns: int = 4
    fields: Mapping[str, Any] = field(default_factory=dict)  # of each request

    def message(self, rng: random.Random, seed: str, *, is_first: bool) -> dict[str, str]:
        words = self.first_words if is_first and self.first_words else self.words
        return {"role": "user", "content": prose(seed, rng.randint(*words))}


async def user(
    client: Client, number: int, until: float, replies: list[Reply], habits: Habits
) -> int:
    rng, turns, conversation = random.Random(number), 0, 0
    history: list[dict[str, str]] = []
    most = habits.most_turns
    longest = 2 * rng.randint(1, most)  # differs, or all would begin anew together for ever
    while time.monotonic() < until:
        if len(history) >= longest:
            conversation, history, longest = conversation + 1, [], 2 * most
        history.append(habits.message(rng, f"{number}-{turns}", is_first=not history))
        reply = await client.chat(
            history,
            session=f"u{number}-{conversation}",
            max_tokens=rng.randint(*habits.answer_tokens),
            **habits.fields,
        )
        replies.append(reply)
        turns += reply.ok
        history.append({"role": "assistant", "content": reply.text})
        await asyncio.sleep(rng.random() * 2)
    return turns


def gauges_mib(stack: Stack, names: tuple[str, ...]) -> float:
    """The sum of these lines of the gateway's metrics."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith(names)) / MIB


def memory_mib(stack: Stack) -> dict[str, float]:
    used = rss_mib(stack.engine)
    return {
        "engine": used,
        "engine_unaccounted": used - gauges_mib(stack, ACCOUNTED),
        "gateway": rss_mib(stack.gateway),
    }


async def watch(sample: Callable[[], dict[str, float]], until: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = defaultdict(list)
    while time.monotonic() < until:
        for name, mib in (await asyncio.to_thread(sample)).items():
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


async def soak(
    server: Server,
    users: int,
    minutes: float,
    habits: Habits,
    sample: Callable[[], dict[str, float]],
) -> tuple[list[Reply], dict[str, Any]]:
    """All users for so long. Returns their replies, and what is to say of them."""
    replies: list[Reply] = []
    async with client_of(server) as client:
        until = time.monotonic() + minutes * 60
        watcher = asyncio.create_task(watch(sample, until))
        turns = await asyncio.gather(
            *(user(client, i, until, replies, habits) for i in range(users))
        )
        samples = await watcher
    result = {"users": users, "minutes": minutes, **summary(replies, turns)}
    return replies, result | {f"{name}_rss": growth(x) for name, x in samples.items()}


def summary(replies: list[Reply], turns: list[int]) -> dict[str, Any]:
    good = [x for x in replies if x.ok]
    return {
        "turns": len(replies),
        "errors": len(replies) - len(good),
        "error_samples": [str(x.error) for x in replies if x.error][:3],
        "sources": Counter(x.cache.split(";")[0] for x in good),
        "cached_token_share": round(
            sum(x.cached_tokens for x in good) / sum(x.prompt_tokens for x in good), 4
        ),
        "ttft_p50_s": round(statistics.median(x.ttft_s for x in good), 3),
        "turns_per_user_min": min(turns),
        "turns_per_user_max": max(turns),
        "jain_fairness": round(sum(turns) ** 2 / (len(turns) * sum(x * x for x in turns)), 4),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "engine": {"hot_bytes": args.hot_mib * MIB},
        "store": {"ram_bytes": args.ram_mib * MIB},
        "scheduler": {"idle_after_s": 5.0},
    }
    with Stack(settings) as stack:
        _, result = await soak(stack, args.users, args.minutes, Habits(), lambda: memory_mib(stack))
    return result


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
