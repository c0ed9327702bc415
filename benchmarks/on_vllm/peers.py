"""Plain vLLM, LMCache and Thermocline with the same RAM and the same conversations.

    bash launch/install.sh && bash launch/install.sh vllm
    .venv/bin/python benchmarks/on_vllm/peers.py [--codecs tq3] [--json OUT]

The first run also makes an environment for LMCache (see ``lmcache_stack``). The systems run one
after another, with the same model and a pool for the same number of tokens; plain vLLM gets the RAM
that the others use as a cold tier on top of its pool. Prompts are token ids, equal for all.

The engine computes in float32, because most CPUs are several times faster at it, and because vLLM's
own prefix cache is exact then. Plain vLLM and LMCache keep KV in the engine's dtype. To compare
them as if it were bfloat16, as on a GPU, they get *twice* the RAM that Thermocline gets.

With each system:

1. ``--sessions`` conversations have a first turn each, more than any system can keep.
2. They come back with a short new message, newest first, which shows how many are kept. A session
   counts as restored if at least 95 % of its reusable tokens (those of its first turn in whole
   blocks of vLLM's) were not computed again, by the usage in vLLM's answer. After three sessions
   in a row that were not restored, all older ones count as lost.
3. The newest ``--in-turn`` sessions come back, the oldest of them first, as users who take turns
   would, in two laps; the second one counts. A system that can keep fewer has always just dropped
   the session that is next.
4. Quality: other conversations are pushed out of the pool by two more and come back. Plain vLLM
   has continued them greedily before, with nothing cached. Each of those tokens is predicted once,
   after all tokens before it (teacher forcing; vLLM gives log-probabilities of a prompt only
   without any cache, so every position is a request). ``top1`` is the share of positions whose most
   likely token is the reference's.

Thermocline's chunks are one block here, as LMCache's are, since sessions are short.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.program import arguments, write_json
from benchmarks.stacks.lmcache_stack import LMCACHE, LmcacheVllm, python_with_lmcache
from benchmarks.stacks.processes import gauges
from benchmarks.stacks.product_stack import MIB, Stack, prose
from benchmarks.stacks.vllm_stack import BYTES_PER_TOKEN, MODEL_NAME, PlainVllm, with_plugin
from engines.config import CPU_BLOCK_TOKENS
from launch.model.find import sample_model

CACHE = Path.home() / ".cache" / "thermocline"
WIDER = 2  # bytes of a float32 over those of a bfloat16
DTYPE: Final = "float32"
RESTORABLE = 0.95
GIVE_UP = 3  # sessions lost in a row, after which all older ones count as lost
SETTLE_S = 3.0  # for saves, which may continue after the answer
SPREAD = 0.2  # of the sessions' lengths around their mean, to both sides
WEIGHED = 3  # first sessions, whose cold bytes are measured before anything is evicted
LAPS = 2
LAG = 2  # sessions in between, which push one out of the pool
OPENING = "<|im_start|>user\n"
CLOSING = "<|im_end|>\n<|im_start|>assistant\n"
AGAIN = f"I see.<|im_end|>\n{OPENING}Please write a short story about all this.{CLOSING}"


@dataclass(frozen=True)
class Session:
    """A session's prompts: of its first turn, and of its return, which extends the first."""

    name: str
    first: list[int]
    again: list[int]

    @property
    def reusable(self) -> int:
        return len(self.first) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS


