"""Servers without sockets: each has a table of sessions, an engine of rows, and a common Redis.

Rows are written when a test says so; deletions are heard of all the time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from engines.base import SessionRef
from gateway.config import GatewayConfig
from gateway.keys import Tenants
from gateway.models import ServedModel
from gateway.shared.redis_client import AsyncRedis
from gateway.shared.shared_sessions import SharedSessions
from gateway.watch.metrics import Metrics
from scheduler.config import SchedulerConfig
from scheduler.sessions import SessionManager
from tests.unit.scheduler.conftest import Held, RowsEngine

SECRET = b"one secret of several servers"


class ReadyEngine(RowsEngine):
    """An engine that is there whenever it is not down."""

    @property
    def ready(self) -> bool:
        return not self.down


class ShiftedRedis(AsyncRedis):
    """A Redis whose clock was set to another time by ``by_s``."""

    by_s = 0

    async def _time(self, client: Any) -> Any:
        seconds, micros = await super()._time(client)
        return int(seconds) + self.by_s, micros


class OneServer:
    """One of several servers; ``engine.held``: the sessions of its engine."""

    def __init__(self, url: str, secret: bytes = SECRET) -> None:
        self.engine = ReadyEngine()
        self.tenants = Tenants(secret)
        self.sessions = SessionManager(
            self.engine,  # type: ignore[arg-type]
            SchedulerConfig(),
            salt_of=self.tenants.salt_of,
        )
        self.model = ServedModel(
            self.engine,  # type: ignore[arg-type]
            self.sessions,
            GatewayConfig(),
            Metrics(),
        )
        self.redis = ShiftedRedis(url, 10.0)  # a busy machine takes its time
        self.shared = SharedSessions([self.model], self.tenants, self.redis)
        self._hearing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Hear of deletions from now on."""
        self._hearing = asyncio.create_task(self.shared.deletions.run())
        await self.hears()

    async def hears(self, does: bool = True) -> None:
        """Wait until it does, or does not."""
        end = time.monotonic() + 60
        while self.shared.deletions.is_subscribed != does:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
        await self.redis.close()

    def ref(self, id: str, tenant: str = "alice") -> SessionRef:
        return SessionRef(tenant, id, self.tenants.salt_of(tenant))

    async def turn(self, id: str, tenant: str = "alice") -> None:
        """Serve a turn as the gateway does, and write its row."""
        await self.shared.before_first_turn(self.model, self.ref(id, tenant))
        async with self.sessions.turn(self.ref(id, tenant)) as turn:
            turn.engine_answered(None)
            self.engine.held[tenant, id] = Held()
        await self.write()

    async def write(self) -> None:
        """Publish the deletions that wait, and write the rows that have changed."""
        while await self.shared.round():
            pass

    async def delete(self, id: str, tenant: str = "alice") -> bool:
        """Delete a session everywhere; False: others learn of it later."""
        await asyncio.sleep(0.1)  # more than servers see one moment differently
        ref = self.ref(id, tenant)
        found = await self.shared.delete([ref], [self.model], "")
        await self.sessions.forget(ref)
        return not found.is_away

    def own(self, tenant: str = "alice") -> list[str]:
        return sorted(x.id for x in self.sessions.list(tenant))

    async def listed(self, tenant: str = "alice") -> list[str]:
        """The ids of all rows, the latest used first."""
        page = await self.shared.page(tenant, 1000, None)
        assert page is not None
        return [x.id for x in page.rows]
