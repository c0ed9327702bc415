"""Measures whether one tenant can starve another.

    python -m benchmarks.fairness [--engine vllm] [--model FOLDER] [--seconds 60] [--json OUT]

One tenant has eight endless streams, as many as the engine has places; another chats every five
seconds. Each is measured alone first. The streams must give the same text alone and beside the
other tenant (raw, greedy, float32), as far as both got. The rate of both together counts the
answers' tokens; a second figure adds the chats' prompts, with a quarter for each token. Ratios of
one run on one machine, with the sample model. Takes five times ``--seconds``, and the start.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import MIB, Client, Reply, Stack, client_of, prose
from benchmarks.stacks.vllm_stack import with_plugin
from gateway.keys import generate_key

PLACES = 8
PROMPT_TOKEN = 0.25  # its cost over that of an answer's token, which takes a step
EVERY_S = 5.0
CHAT_TOKENS = 8


async def asked(client: Client, prompt: str, tokens: int, session: str, into: Reply) -> None:
    message = [{"role": "user", "content": prompt}]
    await client.chat(message, session, tokens, into, ignore_eos=True)


@asynccontextmanager
async def endless(busy: Client, name: str) -> AsyncIterator[list[Reply]]:
    """Run eight streams that do not end by themselves; cut them when the block ends."""
    streams = [Reply(0) for _ in range(PLACES)]
    asking = [
        asyncio.create_task(asked(busy, prose(f"endless {i}", 24), 3000, f"{name}-{i}", x))
        for i, x in enumerate(streams)
    ]
    try:
        while not all(x.times for x in streams):
            await asyncio.sleep(0.1)
        yield streams
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def chats(other: Client, seconds: float, name: str) -> list[Reply]:
    """Send a short chat every few seconds; return the replies."""
    found: list[Reply] = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        found.append(Reply(0))
        name_of_it = f"{name}-{len(found)}"
        await asked(other, prose(name_of_it, 12), CHAT_TOKENS, name_of_it, found[-1])
        await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - began)))
    return found


async def starvation(busy: Client, other: Client, seconds: float) -> dict[str, Any]:
    await chats(other, 1.0, "warm")
    alone = p95(await chats(other, seconds, "alone"))
    rates, texts, others = {}, {}, list[Reply]()
    for phase in ("alone", "beside"):
        async with endless(busy, phase) as streams:
            since = time.perf_counter()
            if phase == "beside":
                others = await chats(other, 2 * seconds, "beside")
            else:
                await asyncio.sleep(2 * seconds)  # as long as both together: later tokens cost more
            until = time.perf_counter()
            tokens = [since <= x < until for y in (*streams, *others) for x in y.times]
            rates[phase] = sum(tokens) / (until - since)
            texts[phase] = [x.text for x in streams]
        await asyncio.sleep(2.0)  # the streams' ends are saved
    prompts = PROMPT_TOKEN * sum(x.prompt_tokens for x in others) / (until - since)
    pairs = list(zip(texts["alone"], texts["beside"], strict=True))
    return {
        "ttft_alone_p95_s": round(alone, 3),
        "ttft_beside_p95_s": round(p95(others), 3),
        "ttft_ratio": round(p95(others) / alone, 2),  # 4 at most
        "chats": len(others),
        "tokens_per_s": {name: round(x, 2) for name, x in rates.items()},
        "total_ratio": round(rates["beside"] / rates["alone"], 3),
        "with_prompts_ratio": round((rates["beside"] + prompts) / rates["alone"], 3),  # .95 or more
        "same_text": sum(x[: len(y)] == y[: len(x)] for x, y in pairs),
        "compared_characters": sum(min(len(x), len(y)) for x, y in pairs),
        "streams": PLACES,
    }


def p95(replies: list[Reply]) -> float:
    return float(np.percentile([x.ttft_s for x in replies], 95, method="higher"))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.engine == "vllm":
        stack = with_plugin(512 * MIB, codec="raw", max_context=4096)
    else:
        stack = Stack({"engine": {"hot_bytes": 1024 * MIB}, "store": {"codec": "raw"}})
    stack.settings["engine"] |= {"max_batch": PLACES} | (
        {"model": args.model} if args.model else {}
    )
    keys = [generate_key(name) for name in ("busy", "other")]
    stack.settings["gateway"] = {"api_keys": [line for _, line in keys]}
    async with AsyncExitStack() as held:
        held.enter_context(stack)
        busy, other = [await held.enter_async_context(client_of(stack, x)) for x, _ in keys]
        found = await starvation(busy, other, args.seconds)
    return {"engine": args.engine, **found}


def main() -> None:
    args = arguments(__doc__, "--engine mlx|vllm --model '' --seconds 60.0")
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
