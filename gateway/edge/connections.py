"""Bounds open connections, in total and per address; closes idle ones first, and ends them all.

At the limit the connection that has been idle longest is closed for a new one; where none is idle,
the new one is refused, except a few at the admins' own address. Each address may hold a bounded
number; an IPv6 /64 counts as one address, since one client has all of it. The connections of
trusted proxies, which serve many clients, are counted in the total only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_CONNECTIONS = 16_384  # where the limit of open files would allow more
# Files that are no connections of clients: one to the engine for each turn that runs, the engine's
# own, logs, and those that are about to be refused.
_RESERVED_LEAST = 192
_RESERVED_MOST = 1024
CLOSE_S = 5.0  # for the last bytes of an answer to be taken
LINGER_S = 5.0  # for the rest of a request that was answered early
MAX_DISCARDED_BYTES = 128 << 20  # of that rest
LOOK_EVERY_S = 0.25
BEGINNING = b"HTTP/1.1 "  # of every answer
MAX_JOINED_BYTES = 64 << 10  # of a body that goes with its head
MAX_ZEROS = 8  # before lengths of chunks: with them none has more digits than Go's parser reads, 16
log = logging.getLogger("thermocline.gateway")
LOG_EVERY_S = 10.0
ADMIN_PLACES = 8  # beyond the total: a full server can still be looked at


def open_files_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def most_connections(num_files: int, wanted: int) -> int:
    """Return how many connections may be open, at least one.

    Args:
        wanted: the setting; 0 = as many as suits.
    """
    reserved = min(max(num_files // 4, _RESERVED_LEAST), _RESERVED_MOST)
    return max(1, min(wanted or MAX_CONNECTIONS, num_files - reserved))


def close_soon(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Close, and abort if what was written is not taken in time."""
    if not transport.is_closing():
        transport.close()
        loop.call_later(CLOSE_S, transport.abort)


class AnswerTransport:
    """Stands for the connection where an answer is sent, and does not close itself.

    The head goes with the body that follows at once, if one does: each call of the system wakes the
    client, and costs a tenth of what the gateway spends on a short request.
    """

    __slots__ = ("_close", "_head", "_loop", "_num_ahead", "_num_zeros", "_transport") + (
        "is_closing",
        "write",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.write: Callable[[bytes], None] = self._hold
        self.is_closing = transport.is_closing
        self._transport = transport
        self._close = close
        self._loop = loop
        self._head = b""
        self._num_ahead = self._num_zeros = 0

    def close(self) -> None:
        """End the connection after what was written."""
        self._send_head()
        self._close()

    def write_ahead(self) -> None:
        """Write one byte more of ``BEGINNING``, while there is one.

        The head of the answer has not been written.
        """
        if self._num_ahead < len(BEGINNING):
            self._transport.write(BEGINNING[self._num_ahead : self._num_ahead + 1])
            self._num_ahead += 1

    def write_zero(self) -> None:
        """Write a zero before the length of the next chunk, which stays the same; a few times only.

        The head of the answer has been written; it says that chunks follow.
        """
        self._send_head()
        if self._num_zeros < MAX_ZEROS:
            self._transport.write(b"0")
            self._num_zeros += 1

    def _hold(self, head: bytes) -> None:
        self._head = head[self._num_ahead :]
        self.write = self._write_with_head
        self._loop.call_soon(self._send_head)

    def _write_with_head(self, body: bytes) -> None:
        if len(body) > MAX_JOINED_BYTES:
            self._send_head()
        head, self._head = self._head, b""
        self.write = self._transport.write
        self._transport.write(head + body)

    def _send_head(self) -> None:
        if self._head:
            self._write_with_head(b"")


class WithoutChunks:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks: its end is the connection's.

    uvicorn writes chunks wherever the length is not known.
    """

    def __init__(self, cycle: RequestResponseCycle, send: Send) -> None:
        self._cycle = cycle
        self._send = send
        self._has_length = False

    async def send(self, message: Message) -> None:
        """Pass a message on, with uvicorn's own counts set so that it takes it as it is."""
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class Lingering:
    """Drops the rest of a request whose answer has been sent, for a while.

    Closing at once would reset the connection, and the client, which is still writing, would lose
    the answer with it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._discarded_bytes = 0
        if transport.can_write_eof():
            transport.write_eof()
        self._timer = loop.call_later(LINGER_S, transport.abort)

    def received(self, nbytes: int) -> None:
        """Count bytes that were dropped; the connection ends when they are too many."""
        self._discarded_bytes += nbytes
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self._transport.abort()

    def stop(self) -> None:
        """Forget the timer: the connection has ended."""
        self._timer.cancel()


class HalfClosed:
    """Watches a client that has closed its sending side: does it still wait for the answer?

    That end looks the same whether a client has half closed or is gone. Only one that is gone
    answers what is written to it with a reset. What may be written, before the answer is known, are
    its first bytes, which are always the same, and between its chunks zeros before the length of
    the next: one at once, and the others ever more rarely.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        write_ahead: Callable[[], None],
    ) -> None:
        """``write_ahead`` writes one more of those bytes, if that may be."""
        self._loop = loop
        self._transport = transport
        self._write_ahead = write_ahead
        self._num_looks = 0
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._poll.poll(0):  # reset, or an error
            self._transport.abort()
            return
        if self._num_looks.bit_count() < 2:  # 0, 1, 2, 4, 8, ...
            self._write_ahead()
        self._num_looks += 1
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)

    def stop(self) -> None:
        """Look no more: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()


class Evictable(Protocol):
    """A connection that can be asked to go."""

    def evict(self) -> None:
        """Close an idle connection now."""


class ConnectionObserver(Protocol):
    """Counts connections for the operator."""

    def connections_open(self, number: int) -> None:
        """Note how many connections are open."""

    def connection_ended(self, reason: str) -> None:
        """Note a connection that was refused or cut; ``reason``: a metric's label."""