def sessions_of(kind: str, count: int, mean_tokens: int) -> list[Session]:
    tokenizer = Tokenizer.from_file(str(sample_model(CACHE) / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    rng = random.Random(kind)
    found = []
    for i in range(count):
        size = round(mean_tokens * rng.uniform(1 - SPREAD, 1 + SPREAD))
        opening, closing = ids(OPENING), ids(CLOSING)
        middle = ids(prose(f"{kind}{i}", 2 * size))[: size - len(opening) - len(closing)]
        first = [*opening, *middle, *closing]
        found.append(Session(f"{kind}{i}", first, [*first, *ids(AGAIN)]))
    return found


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    cached_tokens: int
    seconds: float  # of the whole answer; with one token, the time to first token


class Reader:
    """A client of text completions whose prompts are token ids."""

    def __init__(self, url: str, http: aiohttp.ClientSession, settle: Callable[[], None]) -> None:
        self._url = url
        self._http = http
        self._settle = settle

    async def turn(self, prompt: list[int], session: str) -> Answer:
        """Ask for one token, then wait until the system has settled."""
        answer = await self.ask(prompt, session)
        await asyncio.to_thread(self._settle)
        return answer

    async def ask(
        self, prompt: list[int], session: str = "", num_tokens: int = 1, **fields: Any
    ) -> Answer:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, **fields}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        headers = {"X-Session-ID": session} if session else {}
        start = asyncio.get_running_loop().time()
        url = f"{self._url}/v1/completions"
        async with self._http.post(url, json=body, headers=headers) as answer:
            found = await answer.json()
            assert answer.status == 200, found
        seconds = asyncio.get_running_loop().time() - start
        details = found["usage"].get("prompt_tokens_details") or {}
        ids = found["choices"][0]["token_ids"]
        return Answer(ids, details.get("cached_tokens") or 0, seconds)


@asynccontextmanager
async def reader_of(url: str, settle: Callable[[], None]) -> AsyncIterator[Reader]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        reader = Reader(url, http, settle)
        await reader.ask(list(range(100, 164)))  # warm-up
        yield reader


async def come_back(reader: Reader, sessions: Iterable[Session], give_up: int) -> list[Answer]:
    """Let sessions come back until ``give_up`` in a row are lost; return the restored answers."""
    restored: list[Answer] = []
    in_a_row = 0
    for session in sessions:
        answer = await reader.turn(session.again, session.name)
        kept = answer.cached_tokens >= RESTORABLE * session.reusable
        restored += [answer] if kept else []
        in_a_row = 0 if kept else in_a_row + 1
        print(f"  {session.name}: {answer.cached_tokens}/{session.reusable}", flush=True)
        if in_a_row == give_up:
            break
    return restored


@dataclass
class Reference:
    """The answers of plain vLLM when nothing is cached."""

    sessions: list[Session]
    num_tokens: int
    ids: dict[str, list[int]] = field(default_factory=dict)

    async def generate(self, reader: Reader) -> None:
        for session in self.sessions:
            salt = {"cache_salt": f"fresh {session.name}"}
            answer = await reader.ask(session.again, num_tokens=self.num_tokens, **salt)
            assert not answer.cached_tokens, answer
            self.ids[session.name] = answer.ids

    async def agreement(self, reader: Reader) -> float:
        """Return the share of positions with the reference's token, in sessions that returned.

        NaN if none was restored.
        """
        agreed = []
        for i, session in enumerate([*self.sessions, *([None] * LAG)]):
            if session is not None:
                await reader.turn(session.first, session.name)
            if i >= LAG:
                agreed += await self._probe(reader, self.sessions[i - LAG])
        return statistics.mean(agreed) if agreed else float("nan")

    async def _probe(self, reader: Reader, session: Session) -> list[bool]:
        back = await reader.turn(session.again, session.name)
        if back.cached_tokens < RESTORABLE * session.reusable:
            print(f"  {session.name} was lost and is left out", flush=True)
            return []
        ids = self.ids[session.name]
        agreed = [back.ids[0] == ids[0]]
        for k in range(1, len(ids)):
            answer = await reader.ask([*session.again, *ids[:k]], session.name)
            agreed.append(answer.ids[0] == ids[k])
        return agreed


async def first_turns(reader: Reader, sessions: list[Session]) -> list[Answer]:
    answers = [await reader.turn(x.first, x.name) for x in sessions]
    await asyncio.sleep(SETTLE_S)
    return answers


async def measure(
    peer: Peer, system: Any, sessions: list[Session], num_in_turn: int, reference: Reference
) -> dict[str, Any]:
    print(peer.name, flush=True)
    async with reader_of(system.url, partial(peer.settle, system)) as reader:
        if not reference.ids:
            await reference.generate(reader)
        await asyncio.sleep(SETTLE_S)
        before = peer.cold_bytes(system)
        firsts = await first_turns(reader, sessions[:WEIGHED])
        weight = peer.cold_bytes(system) - before
        firsts += await first_turns(reader, sessions[WEIGHED:])
        back = await come_back(reader, reversed(sessions), GIVE_UP)
        for _ in range(LAPS):
            in_turn = await come_back(reader, sessions[-num_in_turn:], num_in_turn)
        top1 = await reference.agreement(reader)
    p50, p95 = np.percentile([x.seconds for x in back], (50, 95)).round(3).tolist()
    weighed = sum(x.reusable for x in sessions[:WEIGHED])
    return {
        "system": peer.name,
        "restorable": len(back),
        "restored_tokens": sum(x.cached_tokens for x in back),
        "in_turn": len(in_turn),
        "ttft_p50_s": p50,
        "ttft_p95_s": p95,
        "first_ttft_p50_s": round(statistics.median(x.seconds for x in firsts), 3),
        # In the cold tier; systems that do not pack count as if they kept bfloat16.
        "bytes_per_token": round(weight / weighed) if weight else BYTES_PER_TOKEN // WIDER,
        "top1": round(top1, 4),
    }


@dataclass(frozen=True)
class Peer:
    """A system that is compared: how to start it and to read its state."""

    name: str
    start: AbstractContextManager[Any]
    cold_bytes: Callable[[Any], float]  # returns the bytes in its cold tier
    settle: Callable[[Any], None] = lambda _: None  # waits until it has stored and evicted


def peers(args: argparse.Namespace, pool_bytes: int, max_context: int) -> list[Peer]:
    ram_bytes = args.ram_mib * MIB
    lmcache = python_with_lmcache(CACHE / "lmcache")
    wide_bytes = WIDER * ram_bytes
    plain = PlainVllm(pool_bytes + wide_bytes, max_context, dtype=DTYPE)
    headroom = max_context * BYTES_PER_TOKEN
    theirs = LmcacheVllm(lmcache, wide_bytes, headroom, pool_bytes, max_context, DTYPE)
    ours = [with_plugin(pool_bytes, codec, ram_bytes, max_context, DTYPE) for codec in args.codecs]
    return [
        Peer("plain vLLM", plain, lambda _: 0.0),
        Peer(LMCACHE, theirs, lambda x: x.ram_used / WIDER, LmcacheVllm.settle),
        *(
            Peer(f"Thermocline {codec}", stack, ram_tier_bytes)
            for codec, stack in zip(args.codecs, ours, strict=True)
        ),
    ]


def ram_tier_bytes(stack: Stack) -> float:
    return gauges(stack, 'thermocline_tier_bytes{tier="ram"} ')


def compare(args: argparse.Namespace) -> dict[str, Any]:
    sessions = sessions_of("s", args.sessions, args.tokens)
    reference = Reference(sessions_of("q", args.probed, args.tokens), args.positions)
    longest = max(len(x.again) for x in itertools.chain(sessions, reference.sessions))
    max_context = longest + args.positions + CPU_BLOCK_TOKENS
    pool_bytes = max(int(args.pool_for * args.tokens), max_context + 2 * CPU_BLOCK_TOKENS)
    pool_bytes *= BYTES_PER_TOKEN
    rows = []
    for peer in peers(args, pool_bytes, max_context):
        with peer.start as system:
            rows.append(asyncio.run(measure(peer, system, sessions, args.in_turn, reference)))
        print(rows[-1], flush=True)
    return {
        **vars(args),
        "pool_mib": round(pool_bytes / MIB, 1),
        "dtype": DTYPE,
        "rows": rows,
        "sessions_over_lmcache": [x["restorable"] / rows[1]["restorable"] for x in rows],
    }


def main() -> None:
    args = arguments(
        __doc__,
        "--sessions 24 --tokens 480 --in-turn 12 --ram-mib 48 --pool-for 2.0"
        " --codecs tq3 ... --probed 6 --positions 24",
    )
    write_json(args.json, compare(args))


if __name__ == "__main__":
    main()
