"""Whether one tenant can starve another, and how tokens are shared while all want more.

    python benchmarks/fairness.py [--engine mlx|vllm] [--model FOLDER] [--seconds 60] [--json OUT]

*Starvation*: one tenant has eight endless streams, as many as the engine has places; another chats
every five seconds. Each is measured alone first. What the streams said alone and beside the other
tenant must be the same text (raw, greedy, float32), as far as both got. The rate of both
together is that of the answers' tokens; and once more with the chats' prompts, of which a token
counts a quarter.

*Shares*: three tenants ask at 100 : 10 : 1, the last one for somewhat more than a third of the
engine's speed, so that all of them wait. Jain's index of the tokens that each was served.

Ratios of one run on one machine; the sample model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.neighbours import Processes
from benchmarks.stacks.product_stack import MIB, Stack, prose, write_json
from benchmarks.stacks.vllm_stack import with_plugin
from gateway.keys import generate_key

PLACES = 8
PROMPT_TOKEN = 0.25  # of a token of an answer, which takes a step of its own
EVERY_S = 5.0
CHAT_TOKENS = 8
OFFERED = {"large": 100, "middle": 10, "small": 1}
SMALL_PER_S = 0.4  # requests of the smallest tenant; their length follows from its share
LONGEST = 400  # tokens of one
WARM_UP_SHARE = 1 / 3  # of the time of the shares: lines fill
TARGETS = {"ttft_ratio": 4.0, "total_ratio": 0.95, "jain": 0.95}


@dataclass
class Stream:
    """One stream's text, and the times at which its tokens came."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    status: int = 0
    prompt_tokens: int = 0

    def tokens_between(self, since: float, until: float) -> int:
        return sum(since <= x < until for x in self.times)


class Tenant:
    """A tenant's client: streams text completions, and notes when each token came."""

    def __init__(self, name: str, key: str, stack: Stack, http: aiohttp.ClientSession) -> None:
        self.name, self._stack, self._http = name, stack, http
        self._headers = {"authorization": f"Bearer {key}"}
        self.model = ""

    async def find_model(self) -> None:
        url = f"{self._stack.url}/v1/models"
        async with self._http.get(url, headers=self._headers) as answer:
            self.model = (await answer.json())["data"][0]["id"]

    async def stream(self, prompt: str, max_tokens: int, session: str, into: Stream) -> Stream:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        headers = {**self._headers, "x-session-id": session}
        url = f"{self._stack.url}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as answer:
            into.status = answer.status
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    into.prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", 0)
                    for choice in event.get("choices", []):
                        self._take(choice, into)
        return into

    @staticmethod
    def _take(choice: dict[str, Any], into: Stream) -> None:
        if text := choice["delta"].get("content"):
            into.text += text
            into.times.append(time.perf_counter())


# ---- starvation


async def endless(tenant: Tenant, name: str) -> AsyncIterator[list[Stream]]:
    """Eight streams that do not end by themselves; they are cut when the caller is done."""
    streams = [Stream() for _ in range(PLACES)]
    tasks = [
        asyncio.create_task(tenant.stream(prose(f"endless {i}", 24), 3000, f"{name}-{i}", x))
        for i, x in enumerate(streams)
    ]
    try:
        while not all(x.times for x in streams):
            await asyncio.sleep(0.1)
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def chats(tenant: Tenant, seconds: float, name: str) -> tuple[list[float], list[Stream]]:
    """A short chat every so often. Returns the times to first token, and the streams."""
    ttfts, streams = [], []
    until = time.perf_counter() + seconds
    number = 0
    while (began := time.perf_counter()) < until:
        stream = Stream()
        prompt = prose(f"{name} {number}", 12)
        await tenant.stream(prompt, CHAT_TOKENS, f"{name}-{number}", stream)
        if stream.times:
            ttfts.append(stream.times[0] - began)
        streams.append(stream)
        number += 1
        await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))
    return ttfts, streams


async def starvation(
    busy: Tenant, other: Tenant, seconds: float, processes: Processes
) -> dict[str, Any]:
    await chats(other, 1.0, "warm")
    alone, _ = await chats(other, seconds, "alone")
    rates, texts, prompts, cpu_s = {}, {}, 0.0, {}
    beside: list[float] = []
    for phase in ("alone", "beside"):
        async for streams in endless(busy, phase):
            since, used_s = time.perf_counter(), processes.cpu_s()["engine"]
            others: list[Stream] = []
            if phase == "beside":
                beside, others = await chats(other, 2 * seconds, "beside")
            else:
                await asyncio.sleep(2 * seconds)  # as long, since a token costs more the later
            until, used_s = time.perf_counter(), processes.cpu_s()["engine"] - used_s
            cpu_s[phase] = used_s / (until - since)
            prompts = PROMPT_TOKEN * sum(x.prompt_tokens for x in others) / (until - since)
            for who, sent in (("busy", streams), ("other", others)):
                number = sum(x.tokens_between(since, until) for x in sent)
                rates[f"{who}_{phase}"] = number / (until - since)
            texts[phase] = [x.text for x in streams]
        await asyncio.sleep(2.0)  # the streams' ends are saved
    pairs = list(zip(texts["alone"], texts["beside"], strict=True))
    total = rates["busy_beside"] + rates["other_beside"]
    return {
        "ttft_alone_p95_s": round(p95(alone), 3),
        "ttft_beside_p95_s": round(p95(beside), 3),
        "ttft_beside_p50_s": round(statistics.median(beside), 3),
        "ttft_ratio": round(p95(beside) / p95(alone), 2),
        "chats": len(beside),
        "tokens_per_s": {name: round(x, 2) for name, x in rates.items()},
        "total_ratio": round(total / rates["busy_alone"], 3),
        "with_prompts_ratio": round((total + prompts) / rates["busy_alone"], 3),
        # By the engine's processor time, which other programs of the machine disturb less.
        "engine_cores": {name: round(x, 2) for name, x in cpu_s.items()},
        "total_ratio_by_cpu": round(
            total / cpu_s["beside"] / (rates["busy_alone"] / cpu_s["alone"]), 3
        ),
        "same_text": sum(x[: len(y)] == y[: len(x)] for x, y in pairs),
        "compared_characters": sum(min(len(x), len(y)) for x, y in pairs),
        "streams": PLACES,
    }


