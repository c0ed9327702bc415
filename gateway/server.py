"""Serves the app: uvicorn with bounded request heads and a drain before the end.

uvicorn answers SIGTERM by closing its listening socket at once. Here the first signal starts the
drain: the server goes on answering (503 for new turns, /readyz says why) until the running turns
are done or ``drain_s`` is over. The second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import GatewayConfig
from gateway.context import Gateway
from gateway.errors import Failure

log = logging.getLogger("thermocline.gateway")

CLOSE_CONNECTIONS_S = 5


def serve(app: FastAPI, config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; runs an event loop of its own."""
    server_of(app, config).run()


def server_of(app: FastAPI, config: GatewayConfig) -> DrainingServer:
    """Make the server; nothing runs yet."""
    protocol = type("Protocol", (BoundedProtocol,), {"limits": config})
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
        app.state.gateway,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets running turns finish before it ends. See above."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        # What exists now stays for good: the garbage collector need not visit it again and again.
        gc.collect()
        gc.freeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Hand a signal to the event loop; called in a signal handler.

        Unlike uvicorn's it does not raise the signal once more at the end, so the caller of
        ``run`` can still clean up.
        """
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        if self._draining is not None:
            log.warning("second signal: ending at once")
            self.should_exit = self.force_exit = True
            return
        self._draining = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        log.info("draining: no new turns, %d running", self._gateway.sessions.num_running)
        try:
            await self._gateway.drain()
        finally:
            self.should_exit = True


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the size of a request's head and on its time."""

    limits = GatewayConfig()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._head_timer is None:  # first bytes on a connection that was kept alive
                self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        nbytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if nbytes > self.limits.max_header_bytes:  # a head that came in one piece
            self._too_large = True
            raise ValueError("the parser turns this into a call of send_400_response")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an offer to speak WebSocket or HTTP/2, as RFC 9110 (7.8) allows.

        uvicorn would advise the operator to install something.
        """
        log.debug("an offer to upgrade the protocol was ignored")

    def send_400_response(self, msg: str) -> None:
        self._refuse(_TOO_LARGE if self._too_large else Failure(400, msg, None, "bad_http"))

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        self._refuse(Failure(408, "The request's head took too long.", None, "head_timeout"))

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, failure: Failure) -> None:
        """Answer without the app, and close: what follows on this connection cannot be parsed."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        body = failure.json()
        head = (
            f"HTTP/1.1 {failure.status} {_REASONS[failure.status]}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


_TOO_LARGE = Failure(431, "The request's head is too large.", None, "head_too_large")
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
