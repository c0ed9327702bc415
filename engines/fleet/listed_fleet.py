"""The replicas of a model that an orchestrator starts and ends: a fleet whose members change.

A list says which there are. A replica that leaves gets no new request and no verb but deletions,
while it answers what it has and saves its sessions; it is let go of once its control connection
ends. Its disk may come back with another replica: so that one is given the deletions of the last
day, but for sessions that have begun again since.

While the list cannot be read, what was read last holds: a replica that is gone is noticed by its
own connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from engines.base import SAVE_S, Engine, EngineError, SessionRef
from engines.fleet.deletions import ReplicaDeletions
from engines.fleet.fleet_engine import MOVES_AT, FleetEngine
from engines.fleet.homes import Homes
from engines.fleet.replica import Replica
from engines.fleet.replica_list import ListedReplica

log = logging.getLogger("thermocline.engines")

LIST_S: Final = 1.0  # between two looks at the list
GONE_S: Final = 24 * 3600.0  # for so long a gone replica's disk may come back


class ListedFleet(FleetEngine):
    """The replicas that a list names."""

    def __init__(
        self,
        read: Callable[[], Awaitable[list[ListedReplica]]],
        make: Callable[[ListedReplica], Engine],
        homes: Homes,
        moves_at: int = MOVES_AT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            read: reads the list; raises ``EngineError``.
            make: makes the client of a replica; nothing is started yet.
        """
        super().__init__({}, homes, moves_at, clock)
        self._read = read
        self._make = make
        self._watching: asyncio.Task[None] | None = None
        self._list_trouble = "the list of replicas has not been read yet"
        self._gone_until = float("-inf")  # a gone replica's disk may come back
        self._deleted = ReplicaDeletions()  # for as long as a disk that comes back may lack them

    @property
    def trouble(self) -> str:
        if self.ready:
            return ""
        return next((x.trouble for x in self._replicas if x.trouble), self._list_trouble)

    @property
    def gave_up(self) -> bool:
        return False

    def restart(self, why: str) -> None:
        log.warning("the engine is not ours to start again: %s", why)

    async def start(self) -> None:
        await super().start()
        self._watching = asyncio.create_task(self._watch(), name="replica-list")

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await super().stop(drain_s, save_s)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # the edge of this task: what is known of replicas holds
                log.exception("the list of replicas was not followed")
            await asyncio.sleep(LIST_S)

    async def look(self) -> None:
        """Read the list, and take on and let go of replicas by it."""
        try:
            listed = {x.name: x for x in await self._read()}
        except EngineError as error:
            if self._list_trouble != str(error):
                log.warning("%s; the replicas that are known go on", error)
            self._list_trouble = str(error)
            return
        self._list_trouble = "" if listed else "the list of replicas is empty"
        known = {x.name for x in self._replicas}
        for replica in list(self._replicas):
            now = listed.get(replica.name)
            replica.leaving = now is None or now.leaving
            if now is None and not replica.engine.ready:
                await self._let_go(replica.name)
        for one in listed.values():
            if one.name not in known and not one.leaving:
                log.info("replica %s is there, at %s", one.name, one.url)
                await self._take_on(one)

    async def _take_on(self, one: ListedReplica) -> None:
        replica = await self.add(one.name, self._make(one))
        self._deleted.expire(self._clock())
        for session in self._deleted:
            if session.name not in replica.owed:
                replica.owed.add(session)

    async def _let_go(self, name: str) -> None:
        log.info("replica %s is gone", name)
        replica = await self.remove(name)
        self._gone_until = self._clock() + GONE_S
        self._keep(replica.owed)

    def _owe(self, session: SessionRef) -> None:
        super()._owe(session)
        if self._clock() < self._gone_until:
            self._keep([session])

    def _served(self, session: SessionRef, replica: Replica) -> None:
        super()._served(session, replica)
        self._deleted.discard(session)

    def _keep(self, deleted: Iterable[SessionRef]) -> None:
        """Keep deletions for replicas that come later; the oldest are dropped first."""
        now = self._clock()
        self._deleted.expire(now)
        for session in deleted:
            self._deleted.discard(session)
            self._deleted.make_room(session.tenant)
            self._deleted.add(session, now + GONE_S)
