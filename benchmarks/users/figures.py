"""Plays a workload against a server; sums up its times by phase and by the source of KV."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import numpy as np

from benchmarks.stacks.product_stack import prose
from benchmarks.users.workload import Conversation, Phase, Step, Workload
from launch.errors import LaunchError
from launch.remote.server import Address
from launch.remote.turn import MISS, Message, RemoteTurn, take_turn

HOPELESS: Final = 8  # if so many first requests all fail, the run ends
NEW: Final = "new"  # first turns, which have nothing to reuse
LOST: Final = "miss"  # returns of which nothing was reused
MOST_ERRORS: Final = 20  # different errors that are reported
ORDER: Final = ("hot", "cold-ram", "cold-disk", "cold-redis", "cached", NEW, LOST)


class Target(NamedTuple):
    """A server that is measured."""

    address: Address
    model: str = ""  # "" = the first that it lists
    timeout_s: float = 600.0  # of one request


class Result(msgspec.Struct):
    """One request of the run; the text of ``turn`` was removed."""

    phase: str
    user: int
    conversation: str
    step: int  # 0 = the first of its conversation
    expected_error: bool
    started_s: float  # since the run began
    turn: RemoteTurn

    @property
    def ok(self) -> bool:
        return 400 <= self.turn.status < 500 if self.expected_error else self.turn.ok

    @property
    def source(self) -> str:
        """The source of the turn's KV; a miss is ``NEW`` at a first turn, else ``LOST``."""
        lost = LOST if self.step else NEW
        return lost if self.turn.source == MISS else self.turn.source


class Hopeless(LaunchError):
    """All first requests failed; the message has the server's message."""


class Run:
    """One run of a workload. ``results`` grows while it runs."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        on_result: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.model = target.model
        self.results: list[Result] = []
        self.walls: dict[str, float] = {}  # seconds that each phase took, so far
        self.target = target
        self.workload = workload
        self._on_result = on_result
        self._tag = f"{time.time_ns():x}"  # sessions of two runs are never the same
        self._began = time.perf_counter()

    async def play(self, http: aiohttp.ClientSession) -> None:
        """Play all phases. Raises ``LaunchError`` with the reason if the server cannot be used."""
        self.model = await self.target.address.model(http, self.target.model)
        self._began = time.perf_counter()
        for phase in self.workload.phases:
            began = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    for number, talks in enumerate(phase.users):
                        group.create_task(self._user(http, phase, number, talks))
            except* Hopeless as errors:
                raise errors.exceptions[0] from None
            finally:
                self.walls[phase.name] = time.perf_counter() - began

    async def _user(
        self, http: aiohttp.ClientSession, phase: Phase, number: int, talks: Sequence[Conversation]
    ) -> None:
        for talk in talks:
            messages: list[Message] = []
            if talk.system:
                messages.append({"role": "system", "content": talk.system})
            for index, step in enumerate(talk.steps):
                await asyncio.sleep(step.think_s)
                started = time.perf_counter() - self._began
                turn = await self._turn(http, talk.name, index, step, messages)
                wrong = bool(step.wrong)
                result = Result(phase.name, number, talk.name, index, wrong, started, turn)
                self.results.append(result)
                self._on_result(phase.name)
                self._check_hope()
                if not result.ok:  # without its answer the conversation cannot continue
                    break

    async def _turn(
        self,
        http: aiohttp.ClientSession,
        talk: str,
        index: int,
        step: Step,
        messages: list[Message],
    ) -> RemoteTurn:
        name = f"bench-{self._tag}-{talk}"
        messages.append({"role": "user", "content": prose(f"{name} {index}", step.words)})
        turn = await take_turn(
            http,
            self.target.address,
            self.model,
            messages,
            session=name,
            max_tokens=step.answer_tokens,
            fields={"temperature": 0.0, **_MISTAKES.get(step.wrong, {})},
            timeout_s=self.target.timeout_s,
        )
        messages.append({"role": "assistant", "content": turn.text})
        turn.text = ""
        return turn

    def _check_hope(self) -> None:
        if len(self.results) == HOPELESS and not any(x.ok for x in self.results):
            first = self.results[0].turn
            status = f" ({first.status})" if first.status else ""
            raise Hopeless(f"the first {HOPELESS} requests all failed{status}: {first.error}")


_MISTAKES: Final[dict[str, dict[str, Any]]] = {
    "roles": {"messages": [{"role": "someone", "content": 7}]},
    "model": {"model": "no-such-model", "max_tokens": -1},
}


def report_of(run: Run, *, finished: bool) -> dict[str, Any]:
    """Return the figures of a run so far, by phase and by source, with all requests."""
    results = run.results
    good = [x for x in results if x.turn.ok]
    names = dict.fromkeys(x.phase for x in results)
    sources = sorted(
        {x.source for x in good}, key=lambda x: (ORDER.index(x) if x in ORDER else len(ORDER), x)
    )
    errors = Counter(_words(x) for x in results if not x.ok)
    return {
        "url": run.target.address.base,
        "model": run.model,
        "workload": run.workload.name,
        "finished": finished,  # False: it was interrupted
        "planned_requests": run.workload.num_steps,
        "phases": [
            _phase(x, [y for y in results if y.phase == x], run.walls.get(x, 0)) for x in names
        ],
        "sources": [_source(x, [y for y in good if y.source == x]) for x in sources],
        "errors": dict(errors.most_common(MOST_ERRORS)),
        "requests": msgspec.to_builtins(results),
    }


def percentiles(values: Iterable[float | None]) -> tuple[float | None, ...]:
    """Return the 50th, 90th and 99th percentile of the known values; None if there are none."""
    known = [x for x in values if x is not None]
    return tuple(np.percentile(known, (50, 90, 99)).round(4).tolist()) if known else (None,) * 3


def _phase(name: str, results: Sequence[Result], wall_s: float) -> dict[str, Any]:
    users = len({x.user for x in results})
    tokens = sum(x.turn.answer_tokens for x in results)
    speed = tokens / wall_s if wall_s else 0.0
    found = {"phase": name, "users": users, "requests": len(results)}
    found["errors"] = sum(not x.ok for x in results)
    found |= {"tokens_per_s": round(speed, 2), "per_user": round(speed / max(1, users), 2)}
    return found | _times([x for x in results if x.turn.ok])


def _source(name: str, results: Sequence[Result]) -> dict[str, Any]:
    prompt = sum(x.turn.prompt_tokens for x in results)
    reported = [x.turn.cached_tokens for x in results if x.turn.cached_tokens is not None]
    # Share of the prompts' tokens that was reused; None = the server does not report it.
    share = round(sum(reported) / prompt, 4) if reported and prompt else None
    found = {"source": name, "requests": len(results), "prompt_tokens": prompt}
    return {**found, "reused_share": share, **_times(results)}


def _times(results: Iterable[Result]) -> dict[str, Any]:
    """Return percentiles of the time to the first token, and between two chunks of an answer."""
    turns = [x.turn for x in results]
    gaps = percentiles(gap for x in turns for gap in x.gaps_s)
    return {"ttft_s": percentiles(x.ttft_s for x in turns), "itl_s": gaps}


def _words(result: Result) -> str:
    if result.expected_error:
        return f"a wrong request was not refused (status {result.turn.status})"
    status = f"{result.turn.status}: " if result.turn.status else ""
    return f"{status}{result.turn.error}"
