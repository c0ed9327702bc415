"""Collects the answers of all ranks to a question of the hub."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engines.vllm_plugin.messages import RankAnswer, RankSession


class RankCall:
    """One question to every rank. A long list of sessions comes in several messages."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.number = number
        self.complete: asyncio.Future[list[RankAnswer]] = asyncio.get_running_loop().create_future()
        self._num_ranks = num_ranks
        self._pages: dict[object, list[RankSession]] = {}  # by rank, until its last message
        self._answers: list[RankAnswer] = []

    def hear(self, answer: RankAnswer, rank: object) -> None:
        """Add a message; ``rank`` is any object that distinguishes the senders."""
        sessions = self._pages.setdefault(rank, [])
        sessions.extend(answer.sessions)
        if answer.more:
            return
        del self._pages[rank]
        self._answers.append(msgspec.structs.replace(answer, sessions=sessions))
        if len(self._answers) == self._num_ranks and not self.complete.done():
            self.complete.set_result(self._answers)


class RankCalls:
    """The calls that callers still wait for, by number. On the hub's event loop."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._numbers = itertools.count(1)
        self._open: dict[int, RankCall] = {}

    @contextmanager
    def open(self) -> Iterator[RankCall]:
        """Begin a call; answers are collected until the ``with`` block ends."""
        call = RankCall(next(self._numbers), self._num_ranks)
        self._open[call.number] = call
        try:
            yield call
        finally:
            del self._open[call.number]

    def hear(self, answer: RankAnswer, rank: object) -> None:
        """Pass a message on to its call; drop it if the caller no longer waits."""
        if (call := self._open.get(answer.number)) is not None:
            call.hear(answer, rank)
