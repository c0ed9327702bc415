"""Time to first token of a returning session: restored from cold against prefilled again.

    python benchmarks/restore_ttft.py [--tokens 2048 6144] [--rounds 5] [--json OUT]

One process and one conversation per row: its first turn has nothing to reuse and is prefilled; then
it is put to sleep and comes back ``--rounds`` times with a short new message.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Stack,
    client_of,
    prose,
    write_json,
)


async def one_length(client: Client, tokens: int, rounds: int) -> dict[str, Any]:
    words = int(tokens / WORD_TOKENS)
    prefills, restores, cached, prompts = [], [], [], []
    for i in range(max(1, rounds // 3)):
        name = f"t{tokens}-{i}"
        first = [{"role": "user", "content": f"{i}. {prose(name, words)}\nOne word, please."}]
        reply = await client.chat(first, session=name, max_tokens=4)
        prefills.append(reply.ttft_s)
        prompts.append(reply.prompt_tokens)
        history = [*first, {"role": "assistant", "content": reply.text}]
        print(f"  prefill of {reply.prompt_tokens}: {reply.ttft_s:.2f} s", flush=True)
        for _ in range(rounds):
            await client.until(name, "idle")
            await client.post(f"/v1/sessions/{name}/demote")
            await client.until(name, "cold")
            again = [*history, {"role": "user", "content": "And another?"}]
            back = await client.chat(again, session=name, max_tokens=4)
            assert back.cache.startswith("cold"), back
            restores.append(back.ttft_s)
            cached.append(back.cached_tokens / back.prompt_tokens)
            print(f"  {back.cache}: {back.ttft_s:.3f} s", flush=True)
    prefill, restore = statistics.median(prefills), statistics.median(restores)
    return {
        "tokens": prompts[0],
        "prefill_ttft_s": round(prefill, 3),
        "restore_ttft_s": round(restore, 3),
        "speedup": round(prefill / restore, 1),
        "speedup_worst": round(min(prefills) / max(restores), 1),
        "cached_share": round(statistics.mean(cached), 4),
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "engine": {"hot_bytes": 4096 * MIB},
        "store": {"codec": args.codec, "disk_bytes": 0 if args.no_disk else 8192 * MIB},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings) as stack:
        async with client_of(stack) as client:
            await client.chat([{"role": "user", "content": "Hello"}], session="warm")
            rows = [await one_length(client, n, args.rounds) for n in args.tokens]
    return {"codec": args.codec, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 6144])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="tq3")
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
