"""Runs many users for minutes and counts errors, memory, fairness and wrong tokens.

    python -m benchmarks.soak [--users 32] [--minutes 5] [--tenants 4 --kill-every 60] [--json OUT]
    python -m benchmarks.soak --engine vllm [--users 16] [--minutes 5] [--kill-every 60]

Users chat, pause and come back; conversations that grow long are replaced by new sessions. Memory
is that of the engine and the gateway: the second quarter of the run against the last, the slope of
a line through the last half, and the series itself. Of the engine's memory the part beside tensors
and the RAM tier, which vary with the conversations, is also given: a leak would show there.
Fairness is Jain's index of the turns that each user got.

With ``--kill-every`` the engine and a Redis of its own are killed alternately (kill -9) and come
back; the codec is then ``raw``, and some clients leave in mid-answer. On mlx a tenant without a
cache asks for some of the answers again: a different text would be wrong tokens. Open files, the
disk tier's file and Redis's memory are watched like memory: their budgets are small, so they fill
up early, and must then stay constant. A turn that restored nothing must have a reason.

On vLLM the codec is always ``raw``, and a plain vLLM without any cache then reads all prompts and
answers as tokens. At each position of an answer it must prefer the token that our user got: the
same prompt, so the same greedy choice. Batching changes sums in float32 by some units in the last
place, so where the two best tokens are closer than ``TIE`` either may have been chosen; those are
counted as ties. Everything else is a wrong token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import psutil
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.program import arguments, write_json
from benchmarks.stacks.processes import gauges, rss_mib, tree
from benchmarks.stacks.product_stack import MIB, Client, Reply, Stack, client_of, prose
from benchmarks.stacks.vllm_stack import MODEL_NAME, PlainVllm, with_plugin
from gateway.keys import generate_key
from tests.redis_server import RedisServer

SAMPLE_S = 2.0
SERIES_EVERY = 3  # samples
DOWN_S = 5.0  # Redis, each time
LEAVES_S = 10.0  # at the latest, who leaves
ASKED_AGAIN = 40
RAM_TIER = 'thermocline_tier_bytes{tier="ram"} '
ACCOUNTED = {"mlx": ("thermocline_engine_active_bytes ", RAM_TIER), "vllm": (RAM_TIER,)}
USUAL = {  # live conversations are twice what vLLM's pool holds
    "mlx": {"users": 32, "hot_mib": 512, "disk_mib": 256},
    "vllm": {"users": 16, "hot_mib": 180, "disk_mib": 2048},
}
TIE = 1e-3  # of a logprob: a hundred times the effect of the order of sums
VLLM_CONTEXT = 2048
AT_ONCE = 4  # requests to the reference


class Said(NamedTuple):
    messages: list[dict[str, str]]
    max_tokens: int
    text: str


@dataclass
class Habits:
    """The habits of simulated users; pairs are minimum and maximum."""

    words: tuple[int, int] = (8, 40)  # of a message
    first_words: tuple[int, int] = (8, 40)  # of a conversation's first one
    answer_tokens: tuple[int, int] = (4, 12)
    most_turns: int = 4
    fields: dict[str, Any] = field(default_factory=dict)  # of each request
    leaves: float = 0.0  # the share of requests whose client goes away before the end


HABITS = {
    "mlx": Habits(),
    "vllm": Habits(
        first_words=(150, 400),
        answer_tokens=(8, 24),
        most_turns=8,
        fields={"return_token_ids": True},
    ),
}


@dataclass
class Run:
    """The replies of all users so far."""

    habits: Habits
    until: float
    replies: list[Reply] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    async def user(self, client: Client, number: int) -> int:
        """Chat until the time is up; return the number of turns."""
        rng, turns, conversation, habits = random.Random(number), 0, 0, self.habits
        history: list[dict[str, str]] = []
        # Lengths differ, or all users would begin new sessions at the same time.
        longest = 2 * rng.randint(1, habits.most_turns)
        while time.monotonic() < self.until:
            if len(history) >= longest:
                conversation, history, longest = conversation + 1, [], 2 * habits.most_turns
            words = rng.randint(*(habits.words if history else habits.first_words))
            history.append({"role": "user", "content": prose(f"{number}-{turns}", words)})
            max_tokens, name = rng.randint(*habits.answer_tokens), f"u{number}-{conversation}"
            asking = client.chat(history, name, max_tokens, **habits.fields)
            if rng.random() < habits.leaves:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asking, LEAVES_S * rng.random())
                history.pop()
                continue
            reply = await asking
            self.replies.append(reply)
            if reply.ok:
                self.said.append(Said(list(history), max_tokens, reply.text))
            turns += reply.ok
            history.append({"role": "assistant", "content": reply.text})
            await asyncio.sleep(rng.random() * 2)
        return turns


def sample_of(stack: Stack, redis: RedisServer | None, engine: str) -> dict[str, float]:
    """Return the sizes that may grow, except those of a process that is down."""
    found: dict[str, float] = {"gateway_files": stack.gateway.num_fds()}
    files = (stack.root / "data").rglob("data.mdb")
    found |= {"gateway": rss_mib(stack.gateway), "disk": sum(x.stat().st_size for x in files) / MIB}
    with contextlib.suppress(RuntimeError, OSError, psutil.Error):
        used = rss_mib(*tree(stack.engine))
        accounted = gauges(stack, *ACCOUNTED[engine]) / MIB
        found |= {"engine_files": stack.engine.num_fds(), "engine": used}
        found["engine_unaccounted"] = used - accounted
    if redis is not None:
        with contextlib.suppress(RedisError), Redis.from_url(redis.url) as client:
            found["redis"] = client.info("memory")["used_memory"] / MIB
    return found


async def watch(sample: Callable[[], dict[str, float]], until: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = defaultdict(list)
    while time.monotonic() < until:
        for name, value in (await asyncio.to_thread(sample)).items():
            samples[name].append(value)
        await asyncio.sleep(SAMPLE_S)
    return samples


def growth(samples: list[float]) -> dict[str, Any]:
    quarter = max(1, len(samples) // 4)
    late = samples[len(samples) // 2 :]
    slope = statistics.linear_regression(range(len(late)), late).slope if late[1:] else 0.0
    return {
        "second_quarter": round(statistics.mean(samples[quarter : 2 * quarter] or samples), 1),
        "last_quarter": round(statistics.mean(samples[-quarter:]), 1),
        "last_half_per_min": round(slope * 60 / SAMPLE_S, 2),
        f"every_{SAMPLE_S * SERIES_EVERY:g}_s": [round(x) for x in samples[::SERIES_EVERY]],
    }


def summary(replies: list[Reply], turns: list[int]) -> dict[str, Any]:
    good = [x for x in replies if x.ok]
    missed = [x.cache for x in good if x.cache.startswith("miss")]
    reused = sum(x.cached_tokens for x in good) / sum(x.prompt_tokens for x in good)
    return {
        "turns": len(replies),
        "errors": len(replies) - len(good),
        "error_samples": [str(x.error) for x in replies if x.error][:3],
        "error_codes": Counter(str((x.error or {}).get("code")) for x in replies if not x.ok),
        "sources": Counter(x.cache.split(";")[0] for x in good),
        "reasons": Counter(x.cache.partition("reason=")[2] for x in good if "reason=" in x.cache),
        "misses_without_reason": sum("reason=" not in x for x in missed),
        "cached_token_share": round(reused, 4),
        "ttft_p50_s": round(statistics.median(x.ttft_s for x in good), 3),
        "turns_per_user": [min(turns), max(turns)],
        "jain_fairness": round(sum(turns) ** 2 / (len(turns) * sum(x * x for x in turns)), 4),
    }


@contextlib.asynccontextmanager
async def killing(stack: Stack, redis: RedisServer | None, every_s: float) -> AsyncIterator[None]:
    """Kill engine and Redis alternately within the block; wait for the engine at its end."""

    async def kill_in_turns(redis: RedisServer) -> None:
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(stack.kill_engine)
            await asyncio.sleep(every_s)
            redis.kill()
            await asyncio.sleep(DOWN_S)
            redis.start()

    task = asyncio.create_task(kill_in_turns(redis) if redis else asyncio.sleep(0))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(stack.wait_ready)


async def asked_again(stack: Stack, key: str, said: list[Said]) -> dict[str, int]:
    """Ask for some of the answers again as a tenant without a cache; count equal texts."""
    chosen, same = random.Random(0).sample(said, min(ASKED_AGAIN, len(said))), 0
    async with client_of(stack, key) as client:
        for i, (messages, max_tokens, text) in enumerate(chosen):
            same += (await client.chat(messages, f"again-{i}", max_tokens)).text == text
    return {"asked_again": len(chosen), "same_text": same}


# ---- every token of vLLM's answers


class Transcript(NamedTuple):
    """Tokens as the model saw them, and the positions of answers in them."""

    ids: list[int]
    answers: list[range]


def transcripts(replies: list[Reply]) -> list[Transcript]:
    """Return the transcripts to check; a turn that a later prompt begins with is part of that."""
    found: list[Transcript] = []
    for reply in sorted(replies, key=lambda x: -len(x.prompt_ids)):
        whole = reply.prompt_ids + reply.token_ids
        answer = range(len(reply.prompt_ids), len(whole))
        longer = next((x for x in found if x.ids[: len(whole)] == whole), None)
        if longer is None:
            found.append(Transcript(whole, [answer]))
        else:
            longer.answers.append(answer)
    return found


async def gaps(server: PlainVllm, http: aiohttp.ClientSession, said: Transcript) -> list[float]:
    """Return for each token of the answers the best token's lead in logprob; 0 = it is the best."""
    body = {"model": MODEL_NAME, "prompt": said.ids, "max_tokens": 1, "temperature": 0}
    url = f"{server.url}/v1/completions"
    async with http.post(url, json={**body, "prompt_logprobs": 1}) as answer:
        choice = (await answer.json())["choices"][0]
    found = []
    for place in (i for x in said.answers for i in x):
        logprobs = {int(k): v["logprob"] for k, v in choice["prompt_logprobs"][place].items()}
        found.append(max(logprobs.values()) - logprobs[said.ids[place]])
    return found


