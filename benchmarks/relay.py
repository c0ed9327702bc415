"""Measures the gateway's CPU time per chunk and per short request, and its delay of a first token.

The fake engine streams answers of 200 chunks to 16 readers at once, every chunk written by itself:
``busy`` without pauses, ``paced`` with one after each chunk, as tokens come. When paced, most of
the CPU time is the kernel's, which wakes the process for each chunk, and the process is idle
otherwise; the target is for ``busy``. ``translated`` is as busy, with the events of /v1/responses.
``short`` are answers of a few words that are not streamed, one request after the other. CPU time is
read from the process table. Time to first token is measured alternately through the
gateway and at the engine's own socket.

    python benchmarks/relay.py --json relay.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.program import arguments, write_json
from benchmarks.stacks.fake_stack import MODEL, FakeStack
from benchmarks.stacks.processes import cpu_s

ASK = "please say something of some length"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# Finish reason, usage, [DONE]; or created, in progress, added, added, done, done, done, completed.
EVENTS_BESIDES_TEXT = {CHAT: 3, RESPONSES: 8}


def body(path: str, script: str) -> dict[str, Any]:
    common = {"model": MODEL, "stream": True, "metadata": {"fake": script}}
    if path == RESPONSES:
        return {**common, "input": ASK, "store": False}
    message = {"role": "user", "content": ASK}
    return {**common, "messages": [message], "stream_options": {"include_usage": True}}


async def stream(
    http: aiohttp.ClientSession, host: str, path: str, script: str, headers: dict[str, str]
) -> tuple[float, int]:
    """Return the seconds to the first byte of the first event, and the number of events."""
    began = time.perf_counter()
    first_s, num_events = 0.0, 0
    async with http.post(host + path, json=body(path, script), headers=headers) as answer:
        answer.raise_for_status()
        async for piece in answer.content.iter_any():
            first_s = first_s or time.perf_counter() - began
            num_events += piece.count(b"\n\n")
    return first_s, num_events


async def cpu_per_chunk(
    stack: FakeStack,
    http: aiohttp.ClientSession,
    readers: int,
    chunks: int,
    pause_s: float,
    answers: int = 1,
    path: str = CHAT,
) -> dict[str, float]:
    """Let ``readers`` read ``answers`` each, one after the other; return CPU time per chunk."""
    script = f"chunks={chunks} delay_s={pause_s}"

    async def read(session: str) -> int:
        headers = {"x-session-id": session}
        return sum(
            [(await stream(http, stack.url, path, script, headers))[1] for _ in range(answers)]
        )

    before, began = cpu_s([stack.process]), time.perf_counter()
    num_events = sum(await asyncio.gather(*(read(f"reader-{i}") for i in range(readers))))
    wall_s, spent_s = time.perf_counter() - began, cpu_s([stack.process]) - before
    wanted = readers * answers * (chunks + EVENTS_BESIDES_TEXT[path])
    assert num_events == wanted, "events were lost"
    return {
        "us_per_chunk": spent_s / num_events * 1e6,
        "chunks_per_s": num_events / wall_s,
        "gateway_cpu_share": spent_s / wall_s,
    }


async def cpu_per_request(
    stack: FakeStack, http: aiohttp.ClientSession, requests: int
) -> dict[str, float]:
    """Return CPU time per short request that is not streamed."""
    asked = {**body(CHAT, "chunks=3"), "stream": False}
    before = cpu_s([stack.process])
    for i in range(requests):
        headers = {"x-session-id": f"short-{i % 8}"}
        async with http.post(stack.url + CHAT, json=asked, headers=headers) as answer:
            answer.raise_for_status()
            await answer.read()
    return {"ms_per_request": (cpu_s([stack.process]) - before) / requests * 1e3}


async def first_token(
    stack: FakeStack, http: aiohttp.ClientSession, engine: aiohttp.ClientSession, rounds: int
) -> dict[str, float]:
    """Return medians in ms, of requests through the gateway and to the engine in turns."""
    direct_headers = {
        "authorization": f"Bearer {stack.token}",
        "x-thermocline-tenant": "bench",
        "x-thermocline-session": "direct",
        "x-thermocline-salt": "00",
    }
    through, direct = [], []
    for _ in range(rounds):
        first_s, _ = await stream(http, stack.url, CHAT, "chunks=3", {"x-session-id": "ttft"})
        through.append(first_s * 1e3)
        first_s, _ = await stream(engine, "http://engine", CHAT, "chunks=3", direct_headers)
        direct.append(first_s * 1e3)
    by_gateway, alone = (np.percentile(x, (50, 90)) for x in (through, direct))
    added, added_p90 = (by_gateway - alone).round(3).tolist()
    found = {"through_gateway_ms": by_gateway[0], "direct_ms": alone[0]}
    return {**found, "added_ms": added, "added_p90_ms": added_p90}


async def measure(stack: FakeStack, args: argparse.Namespace) -> dict[str, Any]:
    connector = aiohttp.UnixConnector(path=str(stack.runtime_dir / "http.sock"))
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        aiohttp.ClientSession(connector=connector) as engine,
    ):
        await cpu_per_chunk(stack, http, args.readers, 20, 0.001)  # warm
        load = (stack, http, args.readers, args.chunks)
        busy, paced, translated, short = [], [], [], []
        for _ in range(args.rounds):
            busy.append(await cpu_per_chunk(*load, 0.0, args.answers))
            translated.append(await cpu_per_chunk(*load, 0.0, args.answers, RESPONSES))
            paced.append(await cpu_per_chunk(*load, args.pause_s))
            short.append(await cpu_per_request(stack, http, args.requests))
        ttft = await first_token(stack, http, engine, args.ttft_rounds)
    rounds = {"busy": busy, "paced": paced, "translated": translated, "short": short}
    return {**{kind: _medians(found) for kind, found in rounds.items()}, "ttft": ttft}


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure, and all rounds of the first one."""
    medians = {key: round(statistics.median(x[key] for x in rounds), 3) for key in rounds[0]}
    first = next(iter(rounds[0]))
    return {**medians, "rounds": [round(x[first], 3) for x in rounds]}


def main() -> None:
    args = arguments(
        __doc__,
        "--readers 16 --chunks 200 --answers 5 --pause-s 0.005 --rounds 5 --requests 400"
        " --ttft-rounds 200",
    )
    with tempfile.TemporaryDirectory() as folder, FakeStack(Path(folder)) as stack:
        write_json(args.json, asyncio.run(measure(stack, args)))


if __name__ == "__main__":
    main()
