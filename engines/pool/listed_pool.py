"""The replicas of a model that an orchestrator starts and ends, read from a list that it serves.

A leaving replica finishes its requests and saves its sessions. It gets no new request and no verb
but deletions, and is removed once its control connection ends. A later replica may be given its
disk, so every new replica is sent the deletions of the last day, except those of sessions that
have begun again since.

While the list cannot be read, the last one remains valid; the control connection of a replica shows
whether it is still there.

The tokens between a gateway and replicas are derived from a shared secret. So each machine needs
only one file (``store.secret_file``), and no token is in a command line, in a configuration or in
the database of the orchestrator.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec

from engines.base import SAVE_S, Engine, EngineError, EngineUnavailable, SessionRef
from engines.client.connection import HttpAddress, HttpExchange
from engines.pool.replica import Replica, ReplicaDeletions
from engines.pool.replica_choice import Homes
from engines.pool.replica_pool import MOVES_AT, ReplicaPool

log = logging.getLogger("thermocline.engines")

LIST_S: Final = 1.0  # between two readings of the list
GONE_S: Final = 24 * 3600.0  # how long a removed replica's disk may return
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
        name: unique, also among earlier replicas.
        url: the address of its HTTP server.
        control: the address of its control connection.
        leaving: it accepts no new requests, since it is about to end.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    url: Annotated[str, msgspec.Meta(max_length=500, pattern="^https?://")]
    control: Annotated[str, msgspec.Meta(max_length=500, pattern="^(tcp|unix):")]
    leaving: bool = False


class Listing(msgspec.Struct, frozen=True):
    """All replicas of one model."""

    replicas: Annotated[list[ListedReplica], msgspec.Meta(max_length=MAX_REPLICAS)]


def read_listing(body: bytes) -> list[ListedReplica]:
    """Decode a list. Raises ``ValueError``: it is malformed, or two replicas have one name."""
    replicas = msgspec.json.decode(body, type=Listing).replicas
    if len({x.name for x in replicas}) < len(replicas):
        raise ValueError("two replicas have one name")
    return replicas


class ReplicaList:
    """Reads the list of replicas at one address."""

    def __init__(self, url: str, token: str) -> None:
        """``token``: the bearer token that the list asks for. Raises ``EngineError``: a bad url."""
        self._url = url
        self._address = HttpAddress("", url)
        self._path = "" if urlsplit(url).path.strip("/") else "/"  # the address adds the path
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


class ListedPool(ReplicaPool):
    """A pool of the replicas in a list, which is read every ``LIST_S``."""

    def __init__(
        self,
        read: Callable[[], Awaitable[list[ListedReplica]]],
        make: Callable[[ListedReplica], Engine],
        homes: Homes,
        moves_at: int = MOVES_AT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            read: reads the list; raises ``EngineError``.
            make: makes the client of a replica; nothing is started yet.
        """
        super().__init__({}, homes, moves_at, clock)
        self._read = read
        self._make = make
        self._watching: asyncio.Task[None] | None = None
        self._list_trouble = "the list of replicas has not been read yet"
        self._gone_until = float("-inf")  # until then a disk may return
        self._deleted = ReplicaDeletions()  # that a returning disk may lack

    @property
    def trouble(self) -> str:
        if self.ready:
            return ""
        return next((x.trouble for x in self._replicas if x.trouble), self._list_trouble)

    @property
    def gave_up(self) -> bool:
        return False

    def restart(self, why: str) -> None:
        log.warning("the engine is not restarted, since an orchestrator runs it: %s", why)

    async def start(self) -> None:
        await super().start()
        self._watching = asyncio.create_task(self._watch(), name="replica-list")

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await super().stop(drain_s, save_s)

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # top level of this task: the known replicas stay
                log.exception("reading the list of replicas failed; it is read again")
            await asyncio.sleep(LIST_S)

    async def look(self) -> None:
        """Read the list; add replicas that are new in it, and remove those that are gone."""
        try:
            listed = {x.name: x for x in await self._read()}
        except EngineError as error:
            if self._list_trouble != str(error):
                log.warning("%s; the known replicas stay in use", error)
            self._list_trouble = str(error)
            return
        self._list_trouble = "" if listed else "the list of replicas is empty"
        known = {x.name for x in self._replicas}
        for replica in list(self._replicas):
            now = listed.get(replica.name)
            replica.leaving = now is None or now.leaving
            if now is None and not replica.engine.ready:
                await self._remove_gone(replica.name)
        for one in listed.values():
            if one.name not in known and not one.leaving:
                log.info("replica %s was added, at %s", one.name, one.url)
                await self._add_listed(one)

    async def _add_listed(self, one: ListedReplica) -> None:
        replica = await self.add(one.name, self._make(one))
        self._deleted.expire(self._clock())
        for session in self._deleted:
            if session.name not in replica.owed:
                replica.owed.add(session)

    async def _remove_gone(self, name: str) -> None:
        log.info("replica %s is gone", name)
        replica = await self.remove(name)
        self._gone_until = self._clock() + GONE_S
        self._keep_deletions(replica.owed)

    def _note_deletion(self, session: SessionRef) -> None:
        super()._note_deletion(session)
        if self._clock() < self._gone_until:
            self._keep_deletions([session])

    def _served(self, session: SessionRef, replica: Replica) -> None:
        super()._served(session, replica)
        self._deleted.discard(session)

    def _keep_deletions(self, deleted: Iterable[SessionRef]) -> None:
        """Keep deletions for replicas that are added later; the oldest are dropped first."""
        now = self._clock()
        self._deleted.expire(now)
        for session in deleted:
            self._deleted.discard(session)
            self._deleted.make_room(session.tenant)
            self._deleted.add(session, now + GONE_S)
