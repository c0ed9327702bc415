"""Reports to the gateway that vLLM has reused blocks of a quiet session, which is cold from then
on.

vLLM's own KV events would say so, too (``BlockRemoved``, ``AllBlocksCleared``). They leave
EngineCore through a socket of their own, may be lost on the way, name blocks instead of sessions,
and cost an allocation per block while the model waits. In this process vLLM's own table can be
looked into: one lookup per hot session and second is less work, and wrong for a second at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions, SessionName
from engines.wire import Notice, SessionRef, SessionReport, absent

logger = logging.getLogger("thermocline.vllm")

EVERY_S: Final = 1.0


class EvictionWatch:
    """Looks at all quiet sessions every ``every_s`` seconds. On the hub's event loop."""

    def __init__(
        self,
        resident: ResidentSessions,
        look: Callable[[SessionRef], Awaitable[SessionReport | None]],
        publish: Callable[[Notice], None],
        every_s: float = EVERY_S,
    ) -> None:
        """``look`` asks the ranks for a session's report, None if they know nothing of it."""
        self._resident = resident
        self._look = look
        self._publish = publish
        self._every_s = every_s

    async def run(self) -> None:
        """Look and publish until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            for name in self._resident.take_cooled():
                try:
                    await self._tell(name)
                except OSError as error:  # no rank answers: the engine is on its way out
                    logger.warning("the gateway does not learn that a session is cold: %s", error)
                except Exception:  # the edge of this task: one session must not end the watch
                    logger.exception("the gateway does not learn that a session is cold")

    async def _tell(self, name: SessionName) -> None:
        session = SessionRef(*name, b"")
        report = await self._look(session)
        if report is not None:
            self._publish(Notice("dropped", report))
        else:
            self._publish(Notice("lost", absent(session)))
