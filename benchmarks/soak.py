"""Thirty-two users at once, several turns each, for minutes: errors, memory, fairness.

    python benchmarks/soak.py [--users 32] [--minutes 5] [--tenants 4 --kill-every 60] [--json OUT]

Users chat, pause and come back; conversations that grow long are replaced by new sessions. Memory
is the engine's and the gateway's own: the second quarter of the run against the
last, the slope of a line through the last half, and the series itself. Of the engine also what is
neither tensors nor the RAM tier, which come and go with the conversations: a leak would be there.
Fairness is Jain's index of the turns that each user got.

With ``--kill-every`` the engine and a Redis of its own are killed in turns, kill -9, and come back;
the codec is then ``raw``, and some of the answers are asked for again, by a tenant that has no
cache: other text would be wrong tokens. Some clients leave in mid-answer then. Open files, the disk
tier's file and Redis's memory are watched like memory: their budgets are small, so they fill up
early, and must stay where they are. Where nothing was restored there must be a reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import psutil
from redis import Redis
from redis.exceptions import RedisError

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
from gateway.keys import generate_key
from tests.redis_server import RedisServer

SAMPLE_S = 2.0
SERIES_EVERY = 3  # samples
DOWN_S = 5.0  # Redis, each time
LEAVES_S = 10.0  # at the latest, who leaves
ASKED_AGAIN = 40
ACCOUNTED = ("thermocline_engine_active_bytes ", 'thermocline_tier_bytes{tier="ram"} ')


# Messages, the most tokens of the answer, its text.
Said: TypeAlias = tuple[list[dict[str, str]], int, str]


@dataclass(frozen=True)
class Habits:
    """The habits of simulated users; pairs are the least and the most."""

    words: tuple[int, int] = (8, 40)  # of a message
    first_words: tuple[int, int] | None = None  # of a conversation's first one; None = ``words``
    answer_tokens: tuple[int, int] = (4, 12)
    most_turns: int = 4
    fields: Mapping[str, Any] = field(default_factory=dict)  # of each request
    leaves: float = 0.0  # the share of requests whose client goes away before the end
    said: list[Said] | None = None  # all questions and answers, if they are wanted

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
        max_tokens = rng.randint(*habits.answer_tokens)
        asking = client.chat(
            history,
            session=f"u{number}-{conversation}",
            max_tokens=max_tokens,
            **habits.fields,
        )
        if rng.random() < habits.leaves:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asking, LEAVES_S * rng.random())
            history.pop()
            continue
        reply = await asking
        replies.append(reply)
        if habits.said is not None and reply.ok:
            habits.said.append((list(history), max_tokens, reply.text))
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
        "second_quarter": round(statistics.mean(samples[quarter : 2 * quarter]), 1),
        "last_quarter": round(statistics.mean(samples[-quarter:]), 1),
        "last_half_per_min": round(slope * 60 / SAMPLE_S, 2),
        f"every_{SAMPLE_S * SERIES_EVERY:g}_s": [round(x) for x in samples[::SERIES_EVERY]],
    }


async def soak(
    server: Server,
    users: int,
    minutes: float,
    habits: Habits,
    sample: Callable[[], dict[str, float]],
    keys: Sequence[str] = ("",),
) -> tuple[list[Reply], dict[str, Any]]:
    """All users for so long, taking ``keys`` in turns. Returns their replies, and a summary."""
    replies: list[Reply] = []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(server, x)) for x in keys]
        until = time.monotonic() + minutes * 60
        watcher = asyncio.create_task(watch(sample, until))
        turns = await asyncio.gather(
            *(user(clients[i % len(clients)], i, until, replies, habits) for i in range(users))
        )
        samples = await watcher
    result = {"users": users, "minutes": minutes, **summary(replies, turns)}
    return replies, result | {_measure(name): growth(x) for name, x in samples.items()}


def _measure(sampled: str) -> str:
    return sampled if sampled.endswith(("_files", "_mib")) else f"{sampled}_rss"


def summary(replies: list[Reply], turns: list[int]) -> dict[str, Any]:
    good = [x for x in replies if x.ok]
    return {
        "turns": len(replies),
        "errors": len(replies) - len(good),
        "error_samples": [str(x.error) for x in replies if x.error][:3],
        "error_codes": Counter(str((x.error or {}).get("code")) for x in replies if not x.ok),
        "sources": Counter(x.cache.split(";")[0] for x in good),
        "reasons": Counter(x.cache.partition("reason=")[2] for x in good if "reason=" in x.cache),
        "misses_without_reason": sum(
            x.cache.startswith("miss") and "reason=" not in x.cache for x in good
        ),
        "cached_token_share": round(
            sum(x.cached_tokens for x in good) / sum(x.prompt_tokens for x in good), 4
        ),
        "ttft_p50_s": round(statistics.median(x.ttft_s for x in good), 3),
        "turns_per_user_min": min(turns),
        "turns_per_user_max": max(turns),
        "jain_fairness": round(sum(turns) ** 2 / (len(turns) * sum(x * x for x in turns)), 4),
    }


@contextlib.asynccontextmanager
async def killing_in_turns(
    stack: Stack, redis: RedisServer | None, every_s: float
) -> AsyncIterator[None]:
    """Kill engine and Redis in turns meanwhile; at the end the engine is there."""
    if redis is None:
        yield
        return
    killing = asyncio.create_task(_kill_in_turns(stack, redis, every_s))
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await asyncio.to_thread(stack.wait_ready)


async def _kill_in_turns(stack: Stack, redis: RedisServer, every_s: float) -> None:
    """Kill the engine, then Redis, and so on, until cancelled. The gateway starts the engine."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(stack.kill_engine)
        await asyncio.sleep(every_s)
        redis.kill()
        await asyncio.sleep(DOWN_S)
        redis.start()


