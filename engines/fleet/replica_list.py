"""Reads the list of replicas from the address where an orchestrator serves it."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

from engines.base import EngineUnavailable
from engines.client.address import HttpAddress
from engines.client.http_exchange import HttpExchange
from engines.fleet.listing import MAX_LISTING_BYTES, ListedReplica, read_listing

READ_S: Final = 5.0


class ReplicaList:
    """The list at one address."""

    def __init__(self, url: str, token: str) -> None:
        """``token``: the bearer token that the list asks for. Raises ``EngineError``: a bad url."""
        self._url = url
        self._address = HttpAddress("", url)
        self._path = "" if urlsplit(url).path.strip("/") else "/"  # the address has the rest
        self._headers = {"authorization": f"Bearer {token}"}

    async def read(self) -> list[ListedReplica]:
        """Read the list. Raises ``EngineUnavailable``, with a sentence."""
        try:
            async with asyncio.timeout(READ_S):
                status, body = await self._get()
            if status != 200:
                raise EngineUnavailable(f"the list of replicas at {self._url}: status {status}")
            return read_listing(body)
        except TimeoutError as error:
            raise EngineUnavailable(f"no list of replicas came from {self._url}") from error
        except ValueError as error:
            raise EngineUnavailable(f"no list of replicas at {self._url}: {error}") from error

    async def _get(self) -> tuple[int, bytes]:
        exchange, body = HttpExchange(self._address, READ_S), bytearray()
        try:
            await exchange.send(self._path, self._headers, b"")
            await exchange.head()
            async for chunk in exchange.chunks():
                body += chunk
                if len(body) > MAX_LISTING_BYTES:
                    raise ValueError("it is too long")
            return exchange.status, bytes(body)
        finally:
            exchange.close()
