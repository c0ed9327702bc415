"""Kills two gateways, three engines and one Redis in turn while users chat, and counts failures.

    python -m benchmarks.two_gateways [--sessions 200] [--tokens 150] [--json OUT]

Each gateway has an engine on mlx of its own; both are attached to one vLLM. A third of the sessions
uses vLLM. Every session takes a turn in each round, each time through the other gateway; in the
middle of a round one process is killed (kill -9), or Redis is stopped for 30 s. A user whose
gateway is down asks the other one; one whose stream breaks, or who gets a 503, asks again. All of
these are counted, and so are turns that failed nevertheless. Sessions are stored exactly (``raw``),
and all texts are compared with those of the same turns on one server where nothing is killed.

After each round some sessions are deleted through the gateway that did not serve them last: five
seconds later no gateway may list them, and their next turns must reuse nothing. At the end a key
with 60 requests a minute asks both gateways at once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.program import arguments, write_json
from benchmarks.stacks.attached_vllm import SMALL, Elsewhere, started
from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of
from benchmarks.stacks.rounds import Rounds, until_loaded
from benchmarks.stacks.vllm_stack import python_with_vllm
from gateway.keys import generate_key
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model
from tests.redis_server import RedisServer

MLX, VLLM = "on-mlx", "on-vllm"
AWAY_S: Final = 30.0  # that Redis does not answer
DELETED_S: Final = 5.0  # within which a deletion reaches all
PER_ROUND: Final = 3  # deletions
PER_MINUTE: Final = 60  # requests of the limited key


def model() -> str:
    return str(sample_model(default_cache_dir(os.environ)))


async def delete(users: Rounds, name: str, clients: list[Client], undeleted: list[str]) -> None:
    """Delete some sessions, each through the gateway that did not serve it last."""
    turned, sessions = len(users.sources) - 1, list(users.histories)
    for number in ((turned * PER_ROUND + i) % len(sessions) for i in range(PER_ROUND)):
        deletes = clients[(number + turned + 1) % len(clients)]
        session = sessions[number]
        while error := (await deletes.delete(f"/v1/sessions/{session}")).get("error"):
            if error["code"] != "redis_away":
                undeleted.append(f"{name}, {session}: {error['message']}")
                break
            users.asked_again["deletion 503"] += 1  # it cannot ask the others yet
            await asyncio.sleep(1.0)
        else:
            users.deleted.add(session)
    await asyncio.sleep(DELETED_S)
    for client in clients:
        listed = {x["id"] for x in (await client.get("/v1/sessions?limit=1000"))["data"]}
        users.found_after_deletion += [f"{name}: {x} is listed" for x in listed & users.deleted]


def gateway(folder: Path, redis: str, vllm: Elsewhere, keys: Path, secret: Path) -> Stack:
    store = {"codec": "raw", "ram_bytes": 64 * MIB, "disk_bytes": 0}
    settings = {
        "gateway": {"api_keys_file": str(keys)},
        "engine": {"hot_bytes": 256 * MIB, "max_context": 2048},
        "store": {**store, "redis_url": redis, "secret_file": str(secret)},
        "engines": [
            {"name": MLX, "kind": "mlx", "model": model()},
            {"name": VLLM, **vllm.settings["engine"]},
        ],
    }
    return Stack(settings, folder=folder)


def events(
    a: Stack, b: Stack, vllm: Elsewhere, redis: RedisServer
) -> dict[str, Callable[[], None] | None]:
    """Return the fault of each round by name; each returns once the process is replaced."""

    def kill_vllm() -> None:
        vllm.kill()
        vllm.start()
        vllm.wait_for_port()

    def kill_gateway(stack: Stack) -> None:
        stack.kill()
        stack.start()

    def stop_redis() -> None:
        redis.stop()
        time.sleep(AWAY_S)
        redis.cont()

    return {
        "first": None,
        "second": None,
        "an mlx engine": a.kill_engine,
        "the other mlx engine": b.kill_engine,
        "vLLM": kill_vllm,
        "a gateway": lambda: kill_gateway(a),
        "the other gateway": lambda: kill_gateway(b),
        "Redis": stop_redis,
    }


async def all_rounds(
    users: Rounds,
    gateways: list[Stack],
    done: dict[str, Callable[[], None] | None],
    keys: tuple[str, str],
) -> dict[str, Any]:
    undeleted: list[str] = []
    async with AsyncExitStack() as held:
        clients, few = [
            [await held.enter_async_context(client_of(x, key)) for x in gateways] for key in keys
        ]
        for client in clients:
            await until_loaded(client)
        for name, event in done.items():
            if event is None:
                await users.round(name, clients)
            else:
                await asyncio.gather(users.round(name, clients), users.in_the_middle(event))
            await delete(users, name, clients, undeleted)
        return {"not_deleted": undeleted, "limit": await burst(few)}


async def burst(clients: list[Client]) -> dict[str, Any]:
    """Ask both gateways at once with one key; count the requests that its limit admits."""
    began = time.monotonic()

    async def one(i: int) -> int:
        message = [{"role": "user", "content": f"say {i}"}]
        return (await clients[i % 2].chat(message, f"few{i}", 1, model=MLX)).status

    statuses = Counter(await asyncio.gather(*(one(i) for i in range(3 * PER_MINUTE))))
    refilled = (time.monotonic() - began) * PER_MINUTE / 60
    return {"limit": PER_MINUTE, "refilled_meanwhile": round(refilled, 1), "statuses": statuses}


def undisturbed() -> Stack:
    """Return one server with both engines and room for all sessions."""
    settings = {
        "engine": {"hot_bytes": 1024 * MIB, "max_context": 2048},
        "engine.vllm": {"python": python_with_vllm()},
        "store": {"codec": "raw", "ram_bytes": 256 * MIB, "disk_bytes": 0},
        "engines": [
            {"name": MLX, "kind": "mlx", "model": model()},
            {"name": VLLM, "kind": "vllm", "model": model()},
        ],
    }
    return Stack(settings, start_timeout_s=900)


def measure(num_sessions: int, num_tokens: int) -> dict[str, Any]:
    users = Rounds(num_sessions, num_tokens, (VLLM, MLX, MLX))
    with ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="thermocline-")))
        redis = held.enter_context(RedisServer("--maxmemory", "2gb", tcp=True))
        key, line = generate_key("users")
        limited, limited_line = generate_key("few")
        (root / "keys").write_text(f"{line}\n{limited_line} requests_per_minute={PER_MINUTE}\n")
        (root / "secret").write_bytes(os.urandom(32))
        (root / "vllm").mkdir()
        store = {"codec": "raw", "ram_bytes": 64 * MIB, "disk_bytes": 1024 * MIB}
        vllm = started(python_with_vllm(), root / "vllm", store, SMALL)
        held.callback(vllm.kill)
        vllm.wait_for_port()
        a, b = [
            held.enter_context(gateway(root / x, redis.url, vllm, root / "keys", root / "secret"))
            for x in ("a", "b")
        ]
        done = events(a, b, vllm, redis)
        found = asyncio.run(all_rounds(users, [a, b], done, (key, limited)))
    return {
        "sessions": num_sessions,
        "turns": num_sessions * len(users.sources),
        "failures": users.failures,
        "asked_again": users.asked_again,
        "sessions_with_other_texts": users.other_texts(undisturbed()),
        "found_after_deletion": users.found_after_deletion,
        **found,
        "rounds": users.sources,
    }


def main() -> None:
    args = arguments(__doc__, "--sessions 200 --tokens 150")
    write_json(args.json, measure(args.sessions, args.tokens))


if __name__ == "__main__":
    main()
