"""Servers without sockets: each has a table of sessions, an engine of rows, and its directory.

Rounds are done when a test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.base import SessionRef
from engines.fleet.homes import FleetHomes, SaidMoves, SharedHomes
from gateway.config import GatewayConfig
from gateway.directory.directory import Directory
from gateway.keys import Tenants
from gateway.models.served_model import ServedModel
from gateway.watch.metrics import Metrics
from kvstore.directory.entries import Names
from kvstore.directory.exchange import Command
from kvstore.tiers.redis_server.link import RedisLink
from scheduler.config import SchedulerConfig
from scheduler.sessions import SessionManager
from tests.clock import Clock
from tests.unit.scheduler.conftest import Held, RowsEngine

SECRET = b"one secret of several servers"


class ShiftedTime:
    """A Redis server whose clock was set to another time by ``by_s``."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self.by_s = 0

    def run(self, commands: Sequence[Command]) -> list[Any]:
        replies = self._link.run(commands)
        for i, command in enumerate(commands):
            if command[0] == "TIME":
                replies[i] = [str(int(replies[i][0]) + self.by_s).encode(), replies[i][1]]
        return replies


class ReadyEngine(RowsEngine):
    """An engine that is there whenever it is not down."""

    @property
    def ready(self) -> bool:
        return not self.down


class OneServer:
    """One of several servers; ``engine.held``: the sessions of its engine."""

    def __init__(self, url: str, name: str, secret: bytes = SECRET) -> None:
        self.clock = Clock()
        self.engine = ReadyEngine()
        self.tenants = Tenants(secret)
        self.sessions = SessionManager(
            self.engine,  # type: ignore[arg-type]
            SchedulerConfig(),
            salt_of=self.tenants.salt_of,
            clock=self.clock,
        )
        self.model = ServedModel.of(
            self.engine,  # type: ignore[arg-type]
            self.sessions,
            GatewayConfig(),
            Metrics(),
        )
        self._link = RedisLink(url, 2.0, longest_wait_s=0.1)
        self.redis = ShiftedTime(self._link)
        self.homes, shared = self._homes()
        self.directory = Directory(
            [self.model], self.tenants, self.redis, name, homes=shared, clock=self.clock
        )

    def _homes(self) -> tuple[SharedHomes, FleetHomes]:
        """The homes of sessions on two engines that other servers use, too."""
        names, said = Names(self.tenants.key_of), SaidMoves(self.clock)
        homes = SharedHomes(
            100,
            lambda tenant, id: names.mark(tenant, "", id),
            {names.engine(x): x for x in ("http://e1", "http://e2")},
            said,
        )
        return homes, FleetHomes([homes], said)

    def ref(self, id: str, tenant: str = "alice") -> SessionRef:
        return SessionRef(tenant, id, self.tenants.salt_of(tenant))

    async def turn(self, id: str, tenant: str = "alice") -> None:
        async with self.sessions.turn(self.ref(id, tenant)) as turn:
            turn.engine_answered(None)
            self.engine.held[tenant, id] = Held()

    async def round(self) -> None:
        await self.directory.round()
        await self.directory.removals.done()

    def own(self, tenant: str = "alice") -> list[str]:
        return sorted(x.id for x in self.sessions.list(tenant))

    async def elsewhere(self, tenant: str = "alice") -> list[str]:
        return sorted(x.row.id for x in await self.directory.elsewhere(tenant))

    def close(self) -> None:
        self._link.close()


async def rounds(*servers: OneServer) -> None:
    """Let all servers do as many rounds as it takes to know of each other."""
    for _ in range(3):
        for server in servers:
            await server.round()
