"""What the cold store costs when nothing is ever reused: throughput with it on against off.

    python benchmarks/overhead.py [--rounds 4] [--users 4] [--json OUT]

Two stacks run side by side and take turns, so that both see the same noise. Each round is
``--users`` fresh conversations at once; the figure is the ratio of the summed round times.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.stacks.product_stack import WORD_TOKENS, Client, Stack, client_of, prose, write_json


async def one_round(client: Client, label: str, args: argparse.Namespace) -> float:
    start = time.perf_counter()
    words = int(args.tokens / WORD_TOKENS)
    replies = await asyncio.gather(
        *(
            client.chat(
                [{"role": "user", "content": f"{label}-{i} {prose(f'{label}-{i}', words)}"}],
                max_tokens=args.answer,
            )
            for i in range(args.users)
        )
    )
    assert all(x.status == 200 and not x.error for x in replies), replies
    return time.perf_counter() - start


async def alternate(
    a: Client, b: Client, args: argparse.Namespace, run: Callable[..., Awaitable[float]]
) -> list[tuple[float, float]]:
    """Round times of ``a`` and ``b``."""
    pairs: list[tuple[float, float]] = []
    await run(a, "warm", args), await run(b, "warm", args)
    for i in range(args.rounds):
        # Alternate who goes first: a drift of the machine then cancels out.
        first, second = (a, b) if i % 2 == 0 else (b, a)
        x = await run(first, f"r{i}", args)
        y = await run(second, f"r{i}", args)
        pairs.append((x, y) if i % 2 == 0 else (y, x))
        print(f"  off {pairs[-1][0]:.2f} s, on {pairs[-1][1]:.2f} s", flush=True)
    return pairs


def figures(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [x / y for x, y in pairs]
    return {
        "throughput_on_over_off": round(sum(x for x, _ in pairs) / sum(y for _, y in pairs), 4),
        "median_of_rounds": round(statistics.median(ratios), 4),
        "seconds_off": [round(x, 2) for x, _ in pairs],
        "seconds_on": [round(y, 2) for _, y in pairs],
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    off = {"store": {"ram_bytes": 0, "disk_bytes": 0}}
    on = {"store": {"codec": args.codec}}
    with Stack(off) as without, Stack(on) as with_store:
        async with AsyncExitStack() as exits:
            a = await exits.enter_async_context(client_of(without))
            b = await exits.enter_async_context(client_of(with_store))
            pairs = await alternate(a, b, args, one_round)
    return {"codec": args.codec, "rounds": args.rounds, **figures(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