def p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))] if values else float("nan")


# ---- shares


async def shares(tenants: dict[str, Tenant], seconds: float, capacity: float) -> dict[str, Any]:
    """``capacity``: tokens/s of the engine. Open loop: who is refused does not come again."""
    length = max(8, min(LONGEST, round(1.3 * capacity / 3 / SMALL_PER_S)))
    per_s = 1.3 * capacity / 3 / length  # of the smallest tenant
    streams: dict[str, list[Stream]] = {name: [] for name in tenants}
    began = time.perf_counter()
    asking = [
        asyncio.create_task(arrivals(tenants[name], streams[name], per_s * times, length, seconds))
        for name, times in OFFERED.items()
    ]
    await asyncio.gather(*asking)
    since, until = began + seconds * WARM_UP_SHARE, time.perf_counter()
    served = {
        name: sum(x.tokens_between(since, until) for x in sent) for name, sent in streams.items()
    }
    statuses = {name: dict(Counter(x.status for x in sent)) for name, sent in streams.items()}
    return {
        "requests_per_s_of_small": round(per_s, 3),
        "tokens_of_a_request": length,
        "served_tokens": served,
        "statuses": statuses,
        "jain": round(jain(list(served.values())), 4),
    }


async def arrivals(
    tenant: Tenant, sent: list[Stream], per_s: float, length: int, seconds: float
) -> None:
    tasks = []
    until, number = time.perf_counter() + seconds, 0
    began = time.perf_counter()
    while (now := time.perf_counter()) < until:
        while number < (now - began) * per_s + 1:
            sent.append(Stream())
            name = f"share-{tenant.name}-{number}"
            turn = tenant.stream(prose(name, 8), length, name, sent[-1])
            tasks.append(asyncio.create_task(turn))
            number += 1
        await asyncio.sleep(min(0.05, 1 / per_s))
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


def jain(values: list[int]) -> float:
    squares = sum(x * x for x in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


# ---- the stack


def stack_for(engine: str, model: str, key_lines: list[str]) -> Stack:
    if engine == "vllm":
        stack = with_plugin(512 * MIB, codec="raw", max_context=4096)
    else:
        settings = {"engine": {"hot_bytes": 1024 * MIB}, "store": {"codec": "raw"}}
        stack = Stack(settings)
    stack.settings["engine"]["max_batch"] = PLACES
    if model:
        stack.settings["engine"]["model"] = model
    stack.settings["gateway"] = {"api_keys": key_lines}
    return stack


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    names = ["busy", "other", *OFFERED]
    keys = {name: generate_key(name) for name in names}
    result: dict[str, Any] = {"engine": args.engine}
    with stack_for(args.engine, args.model, [line for _, line in keys.values()]) as stack:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            tenants = {name: Tenant(name, keys[name][0], stack, http) for name in names}
            for tenant in tenants.values():
                await tenant.find_model()
            found = await starvation(
                tenants["busy"], tenants["other"], args.seconds, Processes(stack)
            )
            result["starvation"] = found
            print(json.dumps(found), flush=True)
            capacity = found["tokens_per_s"]["busy_alone"]
            three = {name: tenants[name] for name in OFFERED}
            result["shares"] = await shares(three, 2 * args.seconds, capacity)
    result["targets"] = TARGETS
    result["met"] = met(result)
    return result


def met(result: dict[str, Any]) -> dict[str, bool]:
    starving = result["starvation"]
    tests: dict[str, Callable[[], bool]] = {
        "ttft_ratio": lambda: starving["ttft_ratio"] <= TARGETS["ttft_ratio"],
        "total_ratio": lambda: starving["total_ratio"] >= TARGETS["total_ratio"],
        "same_text": lambda: starving["same_text"] == starving["streams"],
        "jain": lambda: result["shares"]["jain"] > TARGETS["jain"],
    }
    return {name: test() for name, test in tests.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("mlx", "vllm"), default="mlx")
    parser.add_argument("--model", default="", help="a folder; without it the sample model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
