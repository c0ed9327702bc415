"""Serves the app: uvicorn with a bounded protocol (``edge``) and a drain before the end.

On SIGTERM, uvicorn closes its listening socket at once. Here the first signal starts a drain: the
server goes on answering (503 for new turns and at /readyz) until the running turns are done or
``drain_s`` is over. The second signal cuts them: streams end with an error event.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from gateway.config import GatewayConfig
from gateway.edge.connections import Connections, most_connections, open_files_limit
from gateway.edge.protocol import EdgeProtocol
from gateway.gateway import Gateway

log = logging.getLogger("thermocline.gateway")

CLOSE_CONNECTIONS_S = 5


def server_of(app: FastAPI, config: GatewayConfig) -> DrainingServer:
    """Make the server; nothing runs yet."""
    gateway: Gateway = app.state.gateway
    places = Connections(
        most_connections(open_files_limit(), config.max_connections),
        config.max_connections_per_address,
        config.trusted_proxies,
        gateway.metrics,
    )
    protocol = type("Protocol", (EdgeProtocol,), {"limits": config, "places": places})
    return DrainingServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=protocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        ),
        gateway,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets running turns finish before it exits. See the module's text."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # The objects made so far stay for good: the garbage collector need not visit them again.
        gc.collect()
        gc.freeze()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and end the app's lifespan also after a forced exit, where uvicorn does not.

        The app would otherwise be cancelled in its lifespan, and log a traceback.
        """
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Hand a signal to the event loop; called in a signal handler.

        Unlike uvicorn's own, it does not raise the signal again at the end, so the caller of
        ``run`` can still clean up.
        """
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self._draining = loop.create_task(self._drain_and_exit())
        elif self._cutting is None:
            log.warning("second signal: ending at once")
            self._cutting = loop.create_task(self._cut_and_exit(self._draining))
        else:
            self.should_exit = self.force_exit = True

    async def _cut_and_exit(self, draining: asyncio.Task[None]) -> None:
        draining.cancel()
        try:
            await asyncio.wait([draining])
            self.should_exit = False  # the cancelled drain has set it
            await self._gateway.cut()
        finally:
            self.should_exit = self.force_exit = True

    async def _drain_and_exit(self) -> None:
        log.info("draining: no new turns, %d running", self._gateway.num_running)
        try:
            await self._gateway.drain()
        finally:
            self.should_exit = True
