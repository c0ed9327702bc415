"""Plays a workload against a server; what was measured so far can be read at any time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec

from launch.bench.workload import Conversation, Phase, Step, Workload, prose
from launch.errors import LaunchError
from launch.remote.address import Address
from launch.remote.turn import Message, Turn, take_turn

HOPELESS: Final = 8  # requests that all failed: the run ends


class Result(msgspec.Struct):
    """One request of the run; ``turn`` has no text any more."""

    phase: str
    user: int
    conversation: str
    step: int  # 0 = the first of its conversation
    expected_error: bool
    started_s: float  # since the run began
    turn: Turn

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
        address: Address,
        model: str,
        workload: Workload,
        *,
        timeout_s: float = 600.0,
        temperature: float = 0.0,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.results: list[Result] = []
        self.walls: dict[str, float] = {}  # seconds, of each phase so far
        self.num_steps = sum(1 for _ in workload.steps())
        self._address = address
        self._model = model
        self._workload = workload
        self._timeout_s = timeout_s
        self._fields: dict[str, Any] = {"temperature": temperature}
        self._on_result = on_result
        self._tag = f"{time.time_ns():x}"  # sessions of two runs are never the same
        self._began = time.perf_counter()

    async def play(self, http: aiohttp.ClientSession) -> None:
        """Play all phases. Raises ``Hopeless`` if nothing works."""
        self._began = time.perf_counter()
        for phase in self._workload.phases:
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
            self._address,
            self._model,
            [*messages, said],
            session=name,
            max_tokens=step.answer_tokens,
            fields=self._fields | _mistake(step),
            timeout_s=self._timeout_s,
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
