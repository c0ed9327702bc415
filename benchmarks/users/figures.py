"""Plays a workload against a server, and sums up its times by phase and by where KV came from."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from benchmarks.users.target import Target
from benchmarks.users.workload import Conversation, Phase, Step, Workload, prose
from launch.errors import LaunchError
from launch.remote.turn import MISS, Message, RemoteTurn, take_turn

HOPELESS: Final = 8  # requests that all failed: the run ends
NEW: Final = "new"  # first turns, of which nothing could be known
LOST: Final = "miss"  # returns of which nothing was reused
MOST_ERRORS: Final = 20  # different ones that are reported


class Result(msgspec.Struct):
    """One request of the run; ``turn`` has no text any more."""

    phase: str
    user: int
    conversation: str
    step: int  # 0 = the first of its conversation
    expected_error: bool
    started_s: float  # since the run began
    turn: RemoteTurn

    @property
    def ok(self) -> bool:
        if self.expected_error:
            return 400 <= self.turn.status < 500
        return self.turn.ok


class Hopeless(LaunchError):
    """Every request failed; the message has the server's words."""


class Run:
    """One run of a workload. ``results`` grows while it runs."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.model = target.model
        self.results: list[Result] = []
        self.walls: dict[str, float] = {}  # seconds, of each phase so far
        self.target = target
        self.workload = workload
        self._on_result = on_result
        self._tag = f"{time.time_ns():x}"  # sessions of two runs are never the same
        self._began = time.perf_counter()

    async def play(self, http: aiohttp.ClientSession) -> None:
        """Play all phases. Raises ``LaunchError``: the server cannot be used; says why."""
        self.model = await self.target.address.model(http, self.target.model)
        self._began = time.perf_counter()
        for phase in self.workload.phases:
            began = time.perf_counter()
            try:
                await self._play(http, phase)
            finally:
                self.walls[phase.name] = time.perf_counter() - began

    async def _play(self, http: aiohttp.ClientSession, phase: Phase) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, conversations in enumerate(phase.users):
                    group.create_task(self._user(http, phase, number, conversations))
        except* Hopeless as errors:
            raise errors.exceptions[0] from None

    async def _user(
        self,
        http: aiohttp.ClientSession,
        phase: Phase,
        number: int,
        conversations: tuple[Conversation, ...],
    ) -> None:
        for conversation in conversations:
            messages: list[Message] = []
            if conversation.system:
                messages.append({"role": "system", "content": conversation.system})
            for index, step in enumerate(conversation.steps):
                await asyncio.sleep(step.think_s)
                result = await self._ask(http, phase, number, conversation, index, messages)
                if not result.ok:  # its answer is missing: the conversation cannot go on
                    break

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        phase: Phase,
        number: int,
        conversation: Conversation,
        index: int,
        messages: list[Message],
    ) -> Result:
        step = conversation.steps[index]
        name = f"bench-{self._tag}-{conversation.name}"
        said = {"role": "user", "content": prose(f"{name} {index}", step.words)}
        started = time.perf_counter() - self._began
        turn = await take_turn(
            http,
            self.target.address,
            self.model,
            [*messages, said],
            session=name,
            max_tokens=step.answer_tokens,
            fields={"temperature": 0.0} | _mistake(step),
            timeout_s=self.target.timeout_s,
        )
        messages += [said, {"role": "assistant", "content": turn.text}]
        turn.text = ""
        result = Result(
            phase.name, number, conversation.name, index, bool(step.wrong), started, turn
        )
        self.results.append(result)
        self._on_result(result)
        self._check_hope()
        return result

    def _check_hope(self) -> None:
        if len(self.results) == HOPELESS and not any(x.ok for x in self.results):
            first = self.results[0].turn
            status = f" ({first.status})" if first.status else ""
            raise Hopeless(f"the first {HOPELESS} requests all failed{status}: {first.error}")


def _mistake(step: Step) -> dict[str, Any]:
    if step.wrong == "roles":
        return {"messages": [{"role": "nobody", "content": 7}]}
    if step.wrong == "model":
        return {"model": "no-such-model", "max_tokens": -1}
    return {}


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds; None = nothing was measured."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class PhaseFigures(msgspec.Struct, frozen=True):
    """One phase of the run."""

    name: str
    users: int
    requests: int
    errors: int
    wall_s: float
    answer_tokens: int
    tokens_per_s: float  # of all users together
    tokens_per_s_user: float  # of one
    ttft_s: Percentiles
    itl_s: Percentiles  # time between two chunks of an answer


class SourceFigures(msgspec.Struct, frozen=True):
    """All turns whose KV came from one source."""

    source: str
    requests: int
    prompt_tokens: int
    reused_share: float | None  # of the prompts' tokens; None = the server does not say
    ttft_s: Percentiles
    itl_s: Percentiles


class Report(msgspec.Struct, frozen=True):
    """All that a run found out."""

    url: str
    model: str
    workload: str
    finished: bool  # False: it was interrupted
    planned_requests: int
    phases: list[PhaseFigures]
    sources: list[SourceFigures]
    errors: dict[str, int]
    requests: list[Result]

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())


def report_of(run: Run, *, finished: bool) -> Report:
    """Sum up the results of a run so far."""
    results, workload = run.results, run.workload
    errors = Counter(_words(x) for x in results if not x.ok)
    names = dict.fromkeys(x.phase for x in results)
    by_source: dict[str, list[Result]] = {}
    for result in results:
        if result.turn.ok:
            by_source.setdefault(label(result), []).append(result)
    return Report(
        run.target.address.base,
        run.model,
        workload.name,
        finished,
        workload.num_steps,
        [
            _phase(name, [x for x in results if x.phase == name], run.walls.get(name, 0))
            for name in names
        ],
        [_source(name, by_source[name]) for name in sorted(by_source, key=_order)],
        dict(errors.most_common(MOST_ERRORS)),
        list(results),
    )


def label(result: Result) -> str:
    """The group of a turn: its source, where a miss of a first turn is no loss."""
    if result.turn.source == MISS:
        return LOST if result.step else NEW
    return result.turn.source


def percentiles(values: Iterable[float]) -> Percentiles:
    """The value that so many per cent of all stay within."""
    measured = list(values)
    if not measured:
        return Percentiles()
    return Percentiles(*np.percentile(measured, (50, 90, 99)).round(4).tolist())


def _phase(name: str, results: Sequence[Result], wall_s: float) -> PhaseFigures:
    users = len({x.user for x in results})
    tokens = sum(x.turn.answer_tokens for x in results)
    speed = tokens / wall_s if wall_s else 0.0
    good = [x for x in results if x.turn.ok]
    return PhaseFigures(
        name=name,
        users=users,
        requests=len(results),
        errors=sum(not x.ok for x in results),
        wall_s=round(wall_s, 3),
        answer_tokens=tokens,
        tokens_per_s=round(speed, 2),
        tokens_per_s_user=round(speed / max(1, users), 2),
        ttft_s=_ttft(good),
        itl_s=_itl(good),
    )


def _source(name: str, results: Sequence[Result]) -> SourceFigures:
    prompt = sum(x.turn.prompt_tokens for x in results)
    reported = [x.turn.cached_tokens for x in results if x.turn.cached_tokens is not None]
    share = round(sum(reported) / prompt, 4) if reported and prompt else None
    return SourceFigures(name, len(results), prompt, share, _ttft(results), _itl(results))


def _ttft(results: Iterable[Result]) -> Percentiles:
    return percentiles(x.turn.ttft_s for x in results if x.turn.ttft_s is not None)


def _itl(results: Iterable[Result]) -> Percentiles:
    return percentiles(gap for x in results for gap in x.turn.gaps_s)


def _order(source: str) -> tuple[int, str]:
    known = ("hot", "cold-ram", "cold-disk", "cold-redis", "cached", NEW, LOST)
    return (known.index(source) if source in known else len(known), source)


def _words(result: Result) -> str:
    if result.expected_error:
        return f"a wrong request was not refused (status {result.turn.status})"
    status = f"{result.turn.status}: " if result.turn.status else ""
    return f"{status}{result.turn.error}"
