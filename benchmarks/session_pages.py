"""What a page of a tenant's sessions costs a gateway, with few and with very many of them.

    python -m benchmarks.session_pages [--sessions 100000] [--limit 1000] [--json OUT]

Another server's rows of one tenant are written to a Redis, 10 first, then all. A gateway with the
fake engine then lists them by pages: counted is its processor time for each page, and how long a
neighbour's chats wait beside the pages, above alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.stacks.product_stack import Client, Stack, client_of, write_json
from gateway.keys import Tenants, generate_key
from gateway.shared.names import SharedNames
from gateway.shared.redis_client import AsyncRedis
from gateway.shared.session_rows import SessionRow, writing
from tests.redis_server import RedisServer

TENANT: Final = "many"
FEW: Final = 10
PAGES: Final = 20  # of each measurement
BATCH: Final = 500
CHATS: Final = 20


async def fill(url: str, secret: bytes, first: int, end: int) -> None:
    """Write rows as another server does."""
    redis = AsyncRedis(url, 30.0)
    tenants = Tenants(secret)
    names = SharedNames(tenants.key_of).of(TENANT)
    now = time.time()
    await redis.run([("SADD", SharedNames(tenants.key_of).models, "fake")])
    for start in range(first, end, BATCH):
        rows = [
            SessionRow(
                "fake", f"chat-{i}", now - i, now - i / 10, "redis", 4096, 1 << 20, "a title"
            )
            for i in range(start, min(start + BATCH, end))
        ]
        await redis.run([command for row in rows for command in writing(names, row)])
    await redis.close()


async def chats(client: Client, number: int) -> list[float]:
    found = []
    for i in range(number):
        began = time.perf_counter()
        reply = await client.chat([{"role": "user", "content": "hello"}], f"n{i}", 2, model="fake")
        assert reply.ok, reply
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    return found


async def measured(stack: Stack, keys: dict[str, str], limit: int) -> dict[str, Any]:
    """List pages one after the other, then again beside a neighbour's chats."""
    path = f"/v1/sessions?limit={limit}"
    async with client_of(stack, keys[TENANT]) as many, client_of(stack, keys["other"]) as other:
        first = await many.get(path)
        await chats(other, 3)
        alone = await chats(other, CHATS)
        cpu, began, num_rows = stack.gateway.cpu_times(), time.perf_counter(), 0
        after = ""
        for _ in range(PAGES):
            page = await many.get(path + after)
            num_rows += len(page["data"])
            after = f"&after={page['next']}" if "next" in page else ""
        took, now = time.perf_counter() - began, stack.gateway.cpu_times()
        spent = now.user + now.system - cpu.user - cpu.system

        async def lists() -> None:
            while True:
                await many.get(path)

        beside_it = asyncio.create_task(lists())
        beside = await chats(other, CHATS)
        beside_it.cancel()
    return {
        "rows_of_a_page": len(first["data"]),
        "rows": num_rows,
        "cpu_ms_of_a_page": round(1000 * spent / PAGES, 1),
        "ms_of_a_page": round(1000 * took / PAGES, 1),
        "neighbour_waits_more_s": round(max(beside) - max(alone), 3),
        "neighbour_median_more_s": round(statistics.median(beside) - statistics.median(alone), 3),
    }


def measure(num_sessions: int, limits: list[int]) -> dict[str, Any]:
    with ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="thermocline-")))
        redis = held.enter_context(RedisServer(tcp=True))
        keys, lines = {}, []
        for name in (TENANT, "other"):
            keys[name], line = generate_key(name)
            lines.append(f"{line}\n")
        (root / "keys").write_text("".join(lines))
        secret = os.urandom(32)
        (root / "secret").write_bytes(secret)
        settings = {
            "gateway": {"api_keys_file": str(root / "keys")},
            "engine": {"kind": "fake"},
            "store": {"redis_url": redis.url, "secret_file": str(root / "secret")},
        }
        stack = held.enter_context(Stack(settings, folder=root / "server"))
        found: dict[str, Any] = {}
        done = 0
        for number in (FEW, num_sessions):
            asyncio.run(fill(redis.url, secret, done, number))
            done = number
            found[f"{number} sessions"] = {
                f"limit {x}": asyncio.run(measured(stack, keys, x)) for x in limits
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--limit", type=int, nargs="*", default=[1, 100, 1000])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args.sessions, args.limit))


if __name__ == "__main__":
    main()
