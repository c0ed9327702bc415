"""Stop everything, start again: which sessions come back from disk, and which after ``kill -9``?

python benchmarks/restart.py [--sessions 4] [--tokens 600] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
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

History = list[dict[str, str]]


async def talk(client: Client, histories: dict[str, History], text: str) -> list[dict[str, Any]]:
    """One more turn of every session."""
    rows = []
    for name, history in histories.items():
        before = sum(len(x["content"]) for x in history)
        history.append({"role": "user", "content": text})
        reply = await client.chat(history, session=name)
        history.append({"role": "assistant", "content": reply.text})
        rows.append(
            {
                "session": name,
                "failed": reply.status != 200 or reply.error is not None,
                "cache": reply.cache,
                "cached": reply.cached_tokens,
                "prompt": reply.prompt_tokens,
                "old_characters": before,
            }
        )
    return rows


def share(rows: list[dict[str, Any]], new_tokens: int) -> float:
    return round(min(float(x["cached"] / max(1, x["prompt"] - new_tokens)) for x in rows), 4)


async def with_stack(stack: Stack, histories: dict[str, History], text: str) -> list[Any]:
    async with client_of(stack) as client:
        return await talk(client, histories, text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    words = int(args.tokens / WORD_TOKENS)
    histories: dict[str, History] = {
        f"s{i}": [{"role": "system", "content": f"Notes {i}: {prose(i, words)}"}]
        for i in range(args.sessions)
    }
    settings = {"store": {"ram_bytes": 512 * MIB}, "scheduler": {"idle_after_s": 3600.0}}
    result: dict[str, Any] = {"sessions": args.sessions}
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
        stack = Stack(settings, folder=Path(folder)).start()
        asyncio.run(with_stack(stack, histories, "One word, please."))
        result["exit_code"] = stack.stop()
        stack.start()
        rows = asyncio.run(with_stack(stack, histories, "And another one?"))
        result["after_stop"] = {"reused_share_min": share(rows, args.new_tokens), "rows": rows}
        time.sleep(args.settle_s)
        stack.kill()
        stack.start()
        rows = asyncio.run(with_stack(stack, histories, "And a third one?"))
        result["after_gateway_kill"] = {
            "failed": sum(x["failed"] for x in rows),
            "reused_share_min": share(rows, args.new_tokens),
        }
        time.sleep(args.settle_s)
        stack.kill_engine()
        rows = asyncio.run(with_stack(stack, histories, "And a fourth one?"))
        result["after_engine_kill"] = {
            "failed": sum(x["failed"] for x in rows),
            "reused_share_min": share(rows, args.new_tokens),
        }
        stack.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--settle-s", type=float, default=3.0, help="before a kill")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
