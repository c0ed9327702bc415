"""The sessions of all servers on one Redis: what the gateway's routes ask of them."""

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
MORE_S: Final = 0.05  # after a full round, so that requests get their turn


class Elsewhere(NamedTuple):
    """Rows of other servers. ``is_away``: Redis does not answer, so there may be more."""

    rows: Sequence[SessionRow] = ()
    is_away: bool = False


class SharedSessions:
    """Lists and deletes sessions at all servers. Runs on the event loop.

    Args:
        redis: closed by ``run`` at its end.
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
            with suppress(TierUnavailable):  # a later round does the rest
                is_more = await self.round()
            await asyncio.sleep(MORE_S if is_more else ROUND_S)

    async def round(self) -> bool:
        """Publish the deletions that wait, and write some changed rows; True if more are left.

        Raises ``TierUnavailable``.
        """
        with suppress(TierUnavailable):  # rows may be taken although a tombstone was refused
            await self.deletions.publish_owed()
        return await self.writer.round()

    # ---- for requests

    async def page(self, tenant: str, most: int, below: int | None) -> RowPage | None:
        """Do as ``SharedSessionRows.page`` does; return None if Redis does not answer."""
        try:
            return await self._rows.page(tenant, most, below)
        except TierUnavailable:
            return None

    async def has_room_for(self, tenant: str, id: str, most: int) -> bool:
        """Return whether a tenant has that session at any server, or fewer than ``most``.

        True also if Redis does not answer.
        """
        try:
            return await self._rows.number(tenant) < most or bool(
                await self._rows.of_session(tenant, id, [])
            )
        except TierUnavailable:
            return True

    async def elsewhere(self, tenant: str, id: str, model: str = "") -> Elsewhere:
        """Return the rows of a session, for one model or all (``model`` = "")."""
        try:
            return Elsewhere(await self._rows.of_session(tenant, id, [model] if model else []))
        except TierUnavailable:
            return Elsewhere(is_away=True)

    async def delete(
        self, sessions: Sequence[SessionRef], models: Iterable[ServedModel], model: str
    ) -> Elsewhere:
        """Have all servers remove sessions of one tenant, if any server has one of them.

        Our own engines remove the cold data in Redis, also that of other servers' engines.

        Args:
            models: the models of this server to delete from.
            model: the name that was asked for; "" = all.

        Returns:
            The removed rows. ``is_away``: other servers receive the deletion when Redis is back.
        """
        tenant, rows, is_away = sessions[0].tenant, list[SessionRow](), False
        for session in sessions:
            found = await self.elsewhere(tenant, session.id, model)
            rows += found.rows
            is_away |= found.is_away
        own = [x for x in models if any(x.sessions.get(ref) for ref in sessions)]
        if rows or own:
            published = await self.deletions.publish(tenant, [x.id for x in sessions], model)
            is_away = not published
        with suppress(TierUnavailable):
            await self._rows.remove(tenant, rows)
        refs = {x.id: x for x in sessions}
        for row in rows:
            for each in models:
                if each.label == row.model and each.is_there:
                    with suppress(EngineError):  # an engine that is away holds no data of it
                        await each.sessions.forget_deleted(refs[row.id])
        return Elsewhere(rows, is_away)

    async def before_first_turn(self, model: ServedModel, session: SessionRef) -> None:
        """Call ``SharedDeletions.before_first_turn`` for a session that is not known here."""
        if model.sessions.get(session) is None:
            await self.deletions.before_first_turn(model, session)

    def shown(self, row: SessionRow) -> dict[str, Any]:
        """Return another server's session in the form of the sessions API."""
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
