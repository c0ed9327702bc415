"""Traffic of chats and agents, for ``benchmarks/eviction.py``; all of it is made up.

A trace is a list of turns. A turn names its chain as (stream, units) pairs: a stream is a row of
chunks that only ever grows at its end (a shared tools prompt, one session's own text), and
``units`` is how much of it the turn holds when it ends. One unit is ``unit`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One turn of a session."""

    at_s: float
    tenant: str
    chain: list[tuple[int, int]]  # (stream, units held when the turn ends)


@dataclass
class Trace:
    """Turns in the order of their times."""

    name: str
    unit: int  # tokens
    turns: list[Turn] = field(default_factory=list)
    num_streams: int = 0

    def stream(self) -> int:
        """Begin a stream."""
        self.num_streams += 1
        return self.num_streams - 1

    def units(self, tokens: float) -> int:
        """Return the units of so many tokens."""
        return max(1, int(tokens // self.unit))

    def add(self, at_s: float, tenant: str, *chain: tuple[int, int]) -> None:
        """Add a turn."""
        self.turns.append(Turn(at_s, tenant, list(chain)))

    def done(self) -> Trace:
        """Sort the turns."""
        self.turns.sort(key=lambda turn: turn.at_s)
        return self

    def working_set(self) -> int:
        """Return the most units that are worth keeping at one time: an oracle needs no more."""
        last = {stream: i for i, turn in enumerate(self.turns) for stream, _ in turn.chain}
        held: dict[int, int] = {}
        now = peak = 0
        for i, turn in enumerate(self.turns):
            for stream, units in turn.chain:
                now += max(0, units - held.get(stream, 0))
                held[stream] = max(units, held.get(stream, 0))
            now -= sum(held.pop(stream) for stream, _ in turn.chain if last[stream] == i)
            peak = max(peak, now)
        return peak


def in_turn(num_sessions: int, tokens: int = 4096, rounds: int = 12) -> Trace:
    """Equal sessions, one after the other, again and again: the worst case of order of use."""
    trace = Trace(f"{num_sessions} in turn", 32)
    streams = [trace.stream() for _ in range(num_sessions)]
    for i in range(rounds * num_sessions):
        trace.add(float(i), "a", (streams[i % num_sessions], trace.units(tokens)))
    return trace


def zipf(seed: int = 1) -> Trace:
    """200 sessions, some used far more often than others; each grows a little with every turn."""
    rng = np.random.default_rng(seed)
    trace = Trace("zipf 200", 128)
    streams = [trace.stream() for _ in range(200)]
    tokens = np.full(200, 4000.0)
    share = 1 / np.arange(1, 201) ** 0.9
    at = np.cumsum(rng.exponential(2.0, 5000))
    for t, s in zip(at, rng.choice(200, 5000, p=share / share.sum()), strict=True):
        tokens[s] += 60
        trace.add(float(t), f"t{s % 5}", (streams[s], trace.units(tokens[s])))
    return trace.done()


class Agents(NamedTuple):
    """A kind of agent: tokens at first and at last, and how it works."""

    num_sessions: int = 70
    num_turns: float = 43
    start: float = 16_000
    end: float = 142_000
    spread: float = 0.35
    subagents: float = 0.44
    think: float = 0.12
    every_s: float = 150.0


def agents(
    seed: int = 3, kind: Agents | None = None, unit: int = 1024, name: str = "agents 43 turns"
) -> Trace:
    """Coding agents: long sessions, tool pauses, people's thinking, subagents; all end for ever."""
    kind = kind or Agents()
    rng = np.random.default_rng(seed)
    trace = Trace(name, unit)
    tools, sub_tools = trace.stream(), trace.stream()
    tools_units, sub_units = trace.units(12_000), trace.units(6_000)
    began = np.cumsum(rng.exponential(kind.every_s, kind.num_sessions))
    for s, t in enumerate(began):
        own = trace.stream()
        turns = max(4, int(rng.lognormal(np.log(kind.num_turns), kind.spread)))
        grow = rng.dirichlet(np.full(turns, 1.5)) * (kind.end - kind.start) * turns / kind.num_turns
        tokens = kind.start - 12_000 + np.cumsum(grow)
        sub_at = rng.integers(2, turns) if rng.random() < kind.subagents else -1
        for i in range(turns):
            trace.add(t, f"t{s % 6}", (tools, tools_units), (own, trace.units(tokens[i])))
            if i == sub_at:
                sub, size = trace.stream(), 2_000.0
                for _ in range(int(rng.integers(6, 16))):
                    t += rng.uniform(5, 30)
                    size += rng.uniform(500, 4000)
                    trace.add(t, f"t{s % 6}", (sub_tools, sub_units), (sub, trace.units(size)))
            thinks = rng.random() < kind.think
            t += rng.lognormal(np.log(120), 1.2) if thinks else rng.uniform(5, 60)
    return trace.done()


def codex(seed: int = 8) -> Trace:
    """Codex on SWE-bench Pro, by its published figures: 33 calls, 12.4K to 84.5K, P90 130K."""
    kind = Agents(80, 31, 12_367, 84_482, 0.42, 0.0, 0.0, 90.0)
    return agents(seed, kind, name="codex swe-bench")


def web_chats(seed: int = 4) -> Trace:
    """A web page's chats: 5.4K of shared tools, 4 short turns, titles and tags in between."""
    rng = np.random.default_rng(seed)
    trace = Trace("web chats", 64)
    tools = trace.stream()
    t = 0.0
    for s in range(320):
        t += rng.exponential(12.0)
        own, tokens, at = trace.stream(), 0.0, t
        for i in range(max(1, int(rng.poisson(4)))):
            tokens += rng.lognormal(np.log(500), 0.6)
            tenant = f"t{s % 8}"
            trace.add(at, tenant, (tools, trace.units(5400)), (own, trace.units(tokens)))
            for _ in range(2 if i == 0 else 1):  # title and tags, then follow-up questions
                trace.add(at + 1, tenant, (trace.stream(), trace.units(500 + tokens)))
            at += rng.lognormal(np.log(70), 1.0)
    return trace.done()


def flood(seed: int = 5) -> Trace:
    """Ten steady sessions beside a tenant whose prompts of 8K tokens never come back."""
    rng = np.random.default_rng(seed)
    trace = Trace("flood", 256)
    for s in range(10):
        own, tokens, t = trace.stream(), 8000.0, rng.uniform(0, 40)
        while t < 2400:
            tokens += rng.uniform(50, 400)
            trace.add(t, f"steady{s}", (own, trace.units(tokens)))
            t += rng.lognormal(np.log(40), 0.5)
    for at in np.arange(120, 2400, 2.0):
        trace.add(float(at), "flood", (trace.stream(), trace.units(8000)))
    return trace.done()


def day(seed: int = 6) -> Trace:
    """One set of sessions in the morning, another at noon; a few of the first go on."""
    rng = np.random.default_rng(seed)
    trace = Trace("morning, noon", 128)
    for begin, end, num, stay in ((0, 3600, 40, 0.2), (3600, 7200, 40, 0.0)):
        for s in range(num):
            own, tokens, t = trace.stream(), 5000.0, begin + rng.uniform(0, 300)
            until = 7200 if rng.random() < stay else end
            while t < until:
                tokens += rng.lognormal(np.log(250), 0.6)
                trace.add(t, f"t{s % 8}", (own, trace.units(tokens)))
                t += rng.lognormal(np.log(150), 0.8)
    return trace.done()


def sizes(seed: int = 7) -> Trace:
    """Sessions of 300 to 140,000 tokens, some used more often than others."""
    rng = np.random.default_rng(seed)
    trace = Trace("sizes 300..140K", 256)
    streams = [trace.stream() for _ in range(150)]
    tokens = np.exp(rng.uniform(np.log(300), np.log(140_000), 150))
    share = rng.permutation(1 / np.arange(1, 151) ** 0.7)
    at = np.cumsum(rng.exponential(3.0, 3000))
    for t, s in zip(at, rng.choice(150, 3000, p=share / share.sum()), strict=True):
        tokens[s] = min(140_000, tokens[s] * 1.01 + 30)
        trace.add(float(t), f"t{s % 7}", (streams[s], trace.units(tokens[s])))
    return trace.done()


def cloud_chats(seed: int = 9) -> Trace:
    """A cloud's chats, by its published figures: 80 % of reuses within 10 minutes."""
    rng = np.random.default_rng(seed)
    trace = Trace("cloud chats", 256)
    prompts = [trace.stream() for _ in range(40)]
    prompt_units = [trace.units(x) for x in rng.lognormal(np.log(1200), 0.7, 40)]
    share = 1 / np.arange(1, 41) ** 1.1
    t = 0.0
    for s in range(1500):
        t += rng.exponential(4.0)
        p = int(rng.choice(40, p=share / share.sum()))
        own, tokens, at = trace.stream(), 0.0, t
        for _ in range(int(rng.geometric(0.45))):
            tokens += rng.lognormal(np.log(1600), 0.9)
            trace.add(at, f"t{s % 9}", (prompts[p], prompt_units[p]), (own, trace.units(tokens)))
            at += rng.lognormal(np.log(160), 1.5)
    return trace.done()


def cloud_api(seed: int = 10) -> Trace:
    """A cloud's API traffic: single requests that share a long instruction."""
    rng = np.random.default_rng(seed)
    trace = Trace("cloud api", 256)
    prompts = [trace.stream() for _ in range(120)]
    prompt_units = [trace.units(x) for x in rng.lognormal(np.log(3000), 0.8, 120)]
    share = 1 / np.arange(1, 121) ** 1.0
    for t in np.cumsum(rng.exponential(0.5, 6000)):
        p = int(rng.choice(120, p=share / share.sum()))
        own = (trace.stream(), trace.units(rng.lognormal(np.log(900), 0.8)))
        trace.add(float(t), f"t{p % 9}", (prompts[p], prompt_units[p]), own)
    return trace.done()


def mixed(seed: int = 11) -> Trace:
    """Agents, web chats and a nightly loop over documents on one box."""
    trace = agents(seed, Agents(num_sessions=25, every_s=300.0), 512, "all at once")
    rng = np.random.default_rng(seed)
    for t in np.arange(0, 6000, 15.0):
        own, tokens, at = trace.stream(), 3000.0, float(t)
        for _ in range(int(rng.geometric(0.3))):
            tokens += rng.lognormal(np.log(500), 0.6)
            trace.add(at, "web", (own, trace.units(tokens)))
            at += rng.lognormal(np.log(70), 1.0)
    docs = [trace.stream() for _ in range(12)]
    for i, t in enumerate(np.arange(500, 6000, 10.0)):
        trace.add(float(t), "docs", (docs[i % 12], trace.units(20_000)))
    return trace.done()


TRACES = (zipf, agents, web_chats, flood, day, sizes, codex, cloud_chats, cloud_api, mixed)
