"""Time to first token of a returning session: prefilled, still hot, and restored from cold.

    python -m benchmarks.restore_ttft [--engine vllm] [--tokens 2048 6144] [--rounds 4]
        [--codec tq3] [--dtype float32] [--folder F] [--json OUT]

A codec that has to know the model finds its profile in a folder in which it was calibrated:

    THERMOCLINE_DATA_DIR=F/data thermocline calibrate --presets max --set engine.kind=vllm
    python -m benchmarks.restore_ttft --engine vllm --codec max --folder F

Through gateway and HTTP, on the CPU; cold sessions are in RAM. One process, one conversation per
length, also beyond the context that the sample model was trained for: only time counts here. It
goes on for ``--rounds`` turns of each kind, in turns: one short new message after all earlier ones,
while the session is hot, and after it was put to sleep. At last the session is deleted and its
newest prompt sent once more: the same work with nothing to reuse. ``asleep_s``: from a demotion
right after its first turn, which has all of it still to pack, until it is cold.

What a hot return takes is the floor of a restored one: HTTP, the chat template, and one step of the
model over the new message. (On vLLM both get the tokens after the last full block from the cold
store.)
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
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    prose,
)
from benchmarks.stacks.vllm_stack import with_plugin

Messages = list[dict[str, str]]
ROOM_TOKENS = 2048  # for what a conversation adds to its first prompt


@dataclass
class Conversation:
    """One session that goes on; ``prompt`` is the newest."""

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
        await self.client.post(f"/v1/sessions/{self.name}/demote")
        await self.client.until(self.name, "cold")
        self.asleep_s = round(time.perf_counter() - began, 3)
        reply = await self.ask()
        assert reply.cache.startswith("cold"), reply
        self._go_on(reply)

    async def come_back(self, kind: str) -> None:
        await self.client.until(self.name, "idle")
        if kind == "cold":
            await self.client.post(f"/v1/sessions/{self.name}/demote")
            await self.client.until(self.name, "cold")
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
        """Against the prefill of the same prompt; the worst pair is over all of them."""
        hot = [x.ttft_s for x in self.returns["hot"]]
        cold = [x.ttft_s for x in self.returns["cold"]]
        again = self.prefilled[-1]
        return {
            "tokens": again.prompt_tokens,
            "asleep_s": self.asleep_s,
            "left_to_compute": [x.prompt_tokens - x.cached_tokens for x in self.returns["cold"]],
            "prefill_ttft_s": [round(x.ttft_s, 3) for x in self.prefilled],
            "hot_ttft_s": round(statistics.median(hot), 3),
            "restore_ttft_s": round(statistics.median(cold), 3),
            "speedup": round(again.ttft_s / statistics.median(cold), 1),
            "speedup_worst": round(min(x.ttft_s for x in self.prefilled) / max(cold), 1),
            "speedup_hot": round(again.ttft_s / statistics.median(hot), 1),
            "restore_to_hot": round(statistics.median(cold) / statistics.median(hot), 2),
        }


async def one_length(client: Client, tokens: int, rounds: int) -> dict[str, Any]:
    name = f"t{tokens}"
    words = prose(name, int(tokens / WORD_TOKENS))
    first = {"role": "user", "content": f"{words}\nOne word, please."}
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
