"""Server-sent events: framing, and a response that notices at once when its reader has left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engines.asgi import ClientGone, while_client_stays

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# A comment this often while nothing else is sent, so that no proxy takes us for dead.
KEEPALIVE_S = 5.0

_encode = msgspec.json.Encoder().encode


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every client ignores."""
    return f": {text}\n\n".encode()


class SseResponse(Response):
    """Sends ``chunks`` as they come; in every case ``closing`` is closed at the end.

    A failure in the middle becomes one last event, the one ``on_error`` makes of it: the status
    line has long been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        headers: Mapping[str, str],
        closing: AsyncExitStack,
        on_error: Callable[[Exception], Mapping[str, Any]],
        keepalive_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]  # Response measured an empty body
        self._chunks = chunks
        self._closing = closing
        self._on_error = on_error
        self._keepalive_s = keepalive_s
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._closing:
            try:
                await while_client_stays(receive, lambda: self._send_all(send))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (ClientGone, OSError):
                logger.debug("the client left in mid-stream")

    async def _send_all(self, send: Send) -> None:
        """Send everything but the end, which would look like a disconnect to who watches."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        keepalive = asyncio.create_task(self._keep_alive(send))
        try:
            async for chunk in self._chunks:
                await self._send(send, chunk)
        except OSError:
            raise
        except Exception as error:  # the edge of the process: the client must see an end
            await self._send(send, event(self._on_error(error)))
        finally:
            keepalive.cancel()
            await asyncio.gather(keepalive, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keepalive_s)
            if time.monotonic() - self._last_sent >= self._keepalive_s:
                await self._send(send, comment("keepalive"))

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
