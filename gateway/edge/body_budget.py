"""Bounds what the bodies of all requests take together: their bytes, and what is made of them.

A body counts from the bytes that it declares, or that have come, until the engine has it. Parsed,
a body of tiny values takes many times its bytes, so large ones are parsed one after the other, and
how much they may become is known before that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engines.openai.errors import InvalidRequest
from gateway.errors import Failure, Refused

LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work
# What a parsed body may weigh, about 64 bytes for each: a number or a text is 1.
MAX_WEIGHT = 1 << 20
_WEIGHTS = {b",": 1, b"[": 4, b"{": 8}
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_FULL = Failure(
    503, "This server is reading too much at once. Try again later.", None, "bodies_full", 1.0
)


class BodyBudget:
    """The bytes of all bodies that are held at once. Runs on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parsing = asyncio.Semaphore(1)
        self.nbytes = 0

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to come. Raises ``Refused`` (503) where there is no room."""
        if self.nbytes + nbytes > self._max_bytes:
            raise Refused(_FULL)
        self.nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.nbytes -= nbytes

    @asynccontextmanager
    async def parsing(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until no other large body is parsed, if one of ``nbytes`` is large."""
        if nbytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self._parsing:
            yield


class BodyShare:
    """The share of the budget that one request has; ``give_back`` may be called twice."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Have ``nbytes`` in all, if that is more than now. Raises ``Refused`` (503)."""
        if nbytes > self._nbytes:
            self._budget.take(nbytes - self._nbytes)
            self._nbytes = nbytes

    def give_back(self) -> None:
        """Count the body no longer: it was answered, or somebody else has it."""
        self._budget.give_back(self._nbytes)
        self._nbytes = 0


def check_weight(body: bytes) -> None:
    """Refuse a large body that would become too much when it is parsed.

    Raises:
        InvalidRequest: 400, it has too many values.
    """
    if len(body) <= LARGE_BODY_BYTES or _weight(body) <= MAX_WEIGHT:
        return
    if _weight(_TEXTS.sub(b"", body)) > MAX_WEIGHT:  # most of it was not inside texts
        raise InvalidRequest("The body has too many values.", code="too_many_values")


def _weight(body: bytes) -> int:
    return sum(body.count(mark) * weight for mark, weight in _WEIGHTS.items())
