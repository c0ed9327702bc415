"""Measures the time to first token of a returning session: prefilled, hot, and restored.

    python -m benchmarks.restore_ttft [--engine vllm] [--tokens 2048 6144] [--rounds 4]
        [--codec tq3] [--dtype float32] [--folder F] [--json OUT]

A learned codec needs a folder in which it was calibrated:

    THERMOCLINE_DATA_DIR=F/data thermocline calibrate --presets max --set engine.kind=vllm
    python -m benchmarks.restore_ttft --engine vllm --codec max --folder F

Through gateway and HTTP, on the CPU; cold sessions are in RAM. One process, one conversation per
length, also beyond the context that the sample model was trained for, since only time counts here.
The conversation has ``--rounds`` turns of each kind, alternately: one short new message after all
earlier ones, while the session is hot, and after it was put to sleep. At last the session is
deleted and its newest prompt sent again: the same work with nothing to reuse. ``asleep_s`` is the
time from a demotion right after the first turn, when all of it has yet to be packed, until the
session is cold.

A hot return is the floor of a restored one: HTTP, the chat template, and one step of the model over
the new message and the tokens after the last full chunk or block.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import MIB, Client, Reply, Stack, client_of, words_of
from benchmarks.stacks.vllm_stack import with_plugin

Messages = list[dict[str, str]]
ROOM_TOKENS = 2048  # for what a conversation adds to its first prompt


@dataclass
class Conversation:
    """One session; ``prompt`` has all messages so far."""

    client: Client
    name: str
    prompt: Messages
    asleep_s: float = 0.0
    prefilled: list[Reply] = field(default_factory=list)
    returns: dict[str, list[Reply]] = field(default_factory=lambda: {"hot": [], "cold": []})

    async def ask(self) -> Reply:
        reply = await self.client.chat(self.prompt, session=self.name, max_tokens=4)
        assert reply.ok, reply
        left = reply.prompt_tokens - reply.cached_tokens
        print(f"  {reply.cache}: {left} tokens left, {reply.ttft_s:.3f} s", flush=True)
        return reply

    async def prefill(self) -> None:
        reply = await self.ask()
        assert reply.cache.startswith("miss"), reply
        self.prefilled.append(reply)
        self._go_on(reply)

    async def fall_asleep(self) -> None:
        began = time.perf_counter()
        await self.client.sleep(self.name)
        self.asleep_s = round(time.perf_counter() - began, 3)
        reply = await self.ask()
        assert reply.cache.startswith("cold"), reply
        self._go_on(reply)

    async def come_back(self, kind: str) -> None:
        await self.client.until(self.name, "idle")
        if kind == "cold":
            await self.client.sleep(self.name)
        reply = await self.ask()
        assert reply.cache.startswith(kind), reply
        self.returns[kind].append(reply)
        self._go_on(reply)

    async def prefill_again(self) -> None:
        await self.client.until(self.name, "idle")
        await self.client.delete(f"/v1/sessions/{self.name}")
        self.prompt = self.prompt[:-2]  # the one that was answered last
        await self.prefill()

    def _go_on(self, reply: Reply) -> None:
        question = {"role": "user", "content": f"And number {len(self.prompt)}?"}
        self.prompt = [*self.prompt, {"role": "assistant", "content": reply.text}, question]

    def row(self) -> dict[str, Any]:
        """Return the medians, also as ratios to the prefill of the same prompt."""
        again = self.prefilled[-1]
        hot, cold = (
            statistics.median(x.ttft_s for x in self.returns[kind]) for kind in ("hot", "cold")
        )
        return {
            "tokens": again.prompt_tokens,
            "asleep_s": self.asleep_s,
            "left_to_compute": [x.prompt_tokens - x.cached_tokens for x in self.returns["cold"]],
            "prefill_ttft_s": [round(x.ttft_s, 3) for x in self.prefilled],
            "hot_ttft_s": round(hot, 3),
            "restore_ttft_s": round(cold, 3),
            "speedup": round(again.ttft_s / cold, 1),
            "restore_to_hot": round(cold / hot, 2),
        }


async def one_length(client: Client, tokens: int, rounds: int) -> dict[str, Any]:
    name = f"t{tokens}"
    text = f"{words_of(name, tokens)}\nOne word, please."
    first = {"role": "user", "content": text}
    conversation = Conversation(client, name, [first])
    await conversation.prefill()
    await conversation.fall_asleep()
    for _ in range(rounds):
        await conversation.come_back("hot")
        await conversation.come_back("cold")
    await conversation.prefill_again()
    return conversation.row()


def stack_of(args: argparse.Namespace) -> Stack:
    folder, longest = Path(args.folder) if args.folder else None, max(args.tokens) + ROOM_TOKENS
    if args.engine == "vllm":
        context = max(longest, 8192)
        stack = with_plugin(2048 * MIB, args.codec, 1024 * MIB, context, args.dtype, folder=folder)
        stack.environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        return stack
    settings = {
        "engine": {"hot_bytes": 4096 * MIB, "dtype": args.dtype, "max_context": longest},
        "store": {"codec": args.codec, "ram_bytes": 1024 * MIB, "disk_bytes": 0},
        "scheduler": {"idle_after_s": 3600.0},
    }
    return Stack(settings, folder)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with stack_of(args) as stack:
        async with client_of(stack) as client:
            await client.chat([{"role": "user", "content": "Hello"}], session="warm")
            rows = [await one_length(client, n, args.rounds) for n in args.tokens]
    return {"engine": args.engine, "codec": args.codec, "dtype": args.dtype, "rows": rows}


def main() -> None:
    args = arguments(
        __doc__,
        "--engine mlx|vllm --tokens 2048 6144 --rounds 4 --codec tq3"
        " --dtype float32|bfloat16 --folder ''",
    )
    write_json(args.json, asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
