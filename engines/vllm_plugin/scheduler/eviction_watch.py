"""Reports to the gateway that vLLM has reused blocks of a quiet session, which is then cold.

vLLM's own KV events contain the same news (``BlockRemoved``, ``AllBlocksCleared``). But they leave
EngineCore through a separate socket, may be lost on the way, name blocks instead of sessions, and
cost an allocation per block while the model waits. In this process vLLM's own table can be read:
one lookup per hot session and second is less work, and is outdated by one second at most.
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
    """Checks all quiet sessions every ``every_s`` seconds. On the hub's event loop."""

    def __init__(
        self,
        resident: ResidentSessions,
        look: Callable[[SessionRef], Awaitable[SessionReport | None]],
        publish: Callable[[Notice], None],
        every_s: float = EVERY_S,
    ) -> None:
        """``look`` asks the ranks for a session's report; None if no rank has the session."""
        self._resident = resident
        self._look = look
        self._publish = publish
        self._every_s = every_s

    async def run(self) -> None:
        """Check sessions and publish changes until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            for name in self._resident.take_cooled():
                try:
                    await self._notify(name)
                except OSError as error:  # no rank answers: the engine is ending
                    logger.warning("the gateway does not learn that a session is cold: %s", error)
                except Exception:  # top level of this task: one session must not end the watch
                    logger.exception("the gateway does not learn that a session is cold")

    async def _notify(self, name: SessionName) -> None:
        session = SessionRef(*name, b"")
        report = await self._look(session)
        if report is not None:
            self._publish(Notice("dropped", report))
        else:
            self._publish(Notice("lost", absent(session)))
