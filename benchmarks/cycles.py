"""Checks that a hundred hibernate/wake cycles give the bytes and the answer of one.

    python benchmarks/cycles.py [--cycles 100] [--tokens 500] [--json OUT]

A session sleeps and wakes for the *same* turn again and again. The packed bytes are read from the
disk tier of the stopped stack, once after one cycle and once after the last.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import MIB, Stack, client_of, words_of
from kvstore.config import StoreConfig
from kvstore.tiers.registry import open_tiers

NAME = "sleeper"


def chunk_hashes(data: Path) -> dict[str, str]:
    """Return the hash of every packed chunk in the stopped stack's disk tier, by its key."""
    (tier,) = open_tiers(StoreConfig(ram_bytes=0), data)
    try:
        return {
            key.hex(): hashlib.blake2b(bytes(blob)).hexdigest() for key, blob in tier.scan(b"c")
        }
    finally:
        tier.close()


async def cycle(stack: Stack, messages: list[dict[str, str]], count: int) -> list[str]:
    texts = []
    async with client_of(stack) as client:
        for i in range(count):
            reply = await client.chat(messages, session=NAME, max_tokens=12)
            texts.append(reply.text)
            await client.until(NAME, "idle")
            await client.sleep(NAME)
            if i % 20 == 0:
                print(f"  cycle {i}: {reply.cache} {reply.text!r}", flush=True)
    return texts


def measure(args: argparse.Namespace) -> dict[str, Any]:
    text = f"{words_of('cycles', args.tokens)}\nWhat is the capital of France?"
    messages = [{"role": "user", "content": text}]
    settings = {"store": {"codec": args.codec, "ram_bytes": 256 * MIB}}
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
        stack = Stack(settings, folder=Path(folder)).start()
        texts = asyncio.run(cycle(stack, messages, 2))
        stack.stop()
        early = chunk_hashes(Path(folder) / "data")
        stack.start()
        texts += asyncio.run(cycle(stack, messages, args.cycles - 2))
        stack.stop()
        late = chunk_hashes(Path(folder) / "data")
    return {
        "codec": args.codec,
        "cycles": args.cycles,
        "chunks": len(early),
        "same_bytes": bool(early) and early == {key: late.get(key) for key in early},
        "answers_after_wake": len(set(texts[1:])),
        "first_answer_same": texts[0] == texts[1],
    }


def main() -> None:
    args = arguments(__doc__, "--cycles 100 --tokens 500 --codec tq3")
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
