"""Measures what an engine's own measurement of its model costs: time, memory, users' waits.

    python -m benchmarks.self_measurement [--engine mlx] [--rounds 4] [--json OUT]

First an idle server measures its model: seconds to the first verdict and to the one on ``balanced``
(``--last max``: on all presets, which learn from 96 texts and take minutes longer), and the most
memory that all processes held (anonymous memory, which the system cannot drop), against servers
that answer the same few chats without measuring: one that keeps them exactly, and one that packs
them with the measured codec. Then a first start under the chats of four users: seconds to the
verdict. Last, two servers alternate, one of which is measuring, while four users chat with each;
the other server is stopped meanwhile. The users' additional waits are given in steps: prompts of as
many tokens as a measurement prefills at a time. ``--skip-idle``, ``--skip-traffic`` and
``--skip-users`` leave one of the three out. The figures are ratios of one run. Each part takes
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.program import arguments, write_json
from benchmarks.stacks.processes import Peak, cpu_s, rss_mib, tree
from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of, words_of
from benchmarks.stacks.vllm_stack import START_S

PAUSE_S = 2.0
POOL_BYTES = 256 * MIB
STEP_TOKENS = 256  # of both engines' instruments
NUM_STEPS = 5
LOOK_S = 0.5
MOST_S = 3600.0  # to a verdict


def server_of(args: argparse.Namespace, *, measures: bool, folder: Path | None = None) -> Stack:
    store = {"codec": "auto", "accept_loss": False, "calibrate": measures}
    # After a stop the gateway must not consider its engine dead. vLLM's pool of blocks counts as
    # memory once it is used, and a measurement alone would use a large pool.
    engine = {"kind": args.engine, "hot_bytes": POOL_BYTES}
    return Stack({"engine": engine, "store": store}, folder, start_timeout_s=START_S)


async def codec_of(client: Client) -> dict[str, Any]:
    return (await client.get("/v1/sessions")).get("codec") or {}


def measured(codec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the bits and the KL of each preset that was measured."""
    rows = [*codec.get("rows", []), *codec.get("others", [])]
    return {
        x["preset"]: {"bits": round(x["bits_per_element"], 3), "kl": round(x["kl"], 5)}
        for x in rows
    }


async def verdict(client: Client, last: str) -> dict[str, Any]:
    """Wait until a preset was measured; return the seconds and its figures."""
    began, first_s = time.monotonic(), None
    async with asyncio.timeout(MOST_S):
        while last not in measured(codec := await codec_of(client)):
            if first_s is None and codec.get("unmeasured") is False:
                first_s = time.monotonic() - began
            await asyncio.sleep(LOOK_S)
    seconds = time.monotonic() - began
    return {
        "seconds_to_the_first_verdict": round(first_s or seconds),
        "seconds_to_the_verdict": round(seconds),
        "codec": codec["id"],
        "why": codec["why"],
        "measured": measured(codec),
    }


@contextmanager
def stopped(stack: Stack) -> Iterator[None]:
    """Stop a stack's processes (SIGSTOP) within the block, so that another has the machine."""
    held = tree(stack.gateway)
    for process in held:
        process.suspend()
    try:
        yield
    finally:
        for process in held:
            process.resume()


async def user(client: Client, name: str, args: argparse.Namespace) -> list[float]:
    """Have one conversation; return the seconds to the first token of each turn."""
    messages: list[dict[str, str]] = []
    found = []
    for turn in range(args.turns):
        text = words_of(f"{name}-{turn}", args.tokens)
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

    return sum(await asyncio.gather(*(late(i) for i in range(args.users))), [])


async def one_step(client: Client) -> float:
    """Return the median seconds to first token of a prompt of one step on an idle engine."""
    found = []
    for i in range(NUM_STEPS):
        message = {"role": "user", "content": words_of(f"step {i}", STEP_TOKENS)}
        reply = await client.chat([message], f"step-{i}", max_tokens=1)
        assert reply.ok, reply
        found.append(reply.ttft_s)
    return statistics.median(found)


async def idle(args: argparse.Namespace) -> dict[str, Any]:
    """Measure an idle server that measures its model, and servers that only chat."""

    async def peak_of(stack: Stack, act: Callable[[Client], Awaitable[None]]) -> int:
        with stack:
            async with (
                Peak(lambda: {"mib": rss_mib(*tree(stack.gateway))}) as peak,
                client_of(stack) as client,
            ):
                await act(client)
                await one_round(client, "few", args)
        return round(peak.most["mib"])

    found: dict[str, Any] = {}

    async def until_measured(client: Client) -> None:
        used, pid = cpu_s(tree(measuring.engine)), measuring.engine.pid
        found.update(await verdict(client, args.last))
        found["cpu_seconds_of_the_engine"] = round(cpu_s(tree(measuring.engine)) - used)
        found["engine_restarted"] = measuring.engine.pid != pid

    async def packs(client: Client) -> None:
        assert (await codec_of(client))["id"] == found["codec"]

    plain = await peak_of(server_of(args, measures=False), lambda _: asyncio.sleep(0))
    with tempfile.TemporaryDirectory() as folder:
        measuring = server_of(args, measures=True, folder=Path(folder))
        peak = await peak_of(measuring, until_measured)
        # Its folder has the profile already: it packs, and measures nothing.
        packing = await peak_of(server_of(args, measures=False, folder=Path(folder)), packs)
    peaks = {"peak_mib": peak, "peak_mib_without": plain, "peak_mib_packing": packing}
    return {**found, **peaks, "extra_mib": peak - plain, "extra_mib_over_packing": peak - packing}


async def under_traffic(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a first start while users chat: the seconds to the verdict, and the verdict."""
    turns, chatting = 0, True

    async def chats(client: Client, i: int) -> None:
        nonlocal turns
        number = 0
        await asyncio.sleep(i * PAUSE_S / args.users)
        while chatting:
            turns += len(await user(client, f"first-{i}-{number}", args))
            number += 1

    with server_of(args, measures=True) as stack:
        async with client_of(stack) as client:
            users = [asyncio.create_task(chats(client, i)) for i in range(args.users)]
            found = await verdict(client, args.last)
            chatting = False
            await asyncio.gather(*users)
    return {"under_traffic": {**found, "turns": turns}}


async def beside_users(args: argparse.Namespace) -> dict[str, Any]:
    without: list[float] = []
    beside: list[float] = []
    with server_of(args, measures=False) as a, server_of(args, measures=True) as b:
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
            measuring = bool((await codec_of(y)).get("progress"))
    (median, p95), (median_beside, p95_beside) = (
        np.percentile(found, (50, 95)) for found in (without, beside)
    )
    return {
        "still_measuring_at_the_end": measuring,
        "ttft_p95_ratio": round(p95_beside / p95, 3),
        "ttft_median_ratio": round(median_beside / median, 3),
        "ttft_p95_s": [round(p95, 3), round(p95_beside, 3)],
        "step_s": round(step_s, 3),
        "ttft_p95_above_in_steps": round((p95_beside - p95) / step_s, 2),
    }


def main() -> None:
    args = arguments(
        __doc__,
        "--engine mlx|vllm --rounds 4 --users 4 --turns 3 --tokens 100 --answer 16"
        " --last balanced|max --skip-idle --skip-traffic --skip-users",
    )
    result: dict[str, Any] = {"engine": args.engine}
    for part, skip in (
        (idle, args.skip_idle),
        (under_traffic, args.skip_traffic),
        (beside_users, args.skip_users),
    ):
        result |= {} if skip else asyncio.run(part(args))
        print(result, flush=True)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
