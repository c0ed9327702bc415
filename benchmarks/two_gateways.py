"""Two gateways, three engines, one Redis; each of them is killed in turn while users chat.

python -m benchmarks.two_gateways [--sessions 200] [--tokens 150] [--json OUT]

Each gateway has an engine on mlx of its own; both are attached to one vLLM. A third of the sessions
uses vLLM. Every session takes a turn in each round, each time by the other gateway; in the middle
of a round one part is ended by kill -9, Redis is stopped for 30 s. A user whose gateway is gone
asks the other one; one whose stream breaks, or who gets a 503, asks again. All of these are
counted, and so are turns that failed all the same. Sessions are stored exactly (``raw``), and all
texts are compared with those of the same turns on one server where nothing is killed.

After each round some sessions are deleted by the gateway that did not serve them last: five seconds
later no gateway may list them, and their next turns may find nothing. At the end a key with 60
requests a minute asks both gateways at once.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from benchmarks.program import arguments, write_json
from benchmarks.stacks.attached_vllm import Elsewhere, started
from benchmarks.stacks.product_stack import (
    MIB,
    WORD_TOKENS,
    Client,
    Reply,
    Stack,
    client_of,
    prose,
)
from benchmarks.stacks.vllm_stack import python_with_vllm
from gateway.keys import generate_key
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model
from tests.redis_server import RedisServer

MLX, VLLM = "on-mlx", "on-vllm"
AT_ONCE: Final = 4
ANSWER_TOKENS: Final = 8
AWAY_S: Final = 30.0  # that Redis does not answer
DELETED_S: Final = 5.0  # within which a deletion reaches all
PER_ROUND: Final = 3  # deletions
PER_MINUTE: Final = 60  # requests of the limited key
TRIES: Final = 120  # of one turn, a second apart
VLLM_OPTIONS: Final = ("--kv-cache-memory-bytes", str(512 * MIB), "--dtype", "float32")
VLLM_SIZES: Final = ("--enforce-eager", "--block-size", "32", "--max-model-len", "2048")
ROUNDS: Final = (
    "first",
    "second",
    "an mlx engine",
    "the other mlx engine",
    "vLLM",
    "a gateway",
    "the other gateway",
    "Redis",
)


@dataclass
class Users:
    """Sessions with their histories and answers, and counts of their turns by outcome."""

    num_sessions: int
    num_tokens: int
    texts: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    asked_again: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    found_after_deletion: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # could not be deleted
    num_answered: int = 0  # of this round
    deleted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        words = int(self.num_tokens / WORD_TOKENS)
        self.histories = {
            f"s{i}": [{"role": "user", "content": prose(f"user {i}", words)}]
            for i in range(self.num_sessions)
        }

    async def round(self, name: str, clients: list[Client]) -> None:
        """Have every session take a turn, some at once."""
        self.num_answered = 0
        self.sources[name] = Counter()
        places = asyncio.Semaphore(AT_ONCE)
        turned = ROUNDS.index(name)

        async def turn(i: int, session: str) -> None:
            async with places:
                before = self.asked_again.total()
                reply = await self._answer(clients, i + turned, session, i % 3 == 0)
            self.num_answered += 1
            # A turn that was asked again may find the blobs of its own first try.
            self._note(name, session, reply, again=self.asked_again.total() > before)

        await asyncio.gather(*(turn(i, x) for i, x in enumerate(self.histories)))

    async def _answer(self, clients: list[Client], first: int, session: str, vllm: bool) -> Reply:
        reply = Reply(status=0)
        for attempt in range(TRIES):
            client = clients[(first + attempt) % len(clients)]
            try:
                reply = await client.chat(
                    self.histories[session],
                    session=session,
                    max_tokens=ANSWER_TOKENS,
                    model=VLLM if vllm else MLX,
                )
            except aiohttp.ClientError:
                self.asked_again["gateway gone"] += 1
            else:
                if reply.ok:
                    return reply
                broken = reply.status == 200
                if not broken and reply.status != 503:
                    return reply
                self.asked_again["stream broken" if broken else "503"] += 1
            await asyncio.sleep(1.0)
        return reply

    def _note(self, name: str, session: str, reply: Reply, *, again: bool) -> None:
        source = reply.cache.partition(";")[0] or "no header"
        self.sources[name][source] += 1
        if not reply.ok:
            self.failures.append(f"{name}, {session}: {reply.status} {reply.error}")
        if session in self.deleted and source != "miss" and not again:
            self.found_after_deletion.append(f"{name}, {session}: {reply.cache}")
        self.deleted.discard(session)
        self.texts.setdefault(session, []).append(reply.text)
        self.histories[session] += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "And what comes next?"},
        ]

    async def delete(self, name: str, clients: list[Client]) -> None:
        """Delete some sessions, each by the gateway that did not serve it last."""
        turned = ROUNDS.index(name)
        sessions = list(self.histories)
        for i in range(PER_ROUND):
            number = (turned * PER_ROUND + i) % len(sessions)
            deletes = clients[(number + turned + 1) % len(clients)]
            path = f"/v1/sessions/{sessions[number]}"
            while error := (await deletes.delete(path)).get("error"):
                if error["code"] != "redis_away":
                    self.unknown.append(f"{name}, {sessions[number]}: {error['message']}")
                    break
                self.asked_again["deletion 503"] += 1  # it cannot ask the others yet
                await asyncio.sleep(1.0)
            else:
                self.deleted.add(sessions[number])
        await asyncio.sleep(DELETED_S)
        for client in clients:
            listed = {x["id"] for x in (await client.get("/v1/sessions?limit=1000"))["data"]}
            self.found_after_deletion += [f"{name}: {x} is listed" for x in listed & self.deleted]


def gateway(folder: Path, redis: str, vllm: Elsewhere, keys: Path, secret: Path) -> Stack:
    model = str(sample_model(default_cache_dir(os.environ)))
    return Stack(
        {
            "gateway": {"api_keys_file": str(keys)},
            "engine": {"hot_bytes": 256 * MIB, "max_context": 2048},
            "store": {
                "codec": "raw",
                "ram_bytes": 64 * MIB,
                "disk_bytes": 0,
                "redis_url": redis,
                "secret_file": str(secret),
            },
            "engines": [
                {"name": MLX, "kind": "mlx", "model": model},
                {"name": VLLM, **vllm.settings["engine"]},
            ],
        },
        folder=folder,
    )


class Parts:
    """All that can be killed. Each method returns when another one has taken its place."""

    def __init__(self, gateways: list[Stack], vllm: Elsewhere, redis: RedisServer) -> None:
        self.gateways = gateways
        self.vllm = vllm
        self.redis = redis

    def kill_engine(self, i: int) -> None:
        self.gateways[i].kill_engine()

    def kill_vllm(self) -> None:
        self.vllm.kill()
        self.vllm.start()
        self.vllm.wait_for_port()

    def kill_gateway(self, i: int) -> None:
        self.gateways[i].kill()
        self.gateways[i].start()

    def stop_redis(self) -> None:
        self.redis.stop()
        time.sleep(AWAY_S)
        self.redis.cont()

    def events(self) -> dict[str, Callable[[], None]]:
        """What is done in which round."""
        return {
            "an mlx engine": lambda: self.kill_engine(0),
            "the other mlx engine": lambda: self.kill_engine(1),
            "vLLM": self.kill_vllm,
            "a gateway": lambda: self.kill_gateway(0),
            "the other gateway": lambda: self.kill_gateway(1),
            "Redis": self.stop_redis,
        }


async def all_rounds(users: Users, parts: Parts, key: str, limited: str) -> dict[str, Any]:
    async with AsyncExitStack() as held:
        clients = [await held.enter_async_context(client_of(x, key)) for x in parts.gateways]
        for client in clients:
            await _until_ready(client)
        for name in ROUNDS:
            event = parts.events().get(name)
            doing: Awaitable[None] | None = None
            if event is not None:
                doing = asyncio.create_task(_in_the_middle(users, event))
            await users.round(name, clients)
            if doing is not None:
                await doing
            await users.delete(name, clients)
        few = [await held.enter_async_context(client_of(x, limited)) for x in parts.gateways]
        return await burst(few)


async def _in_the_middle(users: Users, event: Callable[[], None]) -> None:
    while users.num_answered < users.num_sessions // 3:
        await asyncio.sleep(0.02)
    await asyncio.to_thread(event)


async def _until_ready(client: Client) -> None:
    async with asyncio.timeout(900):
        while True:
            models = (await client.get("/v1/models"))["data"]
            if all(x.get("state", "loaded") == "loaded" for x in models) and len(models) == 2:
                return
            await asyncio.sleep(0.5)


async def burst(clients: list[Client]) -> dict[str, Any]:
    """Ask both gateways at once with one key; count what its limit lets through."""
    began = time.monotonic()

    async def one(i: int) -> int:
        message = [{"role": "user", "content": f"say {i}"}]
        reply = await clients[i % 2].chat(message, f"few{i}", 1, model=MLX)
        return reply.status

    statuses = Counter(await asyncio.gather(*(one(i) for i in range(3 * PER_MINUTE))))
    refilled = (time.monotonic() - began) * PER_MINUTE / 60
    return {
        "limit": PER_MINUTE,
        "let_through": statuses[200],
        "refilled_meanwhile": round(refilled, 1),
        "other_statuses": {k: v for k, v in statuses.items() if k != 200},
    }


def undisturbed(users: Users) -> None:
    """The same turns on one server with both engines and room for all."""
    model = str(sample_model(default_cache_dir(os.environ)))
    settings = {
        "engine": {"hot_bytes": 1024 * MIB, "max_context": 2048},
        "engine.vllm": {"python": python_with_vllm()},
        "store": {"codec": "raw", "ram_bytes": 256 * MIB, "disk_bytes": 0},
        "engines": [
            {"name": MLX, "kind": "mlx", "model": model},
            {"name": VLLM, "kind": "vllm", "model": model},
        ],
    }

    async def rounds(stack: Stack) -> None:
        async with client_of(stack) as client:
            await _until_ready(client)
            for name in ROUNDS:
                await users.round(name, [client])

    with Stack(settings, start_timeout_s=900) as stack:
        asyncio.run(rounds(stack))


def measure(num_sessions: int, num_tokens: int) -> dict[str, Any]:
    users = Users(num_sessions, num_tokens)
    with ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="thermocline-")))
        redis = held.enter_context(RedisServer("--maxmemory", "2gb", tcp=True))
        key, line = generate_key("users")
        limited, limited_line = generate_key("few")
        (root / "keys").write_text(f"{line}\n{limited_line} requests_per_minute={PER_MINUTE}\n")
        (root / "secret").write_bytes(os.urandom(32))
        (root / "vllm").mkdir()
        store = {"codec": "raw", "ram_bytes": 64 * MIB, "disk_bytes": 1024 * MIB}
        options = (*VLLM_OPTIONS, *VLLM_SIZES)
        vllm = started(python_with_vllm(), root / "vllm", store, options)
        held.callback(vllm.kill)
        vllm.wait_for_port()
        gateways = []
        for name in ("a", "b"):
            stack = gateway(root / name, redis.url, vllm, root / "keys", root / "secret")
            gateways.append(held.enter_context(stack))
        try:
            limits = asyncio.run(all_rounds(users, Parts(gateways, vllm, redis), key, limited))
        except BaseException:
            print(*(x.tail() for x in gateways), sep="\n----\n", flush=True)
            raise
    alone = Users(num_sessions, num_tokens)
    undisturbed(alone)
    return {
        "sessions": num_sessions,
        "turns": num_sessions * len(ROUNDS),
        "failures": users.failures,
        "asked_again": dict(users.asked_again),
        "sessions_with_other_texts": sum(
            texts != alone.texts[session] for session, texts in users.texts.items()
        ),
        "found_after_deletion": users.found_after_deletion,
        "not_deleted": users.unknown,
        "limit": limits,
        "rounds": {name: dict(found) for name, found in users.sources.items()},
    }


def main() -> None:
    args = arguments(__doc__, "--sessions 200 --tokens 150")
    write_json(args.json, measure(args.sessions, args.tokens))


if __name__ == "__main__":
    main()
