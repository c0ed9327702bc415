"""What one tenant's stored objects cost its neighbour: large conversations, lists of many chats.

    python benchmarks/stored.py [--chats 60000] [--json OUT]

A neighbour asks for a chat of two tokens, and for a small stored response, over and over: alone,
and beside each attack. Shown are the longest waits, the gateway's memory above what it was before,
and for how long the gateway computes after the attacker has left. The engine is the fake one.

*recall*: a conversation of 75 MB is made by 60 appends, and gone on from: once, by four requests
at once, and by one whose client leaves at once. *within*: the same with one of 7.4 MB of text, and
with one of as many lists in lists as a request may have. *lists*: of many stored chats those with
a label: once, eight at once.
The chats lie in a file of an older release (``tests.old_stored``), read as it is and brought up to
date.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key
from tests.old_stored import write_old_chats

APPENDS, ITEMS, LISTS = 60, 64, 2400
MIB = 1 << 20
QUIET_CPU_S = 0.05  # in a tenth of a second: then it computes nothing any more


class Caller:
    """One tenant's requests."""

    def __init__(self, stack: FakeStack, http: aiohttp.ClientSession, key: str) -> None:
        self._url, self._http = stack.url, http
        self._headers = {"authorization": f"Bearer {key}"}

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        asked = self._http.request(method, self._url + path, json=body, headers=self._headers)
        async with asked as answer:
            return answer.status, json.loads(await answer.read())

    async def chat(self) -> None:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        status, said = await self.ask("POST", "/v1/chat/completions", body)
        assert status == 200, said


class Watch:
    """The neighbour's waits and the gateway's memory, from one moment on."""

    def __init__(self, neighbour: Caller, response: str, gateway: psutil.Process) -> None:
        self._neighbour, self._response, self._gateway = neighbour, response, gateway
        self._before = self._most = gateway.memory_info().rss
        self._chat_s = self._get_s = 0.0

    async def __aenter__(self) -> Watch:
        self._tasks = [asyncio.create_task(x()) for x in (self._chats, self._gets, self._memory)]
        await asyncio.sleep(0.3)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.3)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    def figures(self) -> dict[str, float]:
        more = (self._most - self._before) / MIB
        return {"chat_s": self._chat_s, "get_s": self._get_s, "memory_mib": more}

    async def _chats(self) -> None:
        while True:
            self._chat_s = max(self._chat_s, await timed(self._neighbour.chat()))

    async def _gets(self) -> None:
        while True:
            asked = self._neighbour.ask("GET", self._response)
            self._get_s = max(self._get_s, await timed(asked))
            await asyncio.sleep(0.02)

    async def _memory(self) -> None:
        while True:
            self._most = max(self._most, self._gateway.memory_info().rss)
            await asyncio.sleep(0.02)


async def timed(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def computing_s(gateway: psutil.Process) -> float:
    """For how long the gateway computes from now on, until it has been quiet for a second."""
    began = last = time.perf_counter()
    while time.perf_counter() < last + 1.0:
        before = sum(gateway.cpu_times()[:2])
        await asyncio.sleep(0.1)
        if sum(gateway.cpu_times()[:2]) - before > QUIET_CPU_S:
            last = time.perf_counter()
    return last - began


async def large_conversation(caller: Caller, num_appends: int, output: Any) -> str:
    _, made = await caller.ask("POST", "/v1/conversations", {})
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    for _ in range(num_appends):
        path = f"/v1/conversations/{made['id']}/items"
        status, said = await caller.ask("POST", path, {"items": [item] * ITEMS})
        assert status == 200, said
    return str(made["id"])


async def measured(folder: Path, num_chats: int) -> list[dict[str, Any]]:
    (key, line), (other, other_line) = generate_key("mallory"), generate_key("alice")
    write_old_chats(folder / "stored" / "stored.sqlite", "mallory", num_chats)
    settings = {"api_keys": [line, other_line], "concurrent_requests": 64}
    rows: list[dict[str, Any]] = []
    with FakeStack(folder, gateway=settings, engine={"max_context": 1 << 20}) as stack:
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            mallory, alice = Caller(stack, http, key), Caller(stack, http, other)
            _, made = await alice.ask("POST", "/v1/responses", {"input": "x"})
            response = f"/v1/responses/{made['id']}"

            async def beside(name: str, attack: Callable[[], Awaitable[Any]]) -> None:
                async with Watch(alice, response, stack.process) as watch:
                    took = await timed(attack())
                rows.append({"attack": name, "took_s": took, **watch.figures()})
                print_row(rows[-1])

            await beside("none", lambda: asyncio.sleep(3.0))
            await lists(mallory, beside)
            await recalls(mallory, beside, stack.process, rows)
    return rows


Beside = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[None]]


async def lists(mallory: Caller, beside: Beside) -> None:
    path = "/v1/chat/completions?metadata[number]=59&limit=100"

    async def listed() -> None:
        status, said = await mallory.ask("GET", path)
        assert status == 200 and len(said["data"]) == 1, said

    await beside("lists: the first", listed)
    await beside("lists: one", listed)
    await beside("lists: eight", lambda: asyncio.gather(*(listed() for _ in range(8))))


async def recalls(
    mallory: Caller, beside: Beside, gateway: psutil.Process, rows: list[dict[str, Any]]
) -> None:
    lists = [[10, 11]] * LISTS
    for name, num_appends, output in (
        ("within", 5, json.dumps(lists)),
        ("within, lists", 1, lists),
        ("recall", APPENDS, lists),
    ):
        id = await large_conversation(mallory, num_appends, output)
        body = {"input": "x", "conversation": id, "store": False}

        async def asked(body: Any = body) -> None:
            status, said = await mallory.ask("POST", "/v1/responses", body)
            print(f"  {status}", (said.get("error") or {}).get("message", "")[:200])

        await beside(f"{name}: one", asked)
        await beside(f"{name}: four", lambda f=asked: asyncio.gather(*(f() for _ in range(4))))  # type: ignore[misc]
        await computing_s(gateway)
        leaving = asyncio.create_task(asked())
        await asyncio.sleep(0.15)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        rows.append({"attack": f"{name}: left", "computing_s": await computing_s(gateway)})
        print_row(rows[-1])


def print_row(row: dict[str, Any]) -> None:
    shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items()}
    print(" ".join(f"{k}={v}" for k, v in shown.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chats", type=int, default=60_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measured(Path(folder), args.chats))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
