"""What the hub has asked its ranks, and what they have said so far."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engines.vllm_plugin.messages import RankAnswer, RankSession


class Question:
    """One question to every rank. A long list of sessions comes in several answers."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.number = number
        self.complete: asyncio.Future[list[RankAnswer]] = asyncio.get_running_loop().create_future()
        self._num_ranks = num_ranks
        self._pages: dict[object, list[RankSession]] = {}
        self._answers: list[RankAnswer] = []

    def hear(self, answer: RankAnswer, rank: object) -> None:
        """``rank``: whatever tells one from the others."""
        sessions = self._pages.setdefault(rank, [])
        sessions.extend(answer.sessions)
        if answer.more:
            return
        del self._pages[rank]
        self._answers.append(msgspec.structs.replace(answer, sessions=sessions))
        if len(self._answers) == self._num_ranks and not self.complete.done():
            self.complete.set_result(self._answers)


class Questions:
    """Those that somebody still waits for. On the hub's event loop."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._numbers = itertools.count(1)
        self._open: dict[int, Question] = {}

    @contextmanager
    def open(self) -> Iterator[Question]:
        question = Question(next(self._numbers), self._num_ranks)
        self._open[question.number] = question
        try:
            yield question
        finally:
            del self._open[question.number]

    def hear(self, answer: RankAnswer, rank: object) -> None:
        if (question := self._open.get(answer.number)) is not None:
            question.hear(answer, rank)
