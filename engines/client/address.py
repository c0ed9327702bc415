"""The address of an engine's data plane: a unix socket, or a URL."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from engines.base import EngineError
from engines.client.http_response import HttpResponse


class HttpAddress:
    """Connects to an engine's data plane, and writes heads of requests to it."""

    def __init__(self, socket: str, url: str = "") -> None:
        """``url`` (http or https) is used if it is not empty, else the unix ``socket``.

        Raises:
            EngineError: ``url`` is neither.
        """
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise EngineError(f"engine.url must be like http://host:port, not {url!r}")
        self._socket = "" if url else socket
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._hostname = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._netloc = parts.netloc.rpartition("@")[2] or "engine"
        self._prefix = parts.path.rstrip("/")

    async def connect(self, response: HttpResponse) -> asyncio.Transport:
        """Open a connection whose incoming bytes go to ``response``. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        if self._socket:
            transport, _ = await loop.create_unix_connection(lambda: response, self._socket)
        else:
            transport, _ = await loop.create_connection(
                lambda: response, self._hostname, self._port, ssl=self._tls
            )
        return transport

    def request_head(
        self, method: str, path: str, headers: Mapping[str, str], num_body_bytes: int
    ) -> bytes:
        """Write a request's head, up to and with the blank line.

        Raises:
            ValueError: a header would be more than one line.
        """
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {num_body_bytes}", "connection: close"]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header of the engine's request has more than one line")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
