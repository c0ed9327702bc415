"""vLLM: sixteen users at once, several turns each, for minutes; then every token is checked.

    python benchmarks/on_vllm/soak.py [--users 16] [--minutes 5] [--kill-every 60] [--control]
        [--json OUT]

Users chat as in ``soak.py``, through the gateway, with codec raw in float32. Live conversations are
twice what vLLM's pool holds, and more than the RAM tier holds, too: they go cold and come back, by
eviction and by demotion, from RAM and from disk.

With ``--kill-every`` vLLM and a Redis of its own are killed in turns, kill -9, and come back.

Then a plain vLLM without any cache reads all that was said, prompts and answers, as tokens. At each
place of an answer it must prefer the token that our user got: the same prompt, so the same greedy
choice. How requests are batched changes sums in float32 by some units in the last place, so where
the two best tokens are closer than ``TIE`` either may have been chosen; those are counted as ties.
Everything else is a wrong token.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import psutil

from benchmarks.soak import Habits, gauges_mib, killing_in_turns, sample_of, soak
from benchmarks.stacks.product_stack import MIB, Reply, Stack, rss_mib, write_json
from benchmarks.stacks.vllm_stack import BYTES_PER_TOKEN, MODEL_NAME, PlainVllm, with_plugin
from tests.redis_server import RedisServer

TIE = 1e-3  # of a logprob: a hundred times the effect of the order of sums
MAX_CONTEXT = 2048
AT_ONCE = 4  # requests to the reference
HABITS = Habits(
    words=(8, 40),
    first_words=(150, 400),
    answer_tokens=(8, 24),
    most_turns=8,
    fields={"return_token_ids": True},
)
ROLES = {
    "VLLM::EngineCore": "engine_core",
    "VLLM::Worker": "worker",
    "engines.vllm_plugin.process.server": "api_server",
    "vllm.entrypoints": "api_server",  # of plain vLLM
    "-m engines.vllm_plugin": "starter",
}


def memory_mib(stack: Stack) -> dict[str, float]:
    """MiB of each process, and of the worker without its RAM tier, which fills up to its limit."""
    used = {"gateway": rss_mib(stack.gateway), **by_role(stack.gateway)}
    ram_tier = gauges_mib(stack, ('thermocline_tier_bytes{tier="ram"} ',))
    return used | {"worker_without_ram_tier": used.get("worker", 0.0) - ram_tier}


def by_role(first: psutil.Process) -> dict[str, float]:
    used: dict[str, float] = {}
    for process in [first, *first.children(recursive=True)]:
        if role := _role(process):
            used[role] = used.get(role, 0.0) + rss_mib(process)
    return used


def _role(process: psutil.Process) -> str | None:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return None
    return next((role for mark, role in ROLES.items() if mark in words), None)


@dataclass(frozen=True)
class Transcript:
    """Tokens as the model saw them, and where in them answers are."""

    ids: list[int]
    answers: list[range]


def transcripts(replies: list[Reply]) -> list[Transcript]:
    """A turn whose tokens are the beginning of a later prompt is checked together with that."""
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
    """The advantage of the best token over each token of the answers; 0 = it was that one."""
    body = {
        "model": MODEL_NAME,
        "prompt": said.ids,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 1,
    }
    async with http.post(f"{server.url}/v1/completions", json=body) as answer:
        choice = (await answer.json())["choices"][0]
    places: list[dict[str, Any]] = choice["prompt_logprobs"]
    return [_gap(places[i], said.ids[i]) for answer in said.answers for i in answer]


def _gap(place: dict[str, Any], token: int) -> float:
    best = max(float(x["logprob"]) for x in place.values())
    return best - float(place[str(token)]["logprob"])


def with_a_wrong_token(said: Transcript) -> Transcript:
    """The answer that comes first, begun with another token, which the check must find."""
    place = min(x.start for x in said.answers)
    ids = [*said.ids[:place], said.ids[place] ^ 1]
    return Transcript(ids, [range(place, place + 1)])


async def check(server: PlainVllm, replies: list[Reply]) -> dict[str, Any]:
    said = transcripts(replies)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, transcript: Transcript) -> list[float]:
        async with places:
            return await gaps(server, http, transcript)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        found = await asyncio.gather(*(one(http, x) for x in said))
        (control,) = await one(http, with_a_wrong_token(said[0]))
    differences = sorted((x for xs in found for x in xs if x), reverse=True)
    return {
        "answers_checked": sum(len(x.answers) for x in said),
        "tokens_checked": sum(map(len, found)),
        "wrong_tokens": sum(x > TIE for x in differences),
        "ties": sum(x <= TIE for x in differences),
        "largest_differences": [round(x, 7) for x in differences[:5]],
        "wrong_token_on_purpose": round(control, 3),
    }


async def chat(
    stack: Stack, redis: RedisServer | None, args: argparse.Namespace
) -> tuple[list[Reply], dict[str, Any]]:
    habits = replace(HABITS, leaves=0.05 if redis else 0.0)
    async with killing_in_turns(stack, redis, args.kill_every):
        sample = partial(sample_of, stack, redis, memory_mib)
        return await soak(stack, args.users, args.minutes, habits, sample)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pool_bytes = args.pool_tokens * BYTES_PER_TOKEN
    stack = with_plugin(
        pool_bytes,
        "raw",
        ram_bytes=args.ram_mib * MIB,
        max_context=MAX_CONTEXT,
        disk_bytes=args.disk_mib * MIB,
        idle_after_s=1.0,
    )
    with ExitStack() as around:
        redis = None
        if args.kill_every:
            bounded = ("--maxmemory", f"{args.disk_mib}mb", "--maxmemory-policy", "allkeys-lru")
            redis = around.enter_context(RedisServer(*bounded))
            stack.settings["store"]["redis_url"] = redis.url
        around.enter_context(stack)
        replies, result = asyncio.run(chat(stack, redis, args))
    good = [x for x in replies if x.ok]
    result["tokens_missing"] = sum(x.completion_tokens - len(x.token_ids) for x in good)
    with PlainVllm(1024 * MIB, max_context=MAX_CONTEXT, prefix_caching=False) as server:
        result |= asyncio.run(check(server, good))
    if args.control:
        result["plain_vllm"] = control(args, pool_bytes)
    return result


def control(args: argparse.Namespace, pool_bytes: int) -> dict[str, Any]:
    """The same users and pool without us: vLLM's own reuse and growth of memory."""
    with PlainVllm(pool_bytes, max_context=MAX_CONTEXT) as server:
        _, result = asyncio.run(
            soak(server, args.users, args.minutes, HABITS, lambda: by_role(server.process))
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--pool-tokens", type=int, default=4096)
    parser.add_argument("--ram-mib", type=int, default=128)
    parser.add_argument("--disk-mib", type=int, default=2048)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0 = never")
    parser.add_argument("--control", action="store_true", help="plain vLLM afterwards, too")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
