"""What it costs that an engine measures its own model while it serves: time, memory, waiting.

    python benchmarks/self_measurement.py [--engine mlx] [--rounds 4] [--json OUT]

First an idle server measures its model: seconds to the first verdict and to the one on ``balanced``
(``--last max``: on all presets), and the most memory that all processes held (anonymous memory,
which the system cannot drop), against a server that does not measure and answers the same few
chats: one that keeps them exactly, and one that packs them with the measured codec. Then a first
start under the chats of four users: seconds to the verdict. Last two servers take turns, one of
which is measuring, and four users with pauses chat with each; the one whose turn it is not is
stopped. What they wait longer is given in steps: prompts of as many tokens as a measurement
prefills at a time. The figures are ratios of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Stack,
    client_of,
    prose,
)

SAMPLE_EVERY_S = 0.25
PAUSE_S = 2.0
POOL_BYTES = 256 * MIB
STEP_TOKENS = 256  # of both engines' instruments
NUM_STEPS = 5
LAST = "preset whose verdict is waited for; max learns from 96 texts, minutes later"


def settings(args: argparse.Namespace, *, measures: bool) -> dict[str, dict[str, Any]]:
    store = {"codec": "auto", "accept_loss": False, "calibrate": measures}
    # A stack that was stopped for a while must not take its engine for a dead one. vLLM's pool of
    # blocks is memory that counts once it is used: a large one would be so by measuring alone.
    engine = {"kind": args.engine, "hot_bytes": POOL_BYTES}
    return {"engine": engine, "store": store}


def codec_of(stack: Stack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.url}/v1/sessions", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)["codec"] or {}
        return found


def measured(codec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the bits and the KL of each preset that was measured."""
    rows = [*codec.get("rows", []), *codec.get("others", [])]
    return {
        x["preset"]: {"bits": round(x["bits_per_element"], 3), "kl": round(x["kl"], 5)}
        for x in rows
    }


def processes(stack: Stack) -> list[psutil.Process]:
    return [stack.gateway, *stack.gateway.children(recursive=True)]


def anonymous_bytes(stack: Stack) -> int:
    total = 0
    for process in processes(stack):
        with suppress(OSError, psutil.Error):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) << 10
    return total


def cpu_s(stack: Stack) -> float:
    times = [x.cpu_times() for x in (stack.engine, *stack.engine.children(recursive=True))]
    return float(sum(x.user + x.system for x in times))


class Peak:
    """The most anonymous memory that a stack held, looked at four times a second."""

    def __init__(self, stack: Stack) -> None:
        self.nbytes = 0
        self._stack = stack
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_EVERY_S):
            with suppress(psutil.Error, RuntimeError):
                self.nbytes = max(self.nbytes, anonymous_bytes(self._stack))


@contextmanager
def stopped(stack: Stack) -> Iterator[None]:
    """Stop a stack's processes, so that another has the machine."""
    held = processes(stack)
    for process in held:
        process.suspend()
    try:
        yield
    finally:
        for process in held:
            process.resume()


async def user(client: Client, name: str, args: argparse.Namespace) -> list[float]:
    """Seconds to the first token of each turn of one conversation."""
    messages: list[dict[str, str]] = []
    found = []
    for turn in range(args.turns):
        text = prose(f"{name}-{turn}", int(args.tokens / WORD_TOKENS))
        messages.append({"role": "user", "content": f"{name}: {text}"})
        reply = await client.chat(messages, session=name, max_tokens=args.answer)
        assert reply.ok, reply
        found.append(reply.ttft_s)
        messages.append({"role": "assistant", "content": reply.text})
        await asyncio.sleep(PAUSE_S)
    return found


async def one_round(client: Client, label: str, args: argparse.Namespace) -> list[float]:
    async def late(i: int) -> list[float]:
        await asyncio.sleep(i * PAUSE_S / args.users)
        return await user(client, f"{label}-{i}", args)

    found = await asyncio.gather(*(late(i) for i in range(args.users)))
    return [x for each in found for x in each]


async def one_step(client: Client) -> float:
    """Seconds to the first token after a prompt of one step, on an engine that does nothing else;
    the median."""
    found = []
    for i in range(NUM_STEPS):
        text = prose(f"step {i}", int(STEP_TOKENS / WORD_TOKENS))
        reply = await client.chat([{"role": "user", "content": text}], f"step-{i}", max_tokens=1)
        assert reply.ok, reply
        found.append(reply.ttft_s)
    return statistics.median(found)


async def few_chats(stack: Stack, args: argparse.Namespace) -> None:
    async with client_of(stack) as client:
        await one_round(client, "few", args)


