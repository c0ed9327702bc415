"""Checks that sessions survive a restart of the server, and that returns reuse them.

    python -m benchmarks.restart [--sessions 4] [--tokens 600] [--json OUT]

The server gets SIGTERM, then its gateway kill -9, then the engine alone. Each session has a turn
before and after. Printed are the least share of a prompt that was reused, without the
``--new-tokens`` of the new message, and how many turns failed. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import MIB, Stack, client_of, words_of

History = list[dict[str, str]]


async def talk(
    stack: Stack, histories: dict[str, History], text: str, new_tokens: int
) -> dict[str, Any]:
    """Take one more turn of every session; return the shares reused and the failures."""
    failed, shares = 0, []
    async with client_of(stack) as client:
        for name, history in histories.items():
            history.append({"role": "user", "content": text})
            reply = await client.chat(history, session=name)
            history.append({"role": "assistant", "content": reply.text})
            failed += not reply.ok
            shares.append(reply.cached_tokens / max(1, reply.prompt_tokens - new_tokens))
    return {"failed": failed, "reused_share_min": round(min(shares), 4)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    histories: dict[str, History] = {
        f"s{i}": [{"role": "system", "content": f"Notes {i}: {words_of(i, args.tokens)}"}]
        for i in range(args.sessions)
    }
    settings = {"store": {"ram_bytes": 512 * MIB}, "scheduler": {"idle_after_s": 3600.0}}
    result: dict[str, Any] = {"sessions": args.sessions}
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder:
        stack = Stack(settings, folder=Path(folder))

        def kill() -> None:
            stack.kill()
            stack.start()

        events: dict[str, Callable[[], object]] = {
            "first": stack.start,
            "after_stop": lambda: (stack.stop(), stack.start()),
            "after_gateway_kill": kill,
            "after_engine_kill": stack.kill_engine,
        }
        for number, (name, event) in enumerate(events.items()):
            event()
            text = f"And word number {number}, please?"
            result[name] = asyncio.run(talk(stack, histories, text, args.new_tokens))
            time.sleep(args.settle_s)
        result["exit_code"] = stack.stop()
    return result


def main() -> None:
    args = arguments(__doc__, "--sessions 4 --tokens 600 --new-tokens 12 --settle-s 3.0")
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
