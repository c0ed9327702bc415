"""How one tenant's costly request delays another tenant's short chat, and how much work it leaves.

    python benchmarks/neighbours.py [--only schema,tools] [--engine vllm] [--seconds 60]

A server is started for each attack: mlx or vLLM, the sample model, keys of two tenants, stored
objects on. The neighbour asks for two tokens again and again, by chat completions and by Responses
(which stores its answers), first alone and then beside the attack, until the attack was
answered, or for ``--seconds``. Then the attack is begun once more, and its client leaves after a
second: counted are the CPU seconds that gateway and engine, with all processes below them, take
from then on until both rest. Memory is the most that was seen beside the attack, above that
before it.

The lists are asked of ``--chats 60000`` stored chats. A fake engine answers them, so that
they are there in minutes. The whole takes 15 minutes, and half an hour longer where attacks hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import psutil

from benchmarks.stacks.product_stack import MIB, Stack, prose, rss_mib, write_json
from benchmarks.stacks.vllm_stack import python_with_vllm
from gateway.keys import generate_key

BOUND_WAIT_S: Final = 2.0  # of the neighbour, above alone
BOUND_GATEWAY_MIB: Final = 300.0
BOUND_AFTER_S: Final = 1.0  # of CPU
ALONE: Final = 6  # times that the neighbour asks before the attack
LEAVES_AFTER_S: Final = 1.0
REST_S: Final = 1.0  # both processes rest when they took next to nothing for so long
REST_SHARE: Final = 0.1  # of one core
GIVE_UP_S: Final = 300.0  # waiting for rest, or for one answer

Sent = tuple[str, str, bytes]  # method, path, body


@dataclass(frozen=True)
class Attack:
    """Costly requests; ``at_once`` of them are sent together, and then no more."""

    name: str
    what: str
    request: Callable[[str, str], Sent]  # of the served model, and of the result of ``prepare``
    at_once: int = 1
    prepare: Callable[[Tenant], Awaitable[str]] | None = None
    needs_chats: bool = False


class Tenant:
    """A tenant's client."""

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the answer; status 0 if the server broke off."""
        try:
            async with self._http.request(
                method, self._url + path, data=body or None, headers=self._headers
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, repr(error).encode()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return await self.ask("POST", path, json.dumps(body).encode())


@dataclass
class Waits:
    """How long the neighbour's short requests took."""

    chats: list[float] = field(default_factory=list)
    responses: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        return {
            "chat_median_s": round(statistics.median(self.chats), 3),
            "chat_worst_s": round(max(self.chats), 3),
            "response_median_s": round(statistics.median(self.responses), 3),
            "response_worst_s": round(max(self.responses), 3),
            "statuses": dict(self.statuses),
        }


async def neighbour(tenant: Tenant, model: str, until: Callable[[int], bool]) -> Waits:
    """Ask for two tokens until ``until`` finds that so many rounds are enough."""
    waits, rounds = Waits(), 0
    while rounds == 0 or not until(rounds):
        words = prose(f"neighbour {time.monotonic()}", 8)
        chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 2}
        answer = {"input": words, "max_output_tokens": 2}
        for path, fields, times in (
            ("/v1/chat/completions", chat, waits.chats),
            ("/v1/responses", answer, waits.responses),
        ):
            began = time.perf_counter()
            status, _ = await tenant.post(path, {"model": model, "temperature": 0, **fields})
            times.append(time.perf_counter() - began)
            waits.statuses[status] += 1
        rounds += 1
        await asyncio.sleep(0.1)
    return waits


# ---- the attacks


def chat_of(model: str, **fields: Any) -> Sent:
    asked = {"messages": [{"role": "user", "content": "Fill it in."}], "max_tokens": 16, **fields}
    return "POST", "/v1/chat/completions", json.dumps({"model": model, **asked}).encode()


def wide_schema(model: str, _: str) -> Sent:
    properties = {f"property_{i:05}": {"type": "string"} for i in range(10_000)}
    schema = {"name": "wide", "schema": {"type": "object", "properties": properties}}
    return chat_of(model, response_format={"type": "json_schema", "json_schema": schema})


def many_tools(model: str, _: str) -> Sent:
    properties = {f"property_{i}": {"type": "string"} for i in range(200)}
    parameters = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}
        for i in range(128)
    ]
    return chat_of(model, tools=tools, tool_choice="required")


