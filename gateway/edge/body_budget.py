"""Bounds the memory of all requests' bodies together: their bytes, and the values parsed from them.

A body counts by the bytes that have come, not by those that it declares, until its turn is called:
through the waiting line, but not while the engine computes. Questions that are no turn have no
line here, and count until they are answered. Stored objects that a request recalls count as its
body does. One tenant's leave room for others.
Parsed, a body of tiny values takes many times its bytes, so large ones are parsed one after the
other, and how much they may become is known before that.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from engines.openai.errors import InvalidRequest
from gateway.errors import Failure, Refused

BODY_SHARE = "body_share"  # where a request's share is in the scope's state
LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work
# The most that a parsed body may weigh, in units of about 64 bytes: a number or a text is 1.
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
        self._max_of_one = max_bytes - max_bytes // 4  # a quarter is for others than one tenant
        self._of: Counter[str] = Counter()  # bytes of each tenant
        self._parsing = asyncio.Semaphore(1)
        self.nbytes = 0

    def take(self, tenant: str, nbytes: int) -> None:
        """Count bytes that have come. Raises ``Refused`` (503) where there is no room."""
        if self.nbytes + nbytes > self._max_bytes or self._of[tenant] + nbytes > self._max_of_one:
            raise Refused(_FULL)
        self.nbytes += nbytes
        self._of[tenant] += nbytes

    def give_back(self, tenant: str, nbytes: int) -> None:
        """Count bytes no longer that ``take`` has counted."""
        self.nbytes -= nbytes
        self._of[tenant] -= nbytes
        if not self._of[tenant]:
            del self._of[tenant]

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
        self.tenant = ""  # the owner of the body; set before the first byte is read

    def grow(self, nbytes: int) -> None:
        """Have ``nbytes`` in all, if that is more than now. Raises ``Refused`` (503)."""
        if nbytes > self._nbytes:
            self._budget.take(self.tenant, nbytes - self._nbytes)
            self._nbytes = nbytes

    def add(self, nbytes: int) -> None:
        """Have ``nbytes`` more. Raises ``Refused`` (503)."""
        self.grow(self._nbytes + nbytes)

    def give_back(self) -> None:
        """Count the body no longer: it was answered, or another part of the server holds it."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.give_back(self.tenant, nbytes)


def body_share_of(scope: Scope) -> BodyShare:
    """Return what a request has of the budget of all bodies; ``FrontMiddleware`` has made it."""
    share = scope["state"][BODY_SHARE]
    assert isinstance(share, BodyShare)
    return share


def check_weight(*bodies: bytes, what: str = "The body") -> None:
    """Refuse large JSON that would become too much when it is parsed.

    Raises:
        InvalidRequest: 400, it has too many values.
    """
    if sum(map(len, bodies)) <= LARGE_BODY_BYTES or sum(map(_weight, bodies)) <= MAX_WEIGHT:
        return
    if sum(_weight(_TEXTS.sub(b"", x)) for x in bodies) > MAX_WEIGHT:  # most was not inside texts
        raise InvalidRequest(f"{what} has too many values.", code="too_many_values")


def _weight(body: bytes) -> int:
    return sum(body.count(mark) * weight for mark, weight in _WEIGHTS.items())