async def asked_again(stack: Stack, key: str, said: list[Said]) -> dict[str, int]:
    """Ask for some of the answers as a tenant that has nothing here yet."""
    chosen = random.Random(0).sample(said, min(ASKED_AGAIN, len(said)))
    same = 0
    async with client_of(stack, key) as client:
        for i, (messages, max_tokens, text) in enumerate(chosen):
            reply = await client.chat(messages, session=f"again-{i}", max_tokens=max_tokens)
            same += reply.text == text
    return {"asked_again": len(chosen), "same_text": same}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "engine": {"hot_bytes": args.hot_mib * MIB},
        "store": {"ram_bytes": args.ram_mib * MIB},
        "scheduler": {"idle_after_s": 5.0},
        "gateway": {},
    }
    pairs = [generate_key(f"tenant{i}") for i in range(args.tenants)] if args.tenants > 1 else []
    reference = generate_key("reference")
    if pairs:
        settings["gateway"] |= {
            "api_keys": [line for _, line in (*pairs, reference)],
            "metrics_access": "open",
        }
    keys = [key for key, _ in pairs] or [""]
    said: list[Said] = []
    redis = None
    habits = Habits(
        said=said if args.kill_every and pairs else None, leaves=0.05 if args.kill_every else 0.0
    )
    async with AsyncExitStack() as around:
        if args.kill_every:
            bounded = ("--maxmemory", f"{2 * args.ram_mib}mb", "--maxmemory-policy", "allkeys-lru")
            redis = around.enter_context(RedisServer(*bounded))
            settings["store"] |= {
                "codec": "raw",
                "disk_bytes": 2 * args.ram_mib * MIB,
                "redis_url": redis.url,
            }
        stack = around.enter_context(Stack(settings))
        watched = partial(sample_of, stack, redis)
        async with killing_in_turns(stack, redis, args.kill_every):
            _, result = await soak(stack, args.users, args.minutes, habits, watched, keys)
        if habits.said is not None:
            result |= await asked_again(stack, reference[0], said)
    return result


def sample_of(
    stack: Stack,
    redis: RedisServer | None,
    memory: Callable[[Stack], dict[str, float]] = memory_mib,
) -> dict[str, float]:
    """Take ``memory``, and all else that may grow, except of a process that is down just now."""
    found: dict[str, float] = {"gateway_files": stack.gateway.num_fds()}
    data = stack.root / "data"
    found["disk_mib"] = sum(x.stat().st_size for x in data.rglob("data.mdb")) / MIB
    with contextlib.suppress(RuntimeError, OSError, psutil.Error):
        found |= {"engine_files": stack.engine.num_fds(), **memory(stack)}
    if redis is not None:
        with contextlib.suppress(RedisError), Redis.from_url(redis.url) as client:
            found["redis_mib"] = client.info("memory")["used_memory"] / MIB
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--hot-mib", type=int, default=512)
    parser.add_argument("--ram-mib", type=int, default=128)
    parser.add_argument("--tenants", type=int, default=1)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0 = never")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
