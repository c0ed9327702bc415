"""Admits turns to the engine: a limited number at once, each tenant in its turn.

This is the only fair queue: engines serve first come, first served. Every tenant has its own line
and a *virtual time*: the seconds for which it held places, divided by its weight. A free place goes
to the tenant whose virtual time is least, where each place that it holds now counts as a turn of
the usual length. A tenant with a thousand requests therefore delays another's single request by one
place, not by a thousand. A tenant that comes back begins at its own virtual time or at the least of
the tenants present, whichever is more, as in start-time fair queueing: a pause earns nothing.

Tasks, which programs send beside a conversation, have lines of their own, since no user waits for
them: one gets a place when no other turn waits, and never the spare one. Where the line is full,
the newest task in it makes room for a turn.

Turns may last for hours, so one tenant's turns could hold all places and free none. So there is one
*spare place* more, for a tenant with nothing running; the engine has room for that turn, too. The
turn moves to an ordinary place once one is free and no turn waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engines.base import Overloaded as Overloaded

USUAL_TURN_S: Final = 1.0  # assumed until turns have ended
NEWEST_TURN: Final = 0.05  # the share of the newest turn in the average


class Draining(Exception):
    """The gateway is shutting down and takes no new turns."""


@dataclass(eq=False)
class _HeldPlaces:
    """The places that one turn holds: one per answer, though it begins once one is free."""

    num_places: int


class _Waiting(NamedTuple):
    """A turn in line."""

    called: asyncio.Future[None]
    turn: _HeldPlaces


@dataclass
class _TenantShare:
    """A tenant that has turns running or waiting."""

    weight: int
    virtual_s: float  # seconds for which it held places, divided by weight
    num_running: int = 0  # places
    line: deque[_Waiting] = field(default_factory=deque)
    tasks: deque[_Waiting] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        return len(self.line) + len(self.tasks)


class AdmissionQueue:
    """Gives ``max_running`` places and a spare one to turns, of which ``max_waiting`` may wait."""

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._tenants: dict[str, _TenantShare] = {}
        # Virtual times of absent tenants that are above the least of the tenants present.
        self._debts: dict[str, float] = {}
        self._spare: _HeldPlaces | None = None  # the turn that holds the spare place
        self._counted_until = clock()  # virtual times include all until then
        self._usual_s = USUAL_TURN_S  # moving average of the length of turns
        self._closed = False
        self._num_places = 0  # held
        self.num_running = 0  # turns
        self.num_waiting = 0

    def close(self) -> None:
        """Refuse new turns and waiting ones; running turns may finish."""
        self._closed = True
        for share in self._tenants.values():
            for waiting in (*share.line, *share.tasks):
                if not waiting.called.done():
                    waiting.called.set_exception(Draining("the gateway is shutting down"))

    @asynccontextmanager
    async def slot(
        self, tenant: str, weight: int = 1, num_answers: int = 1, *, is_task: bool = False
    ) -> AsyncIterator[None]:
        """Wait for a place for each answer, and hold them.

        Args:
            weight: the weight of the tenant, from now on.
            is_task: the turn is a task, which gets a place only if no other turn waits.

        Raises (on entering):
            Overloaded: the queue is full, or no place was free in time.
            Draining: the gateway is shutting down.
        """
        if self._closed:
            raise Draining("the gateway is shutting down")
        self._count_time()
        share = self._tenants.get(tenant) or self._add_tenant(tenant)
        share.weight = max(1, weight)
        turn = _HeldPlaces(min(num_answers, self._max_running))
        try:
            await self._enter(share, turn, is_task=is_task)
            began = self._clock()
            try:
                yield
            finally:
                self._free_places(share, turn)
                self._usual_s += NEWEST_TURN * (self._clock() - began - self._usual_s)
        finally:
            if not share.num_running and not share.num_waiting:
                self._remove_tenant(tenant, share)
            self._call_next()

    def _add_tenant(self, tenant: str) -> _TenantShare:
        if not self._tenants:
            self._debts.clear()
        start = max(self._least_s(), self._debts.pop(tenant, 0.0))
        share = self._tenants[tenant] = _TenantShare(1, start)
        return share

    def _remove_tenant(self, tenant: str, share: _TenantShare) -> None:
        if self._tenants.pop(tenant, None) is None or not self._tenants:
            return
        least = self._least_s()
        self._debts[tenant] = share.virtual_s
        self._debts = {x: debt for x, debt in self._debts.items() if debt > least}

    def _least_s(self) -> float:
        return min((x.virtual_s for x in self._tenants.values()), default=0.0)

    def _count_time(self) -> None:
        now = self._clock()
        elapsed_s, self._counted_until = now - self._counted_until, now
        for share in self._tenants.values():
            share.virtual_s += elapsed_s * share.num_running / share.weight

    async def _enter(self, share: _TenantShare, turn: _HeldPlaces, *, is_task: bool) -> None:
        if not self.num_waiting and self._has_place:
            self._take_places(share, turn)
            return
        if not is_task and not share.line and self._may_take_spare(share):
            self._spare = turn
            self._take_places(share, turn)
            return
        # One tenant may fill three quarters of the line; the rest is for the others.
        most = self._max_waiting - self._max_waiting // 4
        if share.num_waiting >= most:
            self._make_room([] if is_task else [share])
        elif self.num_waiting >= self._max_waiting:
            self._make_room([] if is_task else self._tenants.values())
        await self._wait(share.tasks if is_task else share.line, share, turn)

    def _make_room(self, shares: Collection[_TenantShare]) -> None:
        """Refuse the newest task of the share with the most. Raises ``Overloaded``: no tasks."""
        full = Overloaded(f"{self.num_waiting} requests are waiting already", self._retry_after_s())
        # A refused task stays in its line until its coroutine runs: it is not counted.
        lines = ([x for x in share.tasks if not x.called.done()] for share in shares)
        tasks = max(lines, key=len, default=[])
        if not tasks:
            raise full
        tasks[-1].called.set_exception(full)

    @property
    def _has_place(self) -> bool:
        """True if an ordinary place is free."""
        spare = self._spare.num_places if self._spare is not None else 0
        return self._num_places - spare < self._max_running

    def _may_take_spare(self, share: _TenantShare) -> bool:
        return not share.num_running and self._spare is None

    def _take_places(self, share: _TenantShare, turn: _HeldPlaces) -> None:
        self._count_time()
        share.num_running += turn.num_places
        self._num_places += turn.num_places
        self.num_running += 1

    def _free_places(self, share: _TenantShare, turn: _HeldPlaces) -> None:
        self._count_time()
        share.num_running -= turn.num_places
        self._num_places -= turn.num_places
        self.num_running -= 1
        if self._spare is turn:
            self._spare = None

    async def _wait(self, line: deque[_Waiting], share: _TenantShare, turn: _HeldPlaces) -> None:
        waiting = _Waiting(asyncio.get_running_loop().create_future(), turn)
        line.append(waiting)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.called
        except BaseException as error:
            if waiting in line:
                line.remove(waiting)
                self.num_waiting -= 1
            else:  # called in the same instant as the cancellation
                self._free_places(share, turn)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no place was free within {self._max_wait_s:g} s", self._retry_after_s()
                ) from None
            raise

    def _call_next(self) -> None:
        self._count_time()
        while share := self._next_tenant():
            waiting = (share.line or share.tasks).popleft()
            self.num_waiting -= 1
            if not self._has_place:
                self._spare = waiting.turn
            self._take_places(share, waiting.turn)
            if waiting.called.done():  # its task was cancelled, and will give the places back
                continue
            waiting.called.set_result(None)
        if self._has_place:
            self._spare = None  # its turn moves to the ordinary place

    def _next_tenant(self) -> _TenantShare | None:
        """Return the tenant whose first turn in line may begin now."""
        in_line = sorted((x for x in self._tenants.values() if x.line), key=self._expected_s)
        if not self._has_place:
            return next((x for x in in_line if self._may_take_spare(x)), None)
        if not in_line:
            in_line = sorted((x for x in self._tenants.values() if x.tasks), key=self._expected_s)
        return in_line[0] if in_line else None

    def _expected_s(self, share: _TenantShare) -> float:
        return share.virtual_s + share.num_running * self._usual_s / share.weight

    def _retry_after_s(self) -> float:
        return min(30.0, 1.0 + self.num_waiting / self._max_running)