def lengths(model: str, _: str) -> Sent:
    """Eight lengths of texts, which xgrammar takes fifteen seconds for."""
    properties = {f"text_{i}": {"type": "string", "maxLength": 3000 + i} for i in range(8)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    wanted = {"name": "lengths", "schema": schema}
    return chat_of(model, response_format={"type": "json_schema", "json_schema": wanted})


def formats(model: str, _: str) -> Sent:
    """Forced calls with formats, which xgrammar takes seconds for."""
    kinds = ("email", "uri", "ipv6", "date-time")
    properties = {f"f{i}": {"type": "string", "format": kinds[i % 4]} for i in range(200)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"type": "function", "function": {"name": "write", "parameters": parameters}}
    return chat_of(model, tools=[tool], tool_choice="required")


async def grow_conversation(attacker: Tenant) -> str:
    """Make a conversation of 75 MB, 60 appends of lists in lists; as far as it is taken."""
    status, answer = await attacker.post("/v1/conversations", {})
    assert status == 200, answer
    id = str(json.loads(answer)["id"])
    # No chat can hold such an item, so it takes no place in the prompt.
    item = {"type": "mcp_list_tools", "tools": [[0, 0, 0, 0]] * 125_000}
    body = json.dumps({"items": [item]}, separators=(",", ":")).encode()
    statuses = Counter[int]()
    for _ in range(60):
        statuses[(await attacker.ask("POST", f"/v1/conversations/{id}/items", body))[0]] += 1
    print(f"  60 appends of {len(body):,} bytes: {dict(statuses)}", flush=True)
    return id


def long_conversation(model: str, id: str) -> Sent:
    asked = {"model": model, "input": "hello", "conversation": id, "max_output_tokens": 16}
    return "POST", "/v1/responses", json.dumps(asked).encode()


def filtered_list(_: str, __: str) -> Sent:
    return "GET", "/v1/chat/completions?metadata[colour]=none&limit=100", b""


def embeddings_of(num_words: int) -> Callable[[str, str], Sent]:
    def request(model: str, _: str) -> Sent:
        inputs = [prose(i, num_words) for i in range(2048)]
        return "POST", "/v1/embeddings", json.dumps({"model": model, "input": inputs}).encode()

    return request


def detokenize(model: str, _: str) -> Sent:
    tokens = [1000 + i % 1000 for i in range(1_000_000)]
    body = json.dumps({"model": model, "tokens": tokens}, separators=(",", ":"))
    return "POST", "/detokenize", body.encode()


def tokenize(model: str, _: str) -> Sent:
    text = prose("a long text", 1_200_000)[: 8 * MIB - 200]  # the largest body that is taken
    return "POST", "/tokenize", json.dumps({"model": model, "prompt": text}).encode()


def long_prompt(model: str, _: str) -> Sent:
    return chat_of(model, messages=[{"role": "user", "content": prose("long", 200_000)}])


ATTACKS: Final = (
    Attack("schema", "`json_schema`, 10,000 optional properties", wide_schema),
    Attack("tools", "128 tools of 200 properties", many_tools),
    Attack("lengths", "`json_schema`, eight lengths of texts", lengths),
    Attack("formats", "a forced call, 200 properties with formats", formats),
    Attack(
        "conversation",
        "a conversation of 75 MB, four at once",
        long_conversation,
        4,
        grow_conversation,
    ),
    Attack(
        "lists",
        "lists by `metadata` of stored chats, eight at once",
        filtered_list,
        8,
        None,
        True,
    ),
    Attack("embeddings", "embeddings of 2,048 inputs, 200,000 tokens", embeddings_of(100)),
    Attack("embeddings-8MB", "the same of 1,200,000, which is too many", embeddings_of(570)),
    Attack("detokenize", "`/detokenize` of a million ids", detokenize),
    Attack("prompts", "chats of 200,000 tokens, eight at once", long_prompt, 8),
    Attack("tokenize", "`/tokenize` of the largest body", tokenize),
)


# ---- CPU time and memory of the processes


class Processes:
    """The gateway and the engine, each with the processes below it."""

    def __init__(self, stack: Stack) -> None:
        self._gateway, self._engine = stack.gateway, stack.engine
        self.peak_mib = dict.fromkeys(("gateway", "engine"), 0.0)

    def _trees(self) -> dict[str, list[psutil.Process]]:
        engine = [self._engine, *self._engine.children(recursive=True)]
        below = [x for x in self._gateway.children(recursive=True) if x not in engine]
        return {"gateway": [self._gateway, *below], "engine": engine}

    def _sums(self, of: Callable[[psutil.Process], float]) -> dict[str, float]:
        sums = {}
        for name, processes in self._trees().items():
            sums[name] = 0.0
            for process in processes:
                with suppress(psutil.Error):  # it ended meanwhile
                    sums[name] += of(process)
        return sums

    def memory_mib(self) -> dict[str, float]:
        return self._sums(rss_mib)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far, those of children that have ended, too."""

        def used(process: psutil.Process) -> float:
            times = process.cpu_times()
            own = times.user + times.system
            return float(own + times.children_user + times.children_system)

        return self._sums(used)

    async def watch(self) -> None:
        while True:
            for name, mib in (await asyncio.to_thread(self.memory_mib)).items():
                self.peak_mib[name] = max(self.peak_mib[name], mib)
            await asyncio.sleep(0.05)

    async def rest(self) -> tuple[dict[str, float], float]:
        """Wait until both rest; returns the CPU seconds until then, and the seconds."""
        began = last_busy = time.perf_counter()
        first = before = self.cpu_s()
        at_rest = first
        while (now := time.perf_counter()) - last_busy < REST_S and now - began < GIVE_UP_S:
            await asyncio.sleep(0.2)
            after, elapsed = self.cpu_s(), time.perf_counter() - now
            if any(after[x] - before[x] > REST_SHARE * elapsed for x in after):
                last_busy, at_rest = time.perf_counter(), after
            before = after
        return {x: round(at_rest[x] - first[x], 2) for x in first}, last_busy - began


# ---- one attack


@asynccontextmanager
async def two_tenants(stack: Stack, keys: dict[str, str]) -> AsyncIterator[tuple[Tenant, Tenant]]:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=GIVE_UP_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        yield tuple(Tenant(stack.url, keys[x], http) for x in ("attacker", "neighbour"))  # type: ignore[misc]


async def measure(attack: Attack, stack: Stack, keys: dict[str, str], seconds: float) -> Any:
    async with two_tenants(stack, keys) as (attacker, other):
        _, answer = await other.ask("GET", "/v1/models")
        model = json.loads(answer)["data"][0]["id"]
        await neighbour(other, model, lambda rounds: rounds >= 2)  # compiles once
        made = await attack.prepare(attacker) if attack.prepare else ""
        request = attack.request(model, made)
        alone = await neighbour(other, model, lambda rounds: rounds >= ALONE)
        processes = Processes(stack)
        await processes.rest()
        before = processes.memory_mib()
        beside, answers, times = await attacked(
            attack, attacker, other, model, request, processes, seconds
        )
        await processes.rest()
        after, left_s = await left(attack, attacker, request, processes)
    growth = {x: round(processes.peak_mib[x] - before[x], 1) for x in before}
    return judged(
        {
            "attack": attack.name,
            "what": attack.what,
            "body_bytes": len(request[2]),
            "alone": alone.figures(),
            "beside": beside.figures(),
            "answers": answers,
            "answered_after_s": times,
            "growth_mib": growth,
            "cpu_after_leaving_s": after,
            "rests_after_leaving_s": round(left_s, 2),
        }
    )


async def attacked(
    attack: Attack,
    attacker: Tenant,
    other: Tenant,
    model: str,
    request: Sent,
    processes: Processes,
    seconds: float,
) -> tuple[Waits, list[str], list[float]]:
    """Let the attack go on beside the neighbour; returns its waits, and the attack's answers."""
    began = time.perf_counter()
    answers: list[str] = []
    times: list[float] = []

    async def one() -> None:
        status, answer = await attacker.ask(*request)
        times.append(round(time.perf_counter() - began, 2))
        words = "" if status == 200 else f" {answer[:200].decode('utf-8', 'replace')}"
        answers.append(f"{status}{words}")

    watch = asyncio.create_task(processes.watch())
    sent = [asyncio.create_task(one()) for _ in range(attack.at_once)]
    await asyncio.sleep(0.05)

    def enough(_: int) -> bool:
        return all(x.done() for x in sent) or time.perf_counter() - began > seconds

    waits = await neighbour(other, model, enough)
    await end(sent)
    watch.cancel()
    return waits, sorted(set(answers)), times


async def left(
    attack: Attack, attacker: Tenant, request: Sent, processes: Processes
) -> tuple[dict[str, float], float]:
    """Begin the attack, and leave it; returns the work that went on."""
    sent = [asyncio.create_task(attacker.ask(*request)) for _ in range(attack.at_once)]
    await asyncio.sleep(LEAVES_AFTER_S)
    await end(sent)
    return await processes.rest()


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def judged(result: dict[str, Any]) -> dict[str, Any]:
    alone, beside = result["alone"], result["beside"]
    longer = max(beside[x] - alone[x] for x in ("chat_worst_s", "response_worst_s"))
    result["waits_longer_s"] = round(longer, 2)
    result["met"] = {
        "wait": longer <= BOUND_WAIT_S,
        "memory": result["growth_mib"]["gateway"] <= BOUND_GATEWAY_MIB,
        "after": sum(result["cpu_after_leaving_s"].values()) <= BOUND_AFTER_S,
    }
    return result


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


async def store_chats(folder: Path, lines: list[str], key: str, number: int) -> None:
    """Fill a server's folder with stored chats of the attacker."""
    with stack_of(folder, lines, "fake") as stack:
        async with aiohttp.ClientSession() as http:
            tenant = Tenant(stack.url, key, http)
            _, answer = await tenant.ask("GET", "/v1/models")
            model = json.loads(answer)["data"][0]["id"]
            left = iter(range(number))

            async def some(session: str) -> None:
                for i in left:
                    asked = {
                        "model": model,
                        "messages": [{"role": "user", "content": f"chat {i}"}],
                        "max_tokens": 2,
                        "store": True,
                        "metadata": {"number": str(i), "colour": "red"},
                        "session_id": session,
                    }
                    status, answer = await tenant.post("/v1/chat/completions", asked)
                    assert status == 200, answer

            await asyncio.gather(*(some(f"filling {i}") for i in range(8)))


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    made = {name: generate_key(name) for name in ("attacker", "neighbour")}
    keys, lines = {x: key for x, (key, _) in made.items()}, [line for _, line in made.values()]
    wanted = args.only.split(",") if args.only else [x.name for x in ATTACKS]
    results = []
    for attack in ATTACKS:
        if attack.name not in wanted:
            continue
        with TemporaryDirectory(prefix="neighbours-") as own:
            if attack.needs_chats:
                await store_chats(Path(own), lines, keys["attacker"], args.chats)
            with stack_of(Path(own), lines, args.engine) as stack:
                result = await measure(attack, stack, keys, args.seconds)
        print(json.dumps(result), flush=True)
        results.append(result)
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Write the figures as a table of Markdown."""
    rows = [
        "| attack | two-token chat, worst: alone / beside | Responses: alone / beside"
        " | gateway, engine grow by | CPU after its client left: gateway, engine | rest after |",
        "|---|---|---|---|---|---|",
    ]
    for x in results:
        alone, beside, growth, cpu = (
            x["alone"],
            x["beside"],
            x["growth_mib"],
            x["cpu_after_leaving_s"],
        )
        rows.append(
            f"| {x['what']} | {alone['chat_worst_s']:.1f} / {beside['chat_worst_s']:.1f} s"
            f" | {alone['response_worst_s']:.1f} / {beside['response_worst_s']:.1f} s"
            f" | {growth['gateway']:.0f}, {growth['engine']:.0f} MiB"
            f" | {cpu['gateway']:.1f}, {cpu['engine']:.1f} s"
            f" | {x['rests_after_leaving_s']:.1f} s |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="names of attacks, with commas")
    parser.add_argument("--engine", choices=("mlx", "vllm"), default="mlx")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack, at most")
    parser.add_argument("--chats", type=int, default=60_000, help="stored, for the lists")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    results = asyncio.run(run(args))
    write_json(args.json, {"attacks": results})
    print(table(results))


if __name__ == "__main__":
    main()
