"""Two models that take turns in one place: do all sessions come back, and does the budget hold?

python -m benchmarks.several_models [--sessions 40] [--tokens 150] [--engines mlx,vllm] [--json OUT]

The sample model is served twice, on mlx and on vLLM, both on demand with one place. Half of the
sessions take a turn on each, then all take a second turn on each, so that both models have been
unloaded meanwhile. Sessions are stored exactly (``raw``); all answers are compared with those of
the same turns on servers that have one model each, always loaded. All along, live KV and packed
sessions in RAM of everything that is loaded are added up and compared with the machine's budgets.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
import urllib.request
from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    prose,
    write_json,
)
from launch.machine.folders import folders
from launch.sample.sample_model import sample_model

HOT_BYTES, RAM_BYTES, DISK_BYTES = 256 * MIB, 64 * MIB, 2048 * MIB
LOOK_EVERY_S = 0.5
LIVE = "thermocline_engine_hot_bytes"


class Budget:
    """Adds up what all loaded engines say that they hold, for as long as it runs."""

    def __init__(self, stack: Stack) -> None:
        self._url = f"{stack.url}/metrics"
        self.most_bytes = 0
        self.most_engines = 0

    async def watch(self) -> None:
        while True:
            with urllib.request.urlopen(self._url, timeout=30) as answer:
                self._add(answer.read().decode())
            await asyncio.sleep(LOOK_EVERY_S)

    def _add(self, text: str) -> None:
        held = ready = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                in_ram = sample.name == "thermocline_tier_bytes" and sample.labels["tier"] == "ram"
                held += sample.value * (sample.name == LIVE or in_ram)
                ready += sample.value * (sample.name == "thermocline_engine_ready")
        self.most_bytes = max(self.most_bytes, int(held))
        self.most_engines = max(self.most_engines, int(ready))


def settings(engines: list[str], **entry: Any) -> dict[str, Any]:
    model = str(sample_model(folders("", "", os.environ).cache))
    tables = [{"name": f"on-{x}", "kind": x, "model": model, **entry} for x in engines]
    return {
        "engine": {"hot_bytes": HOT_BYTES, "max_context": 2048},
        "store": {"codec": "raw", "ram_bytes": RAM_BYTES, "disk_bytes": DISK_BYTES},
        "engines": tables,
    }


class Turns:
    """Two turns of every session of some models, one after the other."""

    def __init__(self, models: list[str], num_sessions: int, num_tokens: int) -> None:
        self.models = models
        words = int(num_tokens / WORD_TOKENS)
        self._sessions = [
            (model, f"{model}-{i}", [{"role": "user", "content": prose(f"{model}{i}", words)}])
            for model in models
            for i in range(num_sessions)
        ]
        self.texts: dict[str, list[str]] = {name: [] for _, name, _ in self._sessions}
        self.seconds: dict[str, list[float]] = {model: [] for model in models}
        self.second_turns: Counter[str] = Counter()
        self.num_failed = 0

    async def take(self, client: Client) -> None:
        for turn in range(2):
            for client.model, name, history in self._sessions:
                if turn:
                    history.append({"role": "user", "content": "And what comes next?"})
                began = time.perf_counter()
                reply = await client.chat(history, session=name)
                self.seconds[client.model].append(time.perf_counter() - began)
                self.num_failed += not reply.ok
                if turn:
                    self.second_turns[_source(reply)] += 1
                history.append({"role": "assistant", "content": reply.text})
                self.texts[name].append(reply.text)


def _source(reply: Reply) -> str:
    """Return where a prompt's KV came from.

    A stream that waits while its model is loaded begins before that is known.
    """
    unknown = "waited, reused" if reply.cached_tokens else "waited, computed"
    return reply.cache.partition(";")[0] or unknown


async def taken(stack: Stack, turns: Turns) -> Budget:
    budget = Budget(stack)
    watching = asyncio.create_task(budget.watch())
    async with client_of(stack) as client:
        await turns.take(client)
    watching.cancel()
    return budget


def measure(args: argparse.Namespace) -> dict[str, Any]:
    engines, each = args.engines.split(","), args.sessions // len(args.engines.split(","))
    turns = Turns([f"on-{x}" for x in engines], each, args.tokens)
    with Stack(settings(engines, load="on-demand")) as stack:
        budget = asyncio.run(taken(stack, turns))
    other_texts = 0
    for engine in engines:
        alone = Turns([f"on-{engine}"], each, args.tokens)
        with Stack(settings([engine])) as stack:
            asyncio.run(taken(stack, alone))
        other_texts += sum(turns.texts[name] != texts for name, texts in alone.texts.items())
    return {
        "sessions": each * len(engines),
        "second_turns": dict(turns.second_turns),
        "failed": turns.num_failed,
        "sessions_with_other_texts": other_texts,
        "most_engines_at_once": budget.most_engines,
        "most_mib": round(budget.most_bytes / MIB, 1),
        "budget_mib": (HOT_BYTES + RAM_BYTES) // MIB,
        "longest_turn_s": {m: round(max(x), 2) for m, x in turns.seconds.items()},
        "median_turn_s": {m: round(statistics.median(x), 2) for m, x in turns.seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--engines", default="mlx,vllm")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
