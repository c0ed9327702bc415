"""Whether vLLM ends packed by itself on several ranks, attached, and killed while it measures.

    python -m benchmarks.on_vllm.measured_anywhere [--cases ranks,attached,killed,windows]
        [--json OUT]

*ranks*: tensor parallel 3, since the sample model has three KV heads; *attached*: a vLLM that was
started by the lines of docs/hardware.md; *killed*: kill -9 of the engine in the middle of the
measurement, which goes on where it was; *windows*: the sample model with windows of 512 tokens on
half of its layers (``benchmarks.families.windowed``), with the bytes of sessions asleep.

Each begins with ``raw`` and waits for the verdict. Then sessions sleep and come back: the last
question is asked after the live session, and once more after the packed one. The prompt is the
same, and so should be the answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.families.windowed import write_windowed
from benchmarks.program import arguments, write_json
from benchmarks.stacks.attached_vllm import started
from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of, prose
from benchmarks.stacks.vllm_stack import START_S, python_with_vllm
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

SESSIONS = 6
WORDS = 500
ANSWER = 16
MOST_S = 1500.0  # to the verdict
LOOK_S = 0.5
STORE = {
    "codec": "auto",
    "accept_loss": False,
    "calibrate": True,
    "ram_bytes": 512 * MIB,
    "disk_bytes": 0,
}
SMALL: tuple[str, ...] = (
    "--kv-cache-memory-bytes",
    str(512 * MIB),
    "--dtype",
    "float32",
    "--enforce-eager",
)
SMALL += ("--block-size", "32", "--max-model-len", "4096", "--max-num-seqs", "4")


def settings(**vllm: Any) -> dict[str, dict[str, Any]]:
    engine = {
        "kind": "vllm",
        "vllm.python": python_with_vllm(),
        "hot_bytes": 512 * MIB,
        "max_context": 4096,
        "dtype": "float32",
    }
    return {
        "engine": engine | {f"vllm.{name}": value for name, value in vllm.items()},
        "store": STORE,
        "scheduler": {"idle_after_s": 3600.0},
    }


async def verdict(client: Client, looks: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Wait for the end of the measurement; ``looks`` is shown the codec each time."""
    async with asyncio.timeout(MOST_S):
        while True:
            codec: dict[str, Any] = (await client.get("/v1/sessions")).get("codec") or {}
            if codec and not codec["unmeasured"]:
                return codec
            looks(codec)
            await asyncio.sleep(LOOK_S)


async def slept(client: Client, number: int) -> dict[str, Any]:
    """Ask after a live session and after the same one from the cold store."""
    name = f"sleeper-{number}"
    messages = [{"role": "user", "content": f"{name}: {prose(name, WORDS)}. What is this about?"}]
    first = await client.chat(messages, name, max_tokens=ANSWER, ignore_eos=True)
    messages.append({"role": "assistant", "content": first.text})
    messages.append({"role": "user", "content": "Say it in other words."})
    live = await client.chat(messages, name, max_tokens=ANSWER, ignore_eos=True)
    await client.until(name, "idle")
    await client.post(f"/v1/sessions/{name}/demote")
    asleep = await client.until(name, "cold")
    back = await client.chat(messages, name, max_tokens=ANSWER, ignore_eos=True)
    assert first.ok and live.ok and back.ok, (first, live, back)
    same = 0
    while same < min(len(live.text), len(back.text)) and live.text[same] == back.text[same]:
        same += 1
    kept = {x: asleep[x] for x in ("tokens", "bytes")}
    return {"cache": back.cache, "same_share": same / max(1, len(live.text)), "asleep": kept}


async def outcome(server: Stack, looks: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    began = time.monotonic()
    async with client_of(server) as client:
        codec = await verdict(client, looks)
        took = time.monotonic() - began
        found = [await slept(client, number) for number in range(SESSIONS)]
    return {
        "seconds_to_the_verdict": round(took),
        "codec": codec["id"],
        "rows": [{"preset": x["preset"], "kl": round(x["kl"], 5)} for x in codec["rows"]],
        "from_cold": sum(x["cache"].startswith("cold-") for x in found),
        "of": len(found),
        "same_text": [round(x["same_share"], 2) for x in found],
        "asleep": [x["asleep"] for x in found],
    }


def nothing(codec: dict[str, Any]) -> None:
    """Look on."""


def ranks() -> dict[str, Any]:
    with Stack(settings(tensor_parallel=3), start_timeout_s=START_S) as stack:
        return asyncio.run(outcome(stack, nothing))


def attached() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine = started(python_with_vllm(), Path(folder), STORE, SMALL)
        try:
            engine.wait_for_port(START_S)
            with Stack(engine.settings) as stack:
                return asyncio.run(outcome(stack, nothing))
        finally:
            engine.kill()


def killed() -> dict[str, Any]:
    with Stack(settings(), start_timeout_s=START_S) as stack:
        seen: list[str] = []
        deaths: list[str] = []

        def kill_in_the_middle(codec: dict[str, Any]) -> None:
            progress = codec.get("progress") or ""
            seen.append(progress)
            cases = re.search(r"([1-9]\d*) of \d+ cases", progress)
            if cases and not deaths:
                deaths.append(progress)
                stack.kill_engine(START_S)

        found = asyncio.run(outcome(stack, kill_in_the_middle))
        after = next((x for x in seen[seen.index(deaths[0]) + 1 :] if "cases" in x), "")
        return found | {"killed_at": deaths, "went_on_at": after}


def windows() -> dict[str, Any]:
    sample = sample_model(default_cache_dir(os.environ))
    with tempfile.TemporaryDirectory() as folder:
        model = write_windowed(sample, Path(folder) / "model", num=15)
        windowed = settings()
        windowed["engine"]["model"] = str(model)
        with Stack(windowed, start_timeout_s=START_S) as stack:
            return asyncio.run(outcome(stack, nothing))


CASES = {"windows": windows, "ranks": ranks, "attached": attached, "killed": killed}


def main() -> None:
    args = arguments(__doc__, f"--cases {','.join(CASES)}")
    results = {}
    for name in args.cases.split(","):
        results[name] = CASES[name]()
        print(name, results[name], flush=True)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
