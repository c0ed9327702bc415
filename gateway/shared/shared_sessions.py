"""The sessions of all servers on one Redis, as the gateway lists, deletes and begins them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from engines.base import EngineError, SessionRef
from gateway.keys import Tenants
from gateway.models import ServedModel
from gateway.shared.deletions import SharedDeletions
from gateway.shared.names import SharedNames
from gateway.shared.redis_client import AsyncRedis
from gateway.shared.row_writer import RowWriter
from gateway.shared.session_rows import RowPage, SessionRow, SharedSessionRows
from kvstore.errors import TierUnavailable

log = logging.getLogger("thermocline.sessions")

ROUND_S: Final = 0.5
MORE_S: Final = 0.05  # between rounds that are full, for the sake of requests


class Elsewhere(NamedTuple):
    """The rows that were found; ``is_away``: Redis does not answer, so there may be more."""

    rows: Sequence[SessionRow] = ()
    is_away: bool = False


class SharedSessions:
    """Rows and deletions of all servers. Runs on the event loop.

    Args:
        redis: owned by this object.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        tenants: Tenants,
        redis: AsyncRedis,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._redis = redis
        self._clock = clock
        names = SharedNames(tenants.key_of)
        self._rows = SharedSessionRows(redis, names)
        self.deletions = SharedDeletions(models, tenants, redis, names, clock)
        self.writer = RowWriter(models, redis, names, self.deletions)
        for number, model in enumerate(models):
            model.sessions.check_deleted(partial(self.deletions.among, number))

    async def run(self) -> None:
        """Write rows and receive deletions until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.deletions.run(), name="deletions")
                group.create_task(self._write(), name="session-rows")
        finally:
            await self._redis.close()

    async def _write(self) -> None:
        while True:
            is_more = False
            with suppress(TierUnavailable):  # they are written when it is back
                is_more = await self.writer.round()
            await asyncio.sleep(MORE_S if is_more else ROUND_S)

    # ---- for requests

    async def page(self, tenant: str, most: int, below: int | None) -> RowPage | None:
        """See ``SharedSessionRows.page``; None: Redis does not answer."""
        try:
            return await self._rows.page(tenant, most, below)
        except TierUnavailable:
            return None

    async def has_room_for(self, tenant: str, id: str, most: int) -> bool:
        """Return whether a tenant has that session at any server, or fewer than ``most``.

        True also where Redis does not answer.
        """
        try:
            return await self._rows.number(tenant) < most or bool(
                await self._rows.of_session(tenant, id, [])
            )
        except TierUnavailable:
            return True

    async def elsewhere(self, tenant: str, id: str, model: str = "") -> Elsewhere:
        """Find the rows of a session; ``model``: "" = of all models."""
        try:
            return Elsewhere(await self._rows.of_session(tenant, id, [model] if model else []))
        except TierUnavailable:
            return Elsewhere(is_away=True)

    async def delete(
        self, sessions: Sequence[SessionRef], models: Iterable[ServedModel], model: str
    ) -> Elsewhere:
        """Have all servers remove sessions of one tenant, if any of them has one.

        What engines of other servers left in Redis is removed by our own engines.

        Args:
            models: of this server, that are meant.
            model: the name that was asked for; "" = all.

        Returns:
            The rows that there were. ``is_away``: others learn of it when Redis is back.
        """
        tenant, rows, is_away = sessions[0].tenant, list[SessionRow](), False
        for session in sessions:
            found = await self.elsewhere(tenant, session.id, model)
            rows += found.rows
            is_away |= found.is_away
        own = [x for x in models if any(x.sessions.get(ref) for ref in sessions)]
        if rows or own:
            said = await self.deletions.say(tenant, [x.id for x in sessions], model)
            is_away = not said
        with suppress(TierUnavailable):
            await self._rows.remove(tenant, rows)
        refs = {x.id: x for x in sessions}
        for row in rows:
            for each in models:
                if each.label == row.model and each.is_there:
                    with suppress(EngineError):  # an engine that is away has nothing of it
                        await each.sessions.forget_deleted(refs[row.id])
        return Elsewhere(rows, is_away)

    async def before_first_turn(self, model: ServedModel, session: SessionRef) -> None:
        """See ``SharedDeletions.before_first_turn``. A session that is known here needs none."""
        if model.sessions.get(session) is None:
            await self.deletions.before_first_turn(model, session)

    def shown(self, row: SessionRow) -> dict[str, Any]:
        """Show a session of another server as the sessions API shows one's own."""
        now = self._redis.now() or row.used
        return {
            "id": row.id,
            "state": "cold",
            "tier": row.tier,
            "tokens": row.tokens,
            "bytes": row.nbytes,
            "idle_s": round(max(0.0, now - row.used), 3),
            "model": row.model,
            "elsewhere": True,
        } | ({"title": row.title} if row.title else {})
