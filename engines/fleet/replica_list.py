"""The list of the replicas that an orchestrator starts and ends: its form, its tokens, its reader.

The tokens between a gateway and replicas are made of a shared secret: one file
(``store.secret_file``) on each machine is all that has to be handed out, and no token is in a
command line, in a configuration or in the database of the orchestrator.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec

from engines.base import EngineUnavailable
from engines.client.connection import HttpAddress
from engines.client.http_exchange import HttpExchange

MAX_REPLICAS: Final = 1000
MAX_LISTING_BYTES: Final = 1 << 20
READ_S: Final = 5.0


def engine_token(secret: bytes) -> str:
    """Return the bearer token of both addresses of a replica."""
    return _token(secret, "replica")


def list_token(secret: bytes) -> str:
    """Return the bearer token of the list of replicas."""
    return _token(secret, "list of replicas")


def ray_token(secret: bytes) -> str:
    """Return the token of a Ray that ``engines.on_ray`` starts."""
    return _token(secret, "ray")


def _token(secret: bytes, purpose: str) -> str:
    return hmac.digest(secret, f"thermocline token: {purpose}".encode(), "sha256").hex()


class ListedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        name: differs from all others', earlier ones included.
        url: the address of its HTTP server.
        control: the address of its control connection.
        leaving: it takes no new sessions, for it is about to end.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    url: Annotated[str, msgspec.Meta(max_length=500, pattern="^https?://")]
    control: Annotated[str, msgspec.Meta(max_length=500, pattern="^(tcp|unix):")]
    leaving: bool = False


class Listing(msgspec.Struct, frozen=True):
    """All replicas of one model."""

    replicas: Annotated[list[ListedReplica], msgspec.Meta(max_length=MAX_REPLICAS)]


def read_listing(body: bytes) -> list[ListedReplica]:
    """Decode a list. Raises ``ValueError``: it is none, or two replicas have one name."""
    replicas = msgspec.json.decode(body, type=Listing).replicas
    if len({x.name for x in replicas}) < len(replicas):
        raise ValueError("two replicas have one name")
    return replicas


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
