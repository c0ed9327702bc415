"""Reports to the gateway what happens to sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from engines.mlx_worker.control.reports import SessionReports
from engines.mlx_worker.sessions.hot_cache import Cause
from engines.wire import Notice, absent
from kvstore.session import SessionRef

logger = logging.getLogger(__name__)

_Changes: TypeAlias = dict[tuple[str, str, Cause], tuple[SessionRef, str]]


class Notifier:
    """Turns changes of sessions into notices. Changes that come close together share a report."""

    def __init__(
        self,
        reports: SessionReports,
        publish: Callable[[Notice], None],
        saved: Callable[[SessionRef], Awaitable[None]],
    ) -> None:
        """``saved`` is awaited for every session that has just been saved."""
        self._reports = reports
        self._publish = publish
        self._saved = saved
        self._changes: _Changes = {}
        self._changed = asyncio.Event()

    def hear(self, cause: Cause, session: SessionRef, why: str = "") -> None:
        """Note a change. Called on the event loop."""
        change = (session.tenant, session.id, cause)
        self._changes.pop(change, None)  # the latest of its kind, in its place in time
        self._changes[change] = session, why
        self._changed.set()

    async def run(self) -> None:
        """Publish notices until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            changes, self._changes = self._changes, {}
            try:
                await self._send(changes)
            except Exception:  # the edge of this task: later notices matter more than this one
                logger.exception("a notice could not be written")

    async def _send(self, changes: _Changes) -> None:
        for (_, _, cause), (session, why) in changes.items():
            if cause == "saved":
                await self._saved(session)
            report = await asyncio.to_thread(self._reports.session, session)
            self._publish(Notice(cause, report or absent(session), why))