class Connections:
    """All open connections of one server. Runs on the event loop."""

    def __init__(
        self,
        max_total: int,
        max_per_address: int,
        trusted: Sequence[str],
        observer: ConnectionObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``trusted``: networks like ``127.0.0.0/8`` that ``max_per_address`` is not for."""
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._trusted = [ipaddress.ip_network(x) for x in trusted]
        self._observer = observer
        self._clock = clock
        self._clients: dict[Evictable, str] = {}  # of each open connection; "" = not counted
        self._per_client: Counter[str] = Counter()
        self._idle: dict[Evictable, None] = {}  # longest idle first
        self._unsaid: Counter[str] = Counter()  # ends since the last log line
        self._said_at = -LOG_EVERY_S

    def admit(self, connection: Evictable, address: str, *, for_admins: bool = False) -> str:
        """Give a new connection a place; return why not in a word, "" if it has one.

        Args:
            address: the client's, "" where it has none (a unix socket).
            for_admins: it came in where only admins do.
        """
        client = self._client(address)
        if client and self._per_client[client] >= self._max_per_address:
            self.ended("address")
            return "address"
        total = self._max_total + (ADMIN_PLACES if for_admins else 0)
        full = len(self._clients) >= self._max_total and not self._make_room()
        if full and len(self._clients) >= total:
            self.ended("total")
            return "total"
        self._clients[connection] = client
        if client:
            self._per_client[client] += 1
        self._idle[connection] = None
        self._observer.connections_open(len(self._clients))
        return ""

    def _make_room(self) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self.leave(oldest)
        self.ended("idle")
        oldest.evict()
        return True

    def busy(self, connection: Evictable) -> None:
        """Note that a request has begun: the connection keeps its place."""
        self._idle.pop(connection, None)

    def idle(self, connection: Evictable) -> None:
        """Note that a connection waits for its next request."""
        if connection in self._clients:
            self._idle[connection] = None

    def leave(self, connection: Evictable) -> None:
        """Take back the place of a connection that has ended; does nothing if it has none."""
        client = self._clients.pop(connection, None)
        self._idle.pop(connection, None)
        if client is None:
            return
        if client:
            self._per_client[client] -= 1
            if not self._per_client[client]:
                del self._per_client[client]
        self._observer.connections_open(len(self._clients))

    def ended(self, reason: str) -> None:
        """Count a connection that was refused or cut, and log a line now and then."""
        self._observer.connection_ended(reason)
        self._unsaid[reason] += 1
        now = self._clock()
        if now - self._said_at < LOG_EVERY_S:
            return
        self._said_at = now
        words = ", ".join(f"{number} {why}" for why, number in sorted(self._unsaid.items()))
        log.warning("connections were ended: %s; %d are open", words, len(self._clients))
        self._unsaid.clear()

    def _client(self, address: str) -> str:
        """Return the name that an address is counted under; "" if it is not."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return ""
        if isinstance(found, ipaddress.IPv6Address):
            found = found.ipv4_mapped or found
        if any(found in network for network in self._trusted):
            return ""
        if found.version == 6:
            return str(ipaddress.ip_network((found, 64), strict=False))
        return str(found)
