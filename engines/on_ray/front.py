"""The HTTP server of a replica, for gateways with the token, and the drain before it ends.

It serves vLLM's own application, bypassing Serve's proxies, which would pass on ``cache_salt`` and
other fields from any client. When the server is to end, it accepts no more connections and finishes
the answers that it has begun; a gateway whose connection is refused asks another replica. Then all
sessions are saved to the tier that all replicas share.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from engines.base import TIERS, Engine, EngineError, SessionRef, SessionReport
from engines.http import BearerGate

START_POLL_S: Final = 0.05
log = logging.getLogger("thermocline.ray")
AT_ONCE: Final = 8
POLL_S: Final = 0.2
SHARED: Final = next(name for name, kind in TIERS.items() if kind.is_shared)


class Front:
    """Serves ``app`` on a free port of ``host``."""

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=1024)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            BearerGate(app, token), log_config=None, access_log=False, lifespan="on"
        )
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are accepted. Raises ``RuntimeError``: ``app`` did not start."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="front")
        while not self._server.started:
            if self._serving.done():
                raise RuntimeError("vLLM's HTTP application did not start")
            await asyncio.sleep(START_POLL_S)

    @property
    def serves(self) -> bool:
        """True while the server runs."""
        return self._serving is not None and not self._serving.done()

    async def end(self, within_s: float) -> bool:
        """Refuse new connections and wait for the answers; return False if some had to be cut."""
        if self._serving is None:
            return True
        began = asyncio.get_running_loop().time()
        self._server.config.timeout_graceful_shutdown = max(1, int(within_s))
        self._server.should_exit = True
        await self._serving
        return asyncio.get_running_loop().time() - began < within_s


async def save_all(engine: Engine, within_s: float) -> int:
    """Have every session packed and moved to the shared tier; return the number that is there.

    A session that is not saved in time costs a prefill.
    """
    try:
        async with asyncio.timeout(within_s):
            while (await engine.stats()).save_queue_bytes:
                await asyncio.sleep(POLL_S)
            reports = await engine.sessions()
            places = asyncio.Semaphore(AT_ONCE)
            return sum(await asyncio.gather(*(_saved(engine, x, places) for x in reports)))
    except (EngineError, TimeoutError) as error:
        log.warning("not all sessions were saved: %s", error or "no time was left")
        return 0


async def _saved(engine: Engine, session: SessionReport, places: asyncio.Semaphore) -> bool:
    async with places:
        try:
            reference = SessionRef(session.tenant, session.id, b"")
            done = await engine.demote(reference, SHARED)
        except EngineError as error:
            log.warning("session %s was not saved: %s", session.id, error)
            return False
        return done.report is not None and done.report.tier == SHARED
