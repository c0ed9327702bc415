"""Finds how many sessions a server keeps: opens more and more, and returns to all of them.

Each round opens sessions until there are twice as many, then returns to all of them, the newest
first. A lost session is computed again, and its KV takes the place of others: of sessions that were
returned to already, or of older ones. So the sessions that come back are those that the server
kept.
"""

from __future__ import annotations

import time
from statistics import median_high
from typing import Final

import aiohttp
import msgspec

from benchmarks.stacks.product_stack import prose
from benchmarks.users.figures import Target
from launch.errors import LaunchError
from launch.remote.turn import Message, RemoteTurn, take_turn

KEPT_SHARE: Final = 0.5  # of its first prompt that a returning session must reuse to count as kept
# For servers that do not report reuse: a kept session's time to first token, at most, as a share of
# that of its first turn.
QUICK_SHARE: Final = 0.5
LOST_IN_A_ROW: Final = 4  # lost sessions after which all older ones count as lost, too
BY_TIME: Final = "time"
ANSWER_TOKENS: Final = 8


class Round(msgspec.Struct, frozen=True):
    """One return to all sessions: how many were open, and how many of them came back."""

    opened: int
    kept: int
    sources: dict[str, int]
    first_ttft_s: float | None  # median of first turns; None = there were none
    return_ttft_s: float | None  # median of the sessions that came back; None = there were none


class Found(msgspec.Struct):
    """The result; ``judged_by`` is "header", "usage" or ``BY_TIME``, "" before the first return."""

    url: str
    model: str
    words: int  # of a first message
    prompt_tokens: int = 0  # of a first turn, as the server counts
    judged_by: str = ""
    rounds: list[Round] = []
    capacity: int = 0
    at_least: bool = True  # no session was lost: the capacity is this or more
    finished: bool = False


class _Session:
    def __init__(self, name: str, words: int) -> None:
        self.name = name
        self.messages: list[Message] = [
            {"role": "user", "content": f"Notes {name}: {prose(name, words)}. One word, please."}
        ]
        self.first = RemoteTurn()


class Search:
    """One search. ``found`` may be read at any time."""

    def __init__(
        self, target: Target, *, words: int = 300, most: int = 256, start: int = 4
    ) -> None:
        self.found = Found(target.address.base, target.model, words)
        self._target = target
        self._most = most
        self._start = min(start, most)
        self._tag = f"{time.time_ns():x}"
        self._sessions: list[_Session] = []

    async def run(self, http: aiohttp.ClientSession) -> Found:
        """Search until returns are lost.

        Raises:
            LaunchError: the server cannot be used, or a turn fails; says why.
        """
        self.found.model = await self._target.address.model(http, self._target.model)
        await self._learn_to_judge(http)
        count = self._start
        while True:
            round_ = await self._round(http, count)
            self.found.rounds.append(round_)
            self.found.capacity = max(x.kept for x in self.found.rounds)
            self.found.at_least = round_.kept == round_.opened
            if not self.found.at_least or count >= self._most:
                break
            count = min(self._most, 2 * count)
        self.found.finished = True
        return self.found

    async def _learn_to_judge(self, http: aiohttp.ClientSession) -> None:
        """Open one session, return at once, and choose how returns are judged on this server."""
        probe = _Session(f"probe-{self._tag}", self.found.words)
        await self._open(http, probe)
        back = await self._return(http, probe)
        judge = back.judged_by if back.cached_tokens else ""
        self.found.judged_by = judge or BY_TIME
        self.found.prompt_tokens = probe.first.prompt_tokens

    async def _round(self, http: aiohttp.ClientSession, count: int) -> Round:
        first = []
        while len(self._sessions) < count:
            session = _Session(f"{len(self._sessions)}-{self._tag}", self.found.words)
            self._sessions.append(session)
            await self._open(http, session)
            first.append(session.first.ttft_s)
        kept, row, sources, times = 0, 0, dict[str, int](), []
        for session in list(reversed(self._sessions)):
            back = await self._return(http, session)
            self._sessions.remove(session)  # least recently used first, as a server may order them
            self._sessions.append(session)
            sources[back.source] = sources.get(back.source, 0) + 1
            if self._is_kept(session, back):
                kept, row = kept + 1, 0
                times.append(back.ttft_s)
            else:
                row += 1
            if row >= LOST_IN_A_ROW:
                break
        return Round(count, kept, sources, _median(first), _median(times))

    def _is_kept(self, session: _Session, back: RemoteTurn) -> bool:
        if self.found.judged_by == BY_TIME:
            return (back.ttft_s or 0.0) < QUICK_SHARE * (session.first.ttft_s or 0.0)
        # A server that reused nothing may leave the number out.
        return (back.cached_tokens or 0) >= KEPT_SHARE * session.first.prompt_tokens

    async def _open(self, http: aiohttp.ClientSession, session: _Session) -> None:
        session.first = turn = await self._turn(http, session.name, session.messages)
        session.messages.append({"role": "assistant", "content": turn.text})

    async def _return(self, http: aiohttp.ClientSession, session: _Session) -> RemoteTurn:
        """Ask the same each time, so that sessions stay as long as they are."""
        asked = [*session.messages, {"role": "user", "content": "And another one?"}]
        return await self._turn(http, session.name, asked)

    async def _turn(
        self, http: aiohttp.ClientSession, name: str, messages: list[Message]
    ) -> RemoteTurn:
        turn = await take_turn(
            http,
            self._target.address,
            self.found.model,
            messages,
            session=f"bench-{name}",
            max_tokens=ANSWER_TOKENS,
            fields={"temperature": 0},
            timeout_s=self._target.timeout_s,
        )
        if not turn.ok:
            status = f" ({turn.status})" if turn.status else ""
            raise LaunchError(f"a turn failed{status}: {turn.error}")
        return turn


def _median(values: list[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return round(median_high(known), 4) if known else None