async def check(server: PlainVllm, replies: list[Reply]) -> dict[str, Any]:
    """Check all replies with plain vLLM; a token changed on purpose must be found, too."""
    said, places = transcripts(replies), asyncio.Semaphore(AT_ONCE)
    spoilt, first = list(said[0].ids), min(x.start for x in said[0].answers)
    spoilt[first] ^= 1
    said.append(Transcript(spoilt[: first + 1], [range(first, first + 1)]))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:

        async def one(x: Transcript) -> list[float]:
            async with places:
                return await gaps(server, http, x)

        *found, on_purpose = await asyncio.gather(*map(one, said))
    differences = sorted((x for each in found for x in each if x > 0), reverse=True)
    return {
        "checked_tokens": sum(map(len, found)),
        "ties": sum(x < TIE for x in differences),
        "wrong_tokens": sum(x >= TIE for x in differences),
        "largest_differences": [round(x, 5) for x in differences[:5]],
        "wrong_token_on_purpose": round(on_purpose[0], 3),
    }


# ---- the servers


def stack_of(args: argparse.Namespace) -> Stack:
    if args.engine == "vllm":
        sizes = {"ram_bytes": args.ram_mib * MIB, "disk_bytes": args.disk_mib * MIB}
        context, hot = VLLM_CONTEXT, args.hot_mib * MIB
        return with_plugin(hot, "raw", max_context=context, idle_after_s=1.0, **sizes)
    store: dict[str, Any] = {"ram_bytes": args.ram_mib * MIB}
    if args.kill_every:
        store |= {"codec": "raw", "disk_bytes": args.disk_mib * MIB}
    engine = {"hot_bytes": args.hot_mib * MIB}
    return Stack({"engine": engine, "store": store, "scheduler": {"idle_after_s": 5.0}})


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    stack, redis = stack_of(args), None
    pairs = [generate_key(f"tenant{i}") for i in range(args.tenants)] if args.tenants > 1 else []
    reference = generate_key("reference")
    if pairs:
        lines = [line for _, line in (*pairs, reference)]
        stack.settings["gateway"] = {"api_keys": lines, "metrics_access": "open"}
    habits = HABITS[args.engine]
    async with AsyncExitStack() as around:
        if args.kill_every:
            bounds = ("--maxmemory", f"{args.disk_mib}mb", "--maxmemory-policy", "allkeys-lru")
            redis = around.enter_context(RedisServer(*bounds))
            stack.settings["store"]["redis_url"] = redis.url
            habits.leaves = 0.05
        around.enter_context(stack)
        clients = [
            await around.enter_async_context(client_of(stack, key))
            for key in [key for key, _ in pairs] or [""]
        ]
        run = Run(habits, time.monotonic() + args.minutes * 60)
        async with killing(stack, redis, args.kill_every):
            sample = partial(sample_of, stack, redis, args.engine)
            watching = asyncio.create_task(watch(sample, run.until))
            users = (run.user(clients[i % len(clients)], i) for i in range(args.users))
            turns = await asyncio.gather(*users)
        result = {"users": args.users, "minutes": args.minutes, **summary(run.replies, turns)}
        result |= {name: growth(x) for name, x in (await watching).items()}
        if args.engine == "mlx" and args.kill_every and pairs:
            result |= await asked_again(stack, reference[0], run.said)
    if args.engine == "vllm":
        good = [x for x in run.replies if x.ok]
        result["tokens_missing"] = sum(x.completion_tokens - len(x.token_ids) for x in good)
        with PlainVllm(1024 * MIB, max_context=VLLM_CONTEXT, prefix_caching=False) as server:
            result |= await check(server, good)
    return result


def main() -> None:
    args = arguments(
        __doc__,
        "--engine mlx|vllm --users 0 --minutes 5.0 --hot-mib 0 --ram-mib 128 --disk-mib 0"
        " --tenants 1 --kill-every 0.0",
    )
    for name, value in USUAL[args.engine].items():
        setattr(args, name, getattr(args, name) or value)
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
