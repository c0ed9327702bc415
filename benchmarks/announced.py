"""``serve --sessions N --context C``: does memory stay within what it announced, do N come back?

    python benchmarks/announced.py [--sessions 24] [--context 1024] [--engine mlx] [--json OUT]

Live KV gets room for a few sessions only (``--hot-for``), so that the others have to sleep; all
other budgets are the product's choice. Every session grows to nearly C tokens, falls asleep, and
comes back, the one that was quiet for longest first. Memory is the engine's own (RssAnon of all its
processes), less that before the first session.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from typing import Any

from benchmarks.capacity import BYTES_PER_TOKEN, first_turns
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    rss_mib,
    write_json,
)

OVERHEAD_TOKENS = 90  # of a session: the template, two short messages, two answers
ASLEEP_S = 30.0


def settings_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    engine = {"kind": args.engine, "max_context": args.context}
    engine["hot_bytes"] = int(args.hot_for * (args.context + 256) * BYTES_PER_TOKEN)
    if args.engine == "vllm":
        from benchmarks.stacks.vllm_stack import python_with_vllm

        engine["vllm.python"] = python_with_vllm()
    return {
        "capacity": {"sessions": args.sessions, "context": args.context},
        "engine": engine,
        "store": {"codec": args.codec, "disk_bytes": 0},
        "scheduler": {"idle_after_s": 1.0},
    }


class Watch:
    """The largest memory of the engine's processes that was seen."""

    def __init__(self, stack: Stack) -> None:
        self._engine = stack.engine
        self.before = self.peak = self._now()

    def look(self) -> None:
        self.peak = max(self.peak, self._now())

    def _now(self) -> float:
        return sum(map(rss_mib, [self._engine, *self._engine.children(recursive=True)]))


async def returns(
    client: Client, histories: list[list[dict[str, str]]], watch: Watch
) -> list[Reply]:
    replies = []
    for i, history in enumerate(histories):
        question = {"role": "user", "content": "And another one?"}
        replies.append(await client.chat([*history, question], session=f"s{i}"))
        watch.look()
        print(f"  return {i}: {replies[-1].cache}", flush=True)
    return replies


async def fall_asleep(client: Client, count: int) -> None:
    """Wait until all sessions sleep, as far as this engine lets them."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASLEEP_S):
            for i in range(count):
                await client.until(f"s{i}", "cold")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with Stack(settings_of(args), start_timeout_s=600) as stack:
        async with client_of(stack) as client:
            await client.chat([{"role": "user", "content": "Hello"}], session="warm")
            await client.delete("/v1/sessions/warm")
            watch = Watch(stack)
            words = int((args.context - OVERHEAD_TOKENS) / WORD_TOKENS)
            histories = await first_turns(client, args.sessions, words)
            watch.look()
            await fall_asleep(client, args.sessions)
            replies = await returns(client, histories, watch)
            announced = await announced_bytes(client)
        said = [x for x in stack.log.read_text().splitlines() if "capacity:" in x]
    return figures(args, replies, watch, announced) | {
        "said": [x.partition("capacity: ")[2] for x in said]
    }


def figures(
    args: argparse.Namespace, replies: list[Reply], watch: Watch, announced: float
) -> dict[str, Any]:
    reused = [x.cached_tokens / max(1, x.prompt_tokens) for x in replies]
    tokens = sum(x.prompt_tokens for x in replies)
    grew = watch.peak - watch.before
    sources = ("hot", "cold", "miss")
    return {
        "sessions": args.sessions,
        "longest_tokens": max(x.prompt_tokens for x in replies),
        "came_back": sum(x >= 0.5 for x in reused),
        "reused_share_mean": round(sum(reused) / len(reused), 4),
        "failed": sum(not x.ok for x in replies),
        "sources": {x: sum(r.cache.startswith(x) for r in replies) for x in sources},
        "announced_mib": round(announced / MIB, 1),
        "engine_grew_mib": round(grew, 1),
        "inside": grew <= announced / MIB,
        "all_awake_would_take_mib": round(tokens * BYTES_PER_TOKEN / MIB, 1),
    }


async def announced_bytes(client: Client) -> float:
    """Bytes of memory that live KV and sleepers may take, as the server's own metrics say."""
    async with client._http.get(f"{client._url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    names = (
        "thermocline_engine_hot_capacity_bytes ",
        'thermocline_tier_capacity_bytes{tier="ram"} ',
    )
    return sum(float(x.split()[-1]) for x in lines if x.startswith(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--hot-for", type=float, default=3)
    parser.add_argument("--engine", choices=["mlx", "vllm"], default="mlx")
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
