"""Updates the table from the engine's reports of its sessions.

An engine that (re)connects is asked for all its sessions until it has answered; only then is the
table complete. Changes arrive as notices at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from engines.base import Engine, EngineError, Notice, SessionRef, SessionReport, Welcome
from scheduler.session import State
from scheduler.table import SessionTable

log = logging.getLogger("thermocline.sessions")

ASK_AGAIN_FIRST_S = 0.5
ASK_AGAIN_CAP_S = 30.0
# The reason by the cause of a notice, if the engine gives none: it needed memory; no cold copy.
WHY = {"dropped": "engine", "lost": "no-copy"}
ROWS_AT_ONCE = 500  # rows taken over before other tasks of the event loop run


# Returns the reports of those sessions that another server deleted after they had begun.
Deleted: TypeAlias = Callable[[Iterable[SessionReport]], Awaitable[list[SessionReport]]]


class Follower:
    """Follows one engine; see above. Runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        table: SessionTable,
        *,
        salt_of: Callable[[str], bytes],
        clock: Callable[[], float],
        hurry: Callable[[], None],
        is_task: Callable[[str], bool] = lambda id: False,
        ask_again_first_s: float = ASK_AGAIN_FIRST_S,
    ) -> None:
        """
        Args:
            hurry: requests a sweep, since the engine holds more or a session may sleep now.
            is_task: returns whether a session holds tasks, given its id.
        """
        self._engine = engine
        self._table = table
        self._salt_of = salt_of
        self._clock = clock
        self._hurry = hurry
        self._is_task = is_task
        self._ask_again_first_s = ask_again_first_s
        self._deleted: Deleted | None = None
        self._to_ask = asyncio.Event()
        self._followed: Welcome | None = None  # the engine whose sessions are in the table

    def check_deleted(self, deleted: Deleted) -> None:
        """Have the engine forget sessions that ``deleted`` names, whenever it lists sessions."""
        self._deleted = deleted

    @property
    def settled(self) -> bool:
        """True once the engine that is connected now has listed its sessions."""
        return self._followed is not None and self._followed is self._engine.welcome

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="session-notices")
            group.create_task(self._ask_when_due(), name="session-list")

    async def _listen(self) -> None:
        async for notice in self._engine.notices():
            if notice is None:
                self._to_ask.set()
            else:
                self.receive(notice)

    def receive(self, notice: Notice) -> None:
        """Apply a notice to the table."""
        report = notice.session
        session = self._table.row(report.tenant, report.id)
        if session is not None and notice.cause == "saved" and session.state is State.COLD:
            # The demotion that waited for this save ended before the notice arrived.
            self._table.learn(session, report)
        elif session is not None:
            self._table.take(session, report, notice.why or WHY.get(notice.cause, ""))
        elif report.hot or report.tier is not None:
            self._adopt(report)
        if notice.cause in ("saved", "turn"):
            self._hurry()

    async def _ask_when_due(self) -> None:
        while True:
            await self._to_ask.wait()
            self._to_ask.clear()
            try:
                await self._ask_until_answered()
            except BaseException:
                self._to_ask.set()  # the next run must ask
                raise

    async def _ask_until_answered(self) -> None:
        """Ask, with pauses, until the engine has answered or is gone."""
        pause_s = self._ask_again_first_s
        while self._engine.welcome is not None:
            try:
                await self.ask()
                return
            except EngineError as error:
                log.warning("the engine does not list its sessions: %s; asking again", error)
            await asyncio.sleep(pause_s)
            pause_s = min(ASK_AGAIN_CAP_S, pause_s * 2)

    async def ask(self) -> None:
        """Apply the engine's list of sessions, and drop all others. Raises ``EngineError``."""
        welcome, asked_at = self._engine.welcome, self._clock()
        reports = {(x.tenant, x.id): x for x in await self._engine.sessions()}
        for report in await self._deleted(reports.values()) if self._deleted else ():
            del reports[report.tenant, report.id]
            ref = self._ref(report)
            with self._table.forgetting(ref):
                await self._engine.forget(ref)
        known = list(self._table)
        # The longest idle first, as in the table: if rows must be dropped, the latest stay.
        for i, report in enumerate(sorted(reports.values(), key=lambda x: -x.idle_s)):
            if i % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
            session = self._table.row(report.tenant, report.id)
            if session is None:
                self._adopt(report)
            elif session.unchanged_since(asked_at):  # the list does not cover later changes
                self._table.take(session, report, "engine")
        for session in known:
            missing = (session.ref.tenant, session.ref.id) not in reports
            if missing and session.unchanged_since(asked_at):
                self._table.take(session, None, "missing")
        self._followed = welcome

    def _adopt(self, report: SessionReport) -> None:
        if self._table.was_forgotten(report.tenant, report.id):
            return
        state = State.IDLE if report.hot else State.COLD
        session = self._table.add(self._ref(report), state, self._clock() - report.idle_s, report)
        session.is_task = self._is_task(report.id)

    def _ref(self, report: SessionReport) -> SessionRef:
        return SessionRef(report.tenant, report.id, self._salt_of(report.tenant))
