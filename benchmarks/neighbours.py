"""Measures how one tenant's costly request delays another's chat, and how much work it leaves.

    python -m benchmarks.neighbours [--only schema,tools] [--engine vllm] [--seconds 60]

A server is started for each attack: mlx or vLLM, the sample model, keys of two tenants, stored
objects on. The neighbour asks for two tokens again and again, by chat completions and by Responses
(which stores its answers), first alone and then beside the attack, until the attack was answered,
or for ``--seconds``. Then the attack is sent again, and its client leaves after a second; the CPU
seconds that gateway and engine, with all their child processes, take from then until both are idle
are counted. Memory is the maximum beside the attack, less that before it.

The lists are requested from ``--chats 60000`` stored chats, which a fake engine answers so that
they exist within minutes. A run takes 15 minutes, and half an hour longer if attacks succeed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import aiohttp

from benchmarks.program import arguments, write_json
from benchmarks.stacks.processes import Peak, cpu_s, rss_mib, tree
from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of, prose
from benchmarks.stacks.vllm_stack import python_with_vllm
from gateway.keys import generate_key

ALONE: Final = 6  # times that the neighbour asks before the attack
LEAVES_AFTER_S: Final = 1.0
REST_S: Final = 1.0  # both are idle when they took next to nothing for so long
REST_SHARE: Final = 0.1  # of one core
GIVE_UP_S: Final = 300.0  # waiting for rest
KINDS: Final = ("email", "uri", "ipv6", "date-time")

Sent = tuple[str, str, bytes]  # method, path, body


class Attack(NamedTuple):
    """A costly request, sent ``at_once`` times together."""

    name: str
    what: str
    request: Callable[[str, str], Sent]  # of the served model, and of the result of ``prepare``
    at_once: int = 1
    prepare: Callable[[Client], Awaitable[str]] | None = None
    needs_chats: bool = False


async def asked(client: Client, sent: Sent) -> tuple[int, bytes]:
    """Send a request; return status and body; status 0 if the server broke off."""
    try:
        return await client.ask(*sent)
    except (aiohttp.ClientError, TimeoutError) as error:
        return 0, repr(error).encode()


async def neighbour(client: Client, until: Callable[[int], bool]) -> dict[str, Any]:
    """Ask for two tokens until ``until(rounds)`` is true; return the longest waits."""
    waits: dict[str, list[float]] = {"chat": [], "response": []}
    statuses, rounds = Counter[int](), 0
    while rounds == 0 or not until(rounds):
        words = prose(f"neighbour {time.monotonic()}", 8)
        for name, sent in (
            ("chat", chat_of(client.model, words, max_tokens=2)),
            ("response", response_of(client.model, words, max_output_tokens=2)),
        ):
            began = time.perf_counter()
            status, _ = await asked(client, sent)
            waits[name].append(time.perf_counter() - began)
            statuses[status] += 1
        rounds += 1
        await asyncio.sleep(0.1)
    worst = {f"{name}_worst_s": round(max(x), 3) for name, x in waits.items()}
    return {**worst, "statuses": dict(statuses)}


# ---- the attacks


def chat_of(model: str, words: str = "Fill it in.", **fields: Any) -> Sent:
    message = {"role": "user", "content": words}
    body = {"model": model, "messages": [message], "max_tokens": 16, "temperature": 0, **fields}
    return "POST", "/v1/chat/completions", json.dumps(body).encode()


def response_of(model: str, words: str, **fields: Any) -> Sent:
    body = {"model": model, "input": words, "temperature": 0, **fields}
    return "POST", "/v1/responses", json.dumps(body).encode()


def schema_of(model: str, properties: dict[str, Any], required: list[str]) -> Sent:
    schema = {"type": "object", "properties": properties, "required": required}
    wanted = {"name": "wanted", "schema": schema}
    return chat_of(model, response_format={"type": "json_schema", "json_schema": wanted})


def tools_of(model: str, properties: dict[str, Any], required: list[str], count: int) -> Sent:
    parameters = {"type": "object", "properties": properties, "required": required}
    names = (f"tool_{i}" for i in range(count))
    tools = [{"type": "function", "function": {"name": x, "parameters": parameters}} for x in names]
    return chat_of(model, tools=tools, tool_choice="required")


def wide_schema(model: str, _: str) -> Sent:
    return schema_of(model, {f"property_{i:05}": {"type": "string"} for i in range(10_000)}, [])


def many_tools(model: str, _: str) -> Sent:
    return tools_of(model, {f"property_{i}": {"type": "string"} for i in range(200)}, [], 128)


def lengths(model: str, _: str) -> Sent:
    """Return a request with eight lengths of texts, for which xgrammar takes 15 seconds."""
    properties = {f"text_{i}": {"type": "string", "maxLength": 3000 + i} for i in range(8)}
    return schema_of(model, properties, list(properties))


def formats(model: str, _: str) -> Sent:
    """Return a request for a forced call with formats, for which xgrammar takes seconds."""
    properties = {f"f{i}": {"type": "string", "format": KINDS[i % 4]} for i in range(200)}
    return tools_of(model, properties, list(properties), 1)


async def grow_conversation(attacker: Client) -> str:
    """Append lists in lists to a conversation 60 times, up to 75 MB; return its id."""
    id = str((await attacker.post("/v1/conversations"))["id"])
    # No chat can contain such an item, so it adds nothing to the prompt.
    item = {"type": "mcp_list_tools", "tools": [[0, 0, 0, 0]] * 125_000}
    body = json.dumps({"items": [item]}, separators=(",", ":")).encode()
    sent = "POST", f"/v1/conversations/{id}/items", body
    statuses = Counter([(await asked(attacker, sent))[0] for _ in range(60)])
    print(f"  60 appends of {len(body):,} bytes: {dict(statuses)}", flush=True)
    return id


def long_conversation(model: str, id: str) -> Sent:
    return response_of(model, "hello", conversation=id, max_output_tokens=16)


def filtered_list(_: str, __: str) -> Sent:
    return "GET", "/v1/chat/completions?metadata[colour]=none&limit=100", b""


def embeddings(model: str, _: str) -> Sent:
    inputs = [prose(i, 100) for i in range(2048)]
    return "POST", "/v1/embeddings", json.dumps({"model": model, "input": inputs}).encode()


def detokenize(model: str, _: str) -> Sent:
    tokens = [1000 + i % 1000 for i in range(1_000_000)]
    body = json.dumps({"model": model, "tokens": tokens}, separators=(",", ":"))
    return "POST", "/detokenize", body.encode()


def tokenize(model: str, _: str) -> Sent:
    text = prose("a long text", 1_200_000)[: 8 * MIB - 200]  # the largest body that is taken
    return "POST", "/tokenize", json.dumps({"model": model, "prompt": text}).encode()


ATTACKS: Final = (
    Attack("schema", "`json_schema`, 10,000 optional properties", wide_schema),
    Attack("tools", "128 tools of 200 properties", many_tools),
    Attack("lengths", "`json_schema`, eight lengths of texts", lengths),
    Attack("formats", "a forced call, 200 properties with formats", formats),
    Attack("conversation", "75 MB, four at once", long_conversation, 4, grow_conversation),
    Attack("lists", "lists by `metadata`, eight at once", filtered_list, 8, None, True),
    Attack("embeddings", "embeddings of 2,048 inputs, 200,000 tokens", embeddings),
    Attack("detokenize", "`/detokenize` of a million ids", detokenize),
    Attack("tokenize", "`/tokenize` of the largest body", tokenize),
)


# ---- one attack


class Processes:
    """The gateway and the engine, each with its child processes."""

    def __init__(self, stack: Stack) -> None:
        self._gateway, self._engine = stack.gateway, stack.engine

    def sums(self, of: Callable[..., float]) -> dict[str, float]:
        engine = tree(self._engine)
        return {
            "gateway": of([x for x in tree(self._gateway) if x not in engine]),
            "engine": of(engine),
        }

    def memory_mib(self) -> dict[str, float]:
        return self.sums(lambda found: rss_mib(*found))

    async def rest(self) -> tuple[dict[str, float], float]:
        """Wait until both are idle; return the CPU seconds of each until then, and the seconds."""
        began = last_busy = time.perf_counter()
        first = before = at_rest = self.sums(cpu_s)
        while (now := time.perf_counter()) - last_busy < REST_S and now - began < GIVE_UP_S:
            await asyncio.sleep(0.2)
            after, elapsed = self.sums(cpu_s), time.perf_counter() - now
            if any(after[x] - before[x] > REST_SHARE * elapsed for x in after):
                last_busy, at_rest = time.perf_counter(), after
            before = after
        return {x: round(at_rest[x] - first[x], 2) for x in first}, last_busy - began


async def measure(attack: Attack, stack: Stack, keys: list[str], seconds: float) -> dict[str, Any]:
    async with AsyncExitStack() as held:
        attacker, other = [await held.enter_async_context(client_of(stack, x)) for x in keys]
        await neighbour(other, lambda rounds: rounds >= 2)  # compiles once
        made = await attack.prepare(attacker) if attack.prepare else ""
        request = attack.request(other.model, made)
        alone = await neighbour(other, lambda rounds: rounds >= ALONE)
        processes = Processes(stack)
        await processes.rest()
        before = processes.memory_mib()
        async with Peak(processes.memory_mib, 0.05) as peak:
            sent, began = begun(attack, attacker, request), time.perf_counter()
            await asyncio.sleep(0.05)
            beside = await neighbour(
                other,
                lambda _: all(x.done() for x in sent) or time.perf_counter() - began > seconds,
            )
            answers = {_words(*x.result()) for x in sent if x.done()}
            await ended(sent)
        await processes.rest()
        sent = begun(attack, attacker, request)
        await asyncio.sleep(LEAVES_AFTER_S)
        await ended(sent)
        after, left_s = await processes.rest()
    return {
        "attack": attack.name,
        "what": attack.what,
        "body_bytes": len(request[2]),
        "alone": alone,
        "beside": beside,
        "answers": sorted(answers),
        "growth_mib": {x: round(peak.most[x] - before[x], 1) for x in before},
        "cpu_after_leaving_s": after,
        "rests_after_leaving_s": round(left_s, 2),
    }


def _words(status: int, answer: bytes) -> str:
    return "200" if status == 200 else f"{status} {answer[:200].decode('utf-8', 'replace')}"


def begun(attack: Attack, attacker: Client, request: Sent) -> list[asyncio.Task[tuple[int, bytes]]]:
    return [asyncio.create_task(asked(attacker, request)) for _ in range(attack.at_once)]


async def ended(tasks: list[asyncio.Task[tuple[int, bytes]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- the servers


def stack_of(folder: Path, keys: list[str], kind: str = "mlx") -> Stack:
    engine: dict[str, Any] = {"kind": kind, "hot_bytes": 512 * MIB}
    if kind == "vllm":
        engine["vllm.python"] = python_with_vllm()
    settings: dict[str, dict[str, Any]] = {
        "gateway": {"api_keys": keys},
        "engine": engine,
        "store": {"ram_bytes": 128 * MIB, "disk_bytes": 0},
    }
    return Stack(settings, folder, start_timeout_s=600.0)


async def store_chats(stack: Stack, key: str, number: int) -> None:
    """Store chats of the attacker in a server's folder."""
    async with client_of(stack, key) as client:
        left = iter(range(number))

        async def some(session: str) -> None:
            for i in left:
                fields = {"store": True, "metadata": {"number": str(i), "colour": "red"}}
                sent = chat_of(client.model, f"chat {i}", session_id=session, **fields)
                status, answer = await asked(client, sent)
                assert status == 200, answer

        await asyncio.gather(*(some(f"filling {i}") for i in range(8)))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    made = [generate_key(name) for name in ("attacker", "neighbour")]
    keys, lines = [key for key, _ in made], [line for _, line in made]
    results = []
    for attack in (x for x in ATTACKS if x.name in args.only.split(",")):
        with TemporaryDirectory(prefix="neighbours-") as own:
            if attack.needs_chats:
                with stack_of(Path(own), lines, "fake") as stack:
                    asyncio.run(store_chats(stack, keys[0], args.chats))
            with stack_of(Path(own), lines, args.engine) as stack:
                results.append(asyncio.run(measure(attack, stack, keys, args.seconds)))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    names = ",".join(x.name for x in ATTACKS)
    args = arguments(__doc__, f"--only {names} --engine mlx|vllm --seconds 60.0 --chats 60000")
    write_json(args.json, {"attacks": run(args)})


if __name__ == "__main__":
    main()
