"""Measures models on vLLM with several ranks, attached, killed in between, and with windows.

    python -m benchmarks.on_vllm.measured_anywhere [--cases ranks,attached,killed,windows]
        [--json OUT]

*ranks*: tensor parallel 3, since the sample model has three KV heads; *attached*: a vLLM that was
started as docs/hardware.md shows; *killed*: the engine is killed in the middle of the measurement,
which then continues where it was; *windows*: the sample model with windows of 512 tokens on
half of its layers (``benchmarks.families.windowed``), with the bytes of sleeping sessions.

Each case begins with ``raw`` and waits until the gate has chosen a codec. Then sessions sleep and
come back: the last question is asked once with the live session, and once with the packed one. The
prompts are equal, and so should be the answers. Each case takes some minutes.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from contextlib import ExitStack
from os.path import commonprefix
from pathlib import Path
from typing import Any

from benchmarks.families.windowed import write_windowed
from benchmarks.program import arguments, write_json
from benchmarks.stacks.attached_vllm import SMALL, started
from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of, words_of
from benchmarks.stacks.vllm_stack import START_S, python_with_vllm
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

SESSIONS = 6
TOKENS = 500
ANSWER = 16
MOST_S = 1500.0  # until the gate has chosen
STORE = {"codec": "auto", "accept_loss": False, "calibrate": True}
STORE |= {"ram_bytes": 512 * MIB, "disk_bytes": 0}
CASES = ("windows", "ranks", "attached", "killed")


def stack_of(**engine: Any) -> Stack:
    own = {"kind": "vllm", "vllm.python": python_with_vllm(), "hot_bytes": 512 * MIB}
    own |= {"max_context": 4096, "dtype": "float32", **engine}
    settings = {"engine": own, "store": STORE, "scheduler": {"idle_after_s": 3600.0}}
    return Stack(settings, start_timeout_s=START_S)


async def verdict(client: Client, kills: Stack | None) -> dict[str, Any]:
    """Wait for the end of the measurement; return the codec's view from ``/v1/sessions``.

    ``kills``: the stack whose engine is killed in the middle of the measurement; None: none.
    """
    seen: list[str] = []
    async with asyncio.timeout(MOST_S):
        while True:
            codec: dict[str, Any] = (await client.get("/v1/sessions")).get("codec") or {}
            if codec and not codec["unmeasured"]:
                return {**codec, "killed_and_went_on_at": seen}
            progress = codec.get("progress") or ""
            if kills and len(seen) < 2 and re.search(r"[1-9]\d* of \d+ cases", progress):
                seen.append(progress)
                if len(seen) == 1:
                    await asyncio.to_thread(kills.kill_engine, START_S)
            await asyncio.sleep(0.5)


async def slept(client: Client, number: int) -> dict[str, Any]:
    """Ask the same question with a live session and with the same one from the cold store."""
    name = f"sleeper-{number}"
    text = f"{name}: {words_of(name, TOKENS)}. What is this about?"
    messages = [{"role": "user", "content": text}]
    first = await client.chat(messages, name, max_tokens=ANSWER, ignore_eos=True)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "content": "Say it in other words."})
    live = await client.chat(messages, name, max_tokens=ANSWER, ignore_eos=True)
    await client.until(name, "idle")
    asleep = await client.sleep(name)
    back = await client.chat(messages, name, max_tokens=ANSWER, ignore_eos=True)
    assert first.ok and live.ok and back.ok, (first, live, back)
    return {
        "cache": back.cache,
        "same_share": len(commonprefix([live.text, back.text])) / max(1, len(live.text)),
        "asleep": {x: asleep[x] for x in ("tokens", "bytes")},
    }


async def outcome(server: Stack, *, kills: bool = False) -> dict[str, Any]:
    """Return the results of one case."""
    began = time.monotonic()
    async with client_of(server) as client:
        codec = await verdict(client, server if kills else None)
        took = time.monotonic() - began
        found = [await slept(client, number) for number in range(SESSIONS)]
    return {
        "seconds_to_the_verdict": round(took),
        "codec": codec["id"],
        "killed_and_went_on_at": codec["killed_and_went_on_at"],
        "rows": [{"preset": x["preset"], "kl": round(x["kl"], 5)} for x in codec["rows"]],
        "from_cold": sum(x["cache"].startswith("cold-") for x in found),
        "of": len(found),
        "same_text": [round(x["same_share"], 2) for x in found],
        "asleep": [x["asleep"] for x in found],
    }


def case(name: str) -> dict[str, Any]:
    """Start the servers of one case, and return its results."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        if name == "attached":
            engine = started(python_with_vllm(), folder, STORE, SMALL)
            held.callback(engine.kill)
            engine.wait_for_port(START_S)
            stack = Stack(engine.settings)
        elif name == "windows":
            sample = sample_model(default_cache_dir(os.environ))
            stack = stack_of(model=str(write_windowed(sample, folder / "model", num=15)))
        else:
            stack = stack_of(**({"vllm.tensor_parallel": 3} if name == "ranks" else {}))
        held.enter_context(stack)
        return asyncio.run(outcome(stack, kills=name == "killed"))


def main() -> None:
    args = arguments(__doc__, f"--cases {','.join(CASES)}")
    results = {}
    for name in args.cases.split(","):
        results[name] = case(name)
        print(name, results[name], flush=True)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