def idle(args: argparse.Namespace) -> dict[str, Any]:
    with Stack(settings(args, measures=False)) as stack, Peak(stack) as plain:
        asyncio.run(few_chats(stack, args))
    with tempfile.TemporaryDirectory() as folder:
        found, peak = verdict(args, Path(folder))
        # What was measured is known there: it packs, and measures nothing.
        with Stack(settings(args, measures=False), Path(folder)) as stack, Peak(stack) as packing:
            asyncio.run(few_chats(stack, args))
            assert codec_of(stack)["id"] == found["codec"]
    return found | {
        "peak_mib": round(peak.nbytes / MIB),
        "peak_mib_without": round(plain.nbytes / MIB),
        "peak_mib_packing": round(packing.nbytes / MIB),
        "extra_mib": round((peak.nbytes - plain.nbytes) / MIB),
        "extra_mib_over_packing": round((peak.nbytes - packing.nbytes) / MIB),
    }


def verdict(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Peak]:
    """Let an idle server measure its model to the end, and serve a few chats with its choice."""
    with Stack(settings(args, measures=True), folder) as stack, Peak(stack) as peak:
        began, pid = time.monotonic(), stack.engine.pid
        used = cpu_s(stack)
        first_s = None
        while args.last not in measured(codec := codec_of(stack)):
            assert time.monotonic() - began < args.most_s, codec
            if first_s is None and codec.get("unmeasured") is False:
                first_s = time.monotonic() - began
            time.sleep(0.5)
        seconds, used = time.monotonic() - began, cpu_s(stack) - used
        asyncio.run(few_chats(stack, args))
        restarted = stack.engine.pid != pid
    found = {
        "seconds_to_the_first_verdict": round(first_s or seconds),
        "seconds_to_the_verdict": round(seconds),
        "cpu_seconds_of_the_engine": round(used),  # on a busy machine the better figure
        "codec": codec["id"],
        "why": codec["why"],
        "measured": measured(codec),
        "engine_restarted": restarted,
    }
    return found, peak


async def _until_measured(stack: Stack, args: argparse.Namespace) -> tuple[float, list[float]]:
    """Let users chat until the verdict; returns its seconds, and those to first tokens."""
    began, waits, chatting = time.monotonic(), list[float](), True

    async def chats(client: Client, i: int) -> None:
        number = 0
        await asyncio.sleep(i * PAUSE_S / args.users)
        while chatting:
            waits.extend(await user(client, f"first-{i}-{number}", args))
            number += 1

    async with client_of(stack) as client:
        users = [asyncio.create_task(chats(client, i)) for i in range(args.users)]
        while args.last not in measured(codec := await asyncio.to_thread(codec_of, stack)):
            assert time.monotonic() - began < args.most_s, codec
            await asyncio.sleep(0.5)
        seconds, chatting = time.monotonic() - began, False
        await asyncio.gather(*users)
    return seconds, waits


def under_traffic(args: argparse.Namespace) -> dict[str, Any]:
    """A first start while users chat: how long it takes to the verdict, and what that is."""
    with Stack(settings(args, measures=True)) as stack:
        seconds, waits = asyncio.run(_until_measured(stack, args))
        codec = codec_of(stack)
    return {
        "under_traffic": {
            "seconds_to_the_verdict": round(seconds),
            "turns": len(waits),
            "why": codec["why"],
            "measured": measured(codec),
        }
    }


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


async def beside_users(args: argparse.Namespace) -> dict[str, Any]:
    without: list[float] = []
    beside: list[float] = []
    with Stack(settings(args, measures=False)) as a, Stack(settings(args, measures=True)) as b:
        async with AsyncExitStack() as exits:
            x = await exits.enter_async_context(client_of(a))
            y = await exits.enter_async_context(client_of(b))
            with stopped(b):
                step_s = await one_step(x)
            for i in range(args.rounds):
                with stopped(b):
                    without += await one_round(x, f"off{i}", args)
                with stopped(a):
                    beside += await one_round(y, f"on{i}", args)
                print(f"  p95 {p95(without):.2f} s, measuring {p95(beside):.2f} s", flush=True)
        measuring = bool(codec_of(b).get("progress"))
    return {
        "still_measuring_at_the_end": measuring,
        "ttft_p95_ratio": round(p95(beside) / p95(without), 3),
        "ttft_median_ratio": round(statistics.median(beside) / statistics.median(without), 3),
        "ttft_p95_s": [round(p95(without), 3), round(p95(beside), 3)],
        "step_s": round(step_s, 3),
        "ttft_p95_above_in_steps": round((p95(beside) - p95(without)) / step_s, 2),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    alone = {} if args.skip_idle else idle(args)
    print(alone, flush=True)
    traffic = {} if args.skip_traffic else under_traffic(args)
    print(traffic, flush=True)
    users = {} if args.skip_users else asyncio.run(beside_users(args))
    return {"engine": args.engine, **alone, **traffic, **users}


def main() -> None:
    args = arguments(
        __doc__,
        "--engine mlx|vllm --rounds 4 --users 4 --turns 3 --tokens 100 --answer 16"
        " --most-s 3600.0 --last balanced|max --skip-idle --skip-traffic --skip-users",
    )
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
