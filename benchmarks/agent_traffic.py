"""Long agents' sessions: the cost of a turn beyond the model, and how many sessions come back.

    python -m benchmarks.agent_traffic turns                   a turn of some 14 tokens, by length
    python -m benchmarks.agent_traffic turns --engine vllm --lengths 10000 145000
    python -m benchmarks.agent_traffic traffic --profile agentx --sessions 20 --hot-for 3
    python -m benchmarks.agent_traffic traffic --runs cold kill none
    python -m benchmarks.agent_traffic traffic --engine vllm --runs cold plain lmcache
    python -m benchmarks.agent_traffic together --sessions 8   chats that begin alike, at once

Runs: in ``cold`` sessions sleep; in ``kill`` the engine is also killed half-way; in ``none`` no
session sleeps. ``plain`` is vLLM alone, and ``lmcache`` vLLM with LMCache, in as much memory as
ours with its RAM tier. What they compute depends on how requests are batched, so their answers are
not compared.

The model has one layer with one head, random weights and the sample model's tokenizer, so that the
cost of bookkeeping is measured. Processor time is that of all processes, saves included; ``turns``
leaves out the engine's thread on which mlx computes, or vLLM's worker. Sessions are stored exactly
(``raw``). Answers are compared with those of a run in which no session sleeps and requests come one
after another; a session is wrong if one answer differs.
``turns`` on mlx draws docs/pictures/agent-turns.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import numpy as np
import psutil
from matplotlib.figure import Figure
from mlx_lm.utils import load

from benchmarks.program import options_of
from benchmarks.stacks.light_model import light_model
from benchmarks.stacks.lmcache_stack import LmcacheVllm, python_with_lmcache
from benchmarks.stacks.processes import cpu_s, rss_mib, tree
from benchmarks.stacks.product_stack import Client, Reply, Stack, client_of
from benchmarks.stacks.product_stack import words_of as prose
from benchmarks.stacks.vllm_stack import START_S, PlainVllm, python_with_vllm, with_plugin
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

ONE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
LIGHT: Final = {**dict.fromkeys(ONE, 1), "max_position_embeddings": 1 << 18}
TOKEN_BYTES: Final = 2 * 64 * 4  # of live KV, of one head of 64 values
LENGTHS: Final = (10_000, 40_000, 80_000, 145_000)
PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "agent-turns.png"
PEERS: Final = ("plain", "lmcache")
TASKS: Final = ("Suggest a title for", "Name three tags of", "Suggest follow-up questions to")


class Profile(NamedTuple):
    turns: int
    head: int  # tokens of system text and tools, which all sessions share
    last: int  # tokens at the end
    answer: int
    subagents: float = 0.0  # share of sessions that have one, of a quarter of the turns
    tasks: int = 0  # helpers' prompts after the first turn


PROFILES: Final = {
    "swe": Profile(30, 6_000, 80_000, 19),
    "agentx": Profile(43, 12_000, 142_000, 10, subagents=0.44),
    "webui": Profile(4, 5_400, 6_200, 24, tasks=3),
}


@dataclass
class Run:
    """The turns of all sessions, with their totals."""

    client: Client
    profile: Profile
    scale: int  # divides all lengths
    think_s: float
    answers: dict[tuple[str, int], str] = field(default_factory=dict)
    ttfts: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # Tokens of prompts that the session's last turn left; of a first turn the shared head.
    reusable_tokens: int = 0
    has_head: bool = False  # some session has begun
    computed_again: Counter[str] = field(default_factory=Counter)  # reusable tokens, by reason
    asked_again: int = 0

    async def ask(self, name: str, turn: int, messages: list[dict[str, str]], known: int) -> Reply:
        """Send a turn until it is answered, as clients do; add it to the totals."""
        reply = Reply(0)
        while not reply.ok:
            try:
                reply = await self.client.chat(messages, name, self.profile.answer)
            except aiohttp.ClientError:
                reply = Reply(0)
            if not reply.ok:
                assert reply.status in (0, 200, 429) or reply.status >= 500, reply
                self.asked_again += 1
                await asyncio.sleep(1.0)
        self.ttfts.append(reply.ttft_s)
        self.prompt_tokens += reply.prompt_tokens
        self.cached_tokens += reply.cached_tokens
        reusable = min(known, reply.prompt_tokens - 1)
        self.reusable_tokens += reusable
        if (lost := reusable - reply.cached_tokens) > 64:  # more than the rest of a chunk
            self.computed_again[reply.cache.partition("reason=")[2]] += lost
        self.answers[name, turn] = reply.text
        return reply

    async def ask_task(self, name: str, number: int, text: str) -> None:
        """Send a helper's prompt, as Open WebUI does for a title; no token counts as reusable."""
        body = {"model": self.client.model, "max_tokens": self.profile.answer, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": text}]}
        answer: dict[str, Any] = {}
        while "choices" not in answer:
            answer = await self.client.post("/v1/chat/completions", body)
            if "choices" not in answer:
                self.asked_again += 1
                await asyncio.sleep(1.0)
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        self.cached_tokens += details.get("cached_tokens", 0)
        self.answers[f"{name} task", number] = answer["choices"][0]["message"]["content"]

    async def session(self, name: str, turns: int, has_child: bool = False) -> None:
        """Take all turns of one session, with its subagent and its helpers' prompts."""
        rng, profile = random.Random(name), self.profile
        known, self.has_head = int(self.has_head) * profile.head // self.scale, True
        pauses = random.Random(f"{name} pauses")  # apart: texts must not depend on it
        each = (profile.last - profile.head) / profile.turns - profile.answer
        messages = [{"role": "system", "content": prose("head", profile.head / self.scale)}]
        for turn in range(turns):
            text = prose(f"{name} {turn}", each * rng.uniform(0.5, 1.5) / self.scale)
            messages.append({"role": "user", "content": text})
            reply = await self.ask(name, turn, messages, known)
            known = reply.prompt_tokens + reply.completion_tokens
            messages.append({"role": "assistant", "content": reply.text})
            for number, task in enumerate(TASKS[: 0 if turn else profile.tasks], 1):
                text = f"{messages[1]['content']}\n{reply.text}"
                text = f"### Task:\n{task} it.\n<chat_history>\n{text}\n</chat_history>"
                await self.ask_task(name, number, text)
            if has_child and turn == turns // 3:
                await self.session(f"{name} sub", turns // 4)
            await asyncio.sleep(pauses.expovariate(1 / self.think_s) if self.think_s else 0.0)


@contextmanager
def light() -> Iterator[Path]:
    """Yield the folder of a model of one layer with one head."""
    with tempfile.TemporaryDirectory() as folder:
        yield light_model(sample_model(default_cache_dir(os.environ)), Path(folder), **LIGHT)


def stack_of(model: Path, hot_bytes: int, sleeps: bool, kind: str = "mlx") -> Stack:
    """Return the product, not started yet."""
    ram, disk = (hot_bytes, 16 << 30) if sleeps else (0, 0)
    engine: dict[str, Any] = {"kind": kind, "model": str(model), "hot_bytes": hot_bytes}
    if kind == "vllm":
        engine |= {"vllm.python": python_with_vllm(), "dtype": "float32"}
    settings: dict[str, dict[str, Any]] = {
        "engine": engine,
        "store": {"codec": "raw", "ram_bytes": ram, "disk_bytes": disk},
        "scheduler": {"idle_after_s": 3600.0},
    }
    return Stack(settings, start_timeout_s=START_S)


def peer_of(name: str, model: Path, hot_bytes: int) -> PlainVllm | LmcacheVllm:
    """Return plain vLLM, or vLLM with LMCache, not started yet, with our ``hot_bytes``."""
    as_fits = 0  # a request may have as many tokens as the model and vLLM's memory hold
    if name == "plain":
        return PlainVllm(2 * hot_bytes, as_fits, model_path=str(model))
    python, spare = python_with_lmcache(default_cache_dir(os.environ) / "lmcache"), hot_bytes // 4
    return LmcacheVllm(python, hot_bytes, spare, hot_bytes, as_fits, "float32", str(model))


class Processes:
    """The processes of a server: the gateway, if there is one, and the engine."""

    def __init__(self, server: Stack | PlainVllm | LmcacheVllm) -> None:
        self._gateways: list[psutil.Process] = []
        if isinstance(server, Stack):
            self._gateways, self._engine = [server.gateway], server.engine
        else:
            self._engine = (server.vllm if isinstance(server, LmcacheVllm) else server).process

    def cpu_ms(self) -> np.ndarray:
        """Return the processor time of the gateway and of the engine, in ms, children included."""
        return 1000 * np.array([cpu_s(self._gateways), cpu_s(tree(self._engine))])

    def figures(self) -> dict[str, float]:
        """Return the memory of gateway and engine in MiB, and the data that the engine wrote."""
        engines = tree(self._engine)
        written = sum(x.io_counters().write_chars for x in engines) / 1024
        memory = {"gateway_mib": rss_mib(*self._gateways), "engine_mib": rss_mib(*engines)}
        return {**memory, "written_kib": float(written)}


async def traffic(args: argparse.Namespace, kind: str) -> tuple[Run, dict[str, float]]:
    undisturbed = kind == "undisturbed"
    profile, scale = PROFILES[args.profile], args.scale
    each = int(profile.last * 1.2 / scale) * TOKEN_BYTES
    hot = max(each * (3 * args.sessions if undisturbed else args.hot_for + 1), 16 << 20)
    with light() as model:
        server: Stack | PlainVllm | LmcacheVllm
        if kind in PEERS:
            server = peer_of(kind, model, hot)
        else:
            server = stack_of(model, hot, kind in ("cold", "kill"), args.engine)
        with server:
            async with client_of(server) as client:
                run = Run(client, profile, scale, 0.0 if undisturbed else args.think_s)
                return run, await _measured(args, server, run, kind)


async def _measured(
    args: argparse.Namespace, server: Stack | PlainVllm | LmcacheVllm, run: Run, kind: str
) -> dict[str, float]:
    profile, processes = run.profile, Processes(server)
    before, names = processes.cpu_ms(), [f"s{i}" for i in range(args.sessions)]
    rng = random.Random(args.sessions)
    parents = set(rng.sample(names, round(profile.subagents * len(names))))
    sessions = [run.session(x, profile.turns, x in parents) for x in names]
    if kind == "undisturbed":
        for session in sessions:
            await session
    elif kind == "kill" and isinstance(server, Stack):
        await asyncio.gather(*sessions, kill_half_way(server, run, args.sessions))
    else:
        await asyncio.gather(*sessions)
    count = len(run.ttfts)
    figures = {
        "turns": count,
        "ttft_p50_s": np.percentile(run.ttfts, 50),
        "ttft_p95_s": np.percentile(run.ttfts, 95),
        "not_computed": run.cached_tokens / run.prompt_tokens,
        "of_reusable": run.cached_tokens / max(1, run.reusable_tokens),
        "asked_again": run.asked_again,
    }
    if kind != "kill":  # a killed engine's own figures are lost
        cpu, found = processes.cpu_ms() - before, processes.figures()
        figures |= {"gateway_ms_a_turn": cpu[0] / count, "engine_ms_a_turn": cpu[1] / count}
        figures |= {"written_kib_a_turn": found.pop("written_kib") / count, **found}
    return {key: round(float(value), 4) for key, value in figures.items()}


async def kill_half_way(stack: Stack, run: Run, num_sessions: int) -> None:
    while len(run.ttfts) < num_sessions * run.profile.turns // 2:
        await asyncio.sleep(0.2)
    await asyncio.to_thread(stack.kill_engine)


async def together(args: argparse.Namespace) -> None:
    """Compare chats with one new beginning that come at once with one chat alone."""

    async def ask(client: Client, beginning: str, name: str, length: int = args.shared) -> Reply:
        system = {"role": "system", "content": prose(beginning, length)}
        user = {"role": "user", "content": prose(name, 24)}
        reply = await client.chat([system, user], name, max_tokens=2)
        assert reply.ok, reply
        return reply

    if args.engine == "vllm":
        stack = with_plugin(4 << 30, max_context=args.shared + 1024)
    else:
        model = str(sample_model(default_cache_dir(os.environ)))
        engine = {"kind": "mlx", "model": model, "hot_bytes": 6 << 30}
        stack = Stack({"engine": engine, "scheduler": {"idle_after_s": 3600.0}})
    with stack:
        async with client_of(stack) as client:
            await ask(client, "first", "first", 200)
            for number in range(args.rounds):
                alone = await ask(client, f"alone {number}", f"alone{number}")
                names = [f"r{number}-{i}" for i in range(args.sessions)]
                found = await asyncio.gather(*(ask(client, f"all {number}", x) for x in names))
                computed = sum(x.prompt_tokens - x.cached_tokens for x in found)
                p95 = float(np.percentile([x.ttft_s for x in found], 95))
                row = {"prompt": alone.prompt_tokens, "alone_s": alone.ttft_s, "p95_s": p95}
                row |= {"of_alone": p95 / alone.ttft_s, "computed": computed / alone.prompt_tokens}
                print(json.dumps({key: round(x, 3) for key, x in row.items()}), flush=True)


async def compared(args: argparse.Namespace) -> None:
    expected = (await traffic(args, "undisturbed"))[0] if args.engine == "mlx" else None
    for kind in args.runs:
        run, figures = await traffic(args, kind)
        row = {"run": kind, **figures, "computed_again": dict(run.computed_again)}
        if expected is not None and kind not in PEERS:
            answers = expected.answers
            assert answers.keys() == run.answers.keys()
            row["wrong"] = sorted({x[0] for x in answers if run.answers[x] != answers[x]})
        print(json.dumps(row), flush=True)


def thread_ns(*processes: psutil.Process) -> Counter[str]:
    """Return the processor time of each thread in ns, as Linux counts it, by the thread's id."""
    found = Counter[str]()
    for folder in (x for y in processes for x in Path(f"/proc/{y.pid}/task").iterdir()):
        with suppress(OSError):  # it ended meanwhile
            found[folder.name] = int((folder / "schedstat").read_text().split()[0])
    return found


async def turns(args: argparse.Namespace) -> None:
    """Measure turns of all lengths in alternation, since the machine's load changes meanwhile."""
    chats, sleeps = [_Turns(x) for x in args.lengths], "cold" in args.runs
    with light() as model, stack_of(model, 4 << 30, sleeps, args.engine) as stack:
        async with client_of(stack) as client:
            for chat in chats * (2 * args.rounds):
                await chat.go_on(stack, client)
        encode = load(str(model))[1].encode
        rows = [chat.row(encode) for chat in chats]
    for row in rows:
        print(json.dumps(row))
    if args.engine == "mlx":
        draw(rows)


class _Turns:
    """A conversation of one length, whose session sleeps before every second turn."""

    def __init__(self, length: int) -> None:
        self._name = f"t{length}"
        self._messages = [{"role": "user", "content": prose(length, length)}]
        self._num_turns = 0
        self._spent = list[list[tuple[float, float, float]]]([[], []])  # hot, slept
        self._computing = ""  # the engine's thread on which mlx computes
        self._figures = dict[str, float]()

    async def go_on(self, stack: Stack, client: Client) -> None:
        slept = self._num_turns % 2
        if slept:
            await client.until(self._name, "idle")
            await client.sleep(self._name)
            await asyncio.sleep(0.5)
        children = stack.engine.children(recursive=True)
        engines = stack.engine, *(x for x in children if "VLLM::Worker" not in x.cmdline())
        before = thread_ns(stack.gateway), thread_ns(*engines)
        reply = await client.chat(self._messages, self._name, max_tokens=2)
        await asyncio.sleep(1.0)  # it is saved meanwhile
        gateway = thread_ns(stack.gateway) - before[0]
        engine = thread_ns(*engines) - before[1]
        if not slept:
            self._computing = "" if engines[1:] else engine.most_common(1)[0][0]
            num_new = reply.prompt_tokens - reply.cached_tokens
            self._figures = {"tokens": reply.prompt_tokens, "new": num_new}
        own = engine.total() - engine[self._computing]
        self._spent[slept].append((gateway.total() / 1e6, own / 1e6, 1000 * reply.ttft_s))
        self._messages.append({"role": "assistant", "content": reply.text})
        self._messages.append({"role": "user", "content": f"And {self._num_turns}?"})
        self._num_turns += 1

    def row(self, encode: Callable[[str], object]) -> dict[str, float]:
        row, times = self._figures, []
        for _ in range(3):
            began = time.process_time()
            encode("".join(x["content"] for x in self._messages))
            times.append(1000 * (time.process_time() - began))
        row["encoding_ms"] = min(times)
        hot, slept = self._spent
        for kind, found in (("", hot[1:]), ("slept_", slept)):
            gateway_ms, engine_ms, ttft_ms = np.median(found, axis=0)
            row |= {f"{kind}gateway_ms": gateway_ms, f"{kind}engine_ms": engine_ms}
            row |= {f"{kind}ttft_ms": ttft_ms, f"{kind}ms": gateway_ms + engine_ms}
        return {key: round(float(value), 1) for key, value in row.items()}


def draw(rows: list[dict[str, float]]) -> None:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes, places = figure.subplots(), [x["tokens"] / 1000 for x in rows]
    axes.plot(places, [x["encoding_ms"] for x in rows], "o-", label="encoding the prompt once")
    axes.plot(places, [x["ms"] for x in rows], "o-", label="a turn, beyond the model")
    axes.set(xlabel="thousand tokens of context", ylabel="processor time, ms", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(PICTURE, dpi=120, facecolor="white")


def main() -> None:
    options = options_of(
        __doc__,
        "--engine mlx|vllm --shared 4000 --profile agentx|swe|webui"
        " --sessions 20 --hot-for 3 --think-s 2.0 --scale 1 --rounds 6"
        f" --runs cold ... --lengths {' '.join(map(str, LENGTHS))}",
    )
    options.add_argument("what", choices=["turns", "traffic", "together"])
    args = options.parse_args()
    asyncio.run({"turns": turns, "together": together, "traffic": compared}[args.what](args))


if __name__ == "__main__":
    main()
