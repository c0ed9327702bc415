"""Bounds open connections, in total and per address, and sees each of them to its end.

At the total limit, a new connection takes the place of the one that has been idle longest. If none
is idle, the new one is refused, except for a few more at the admins' own address. An IPv6 /64
counts as one address, since one client has all of it. The connections of trusted proxies, which
serve many clients, count in the total only.
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

MAX_CONNECTIONS = 16_384  # even if the limit of open files would allow more
# Open files besides clients' connections: one to the engine for each running turn, the engine's
# own, logs, and connections that are about to be refused.
_RESERVED_LEAST = 192
_RESERVED_MOST = 1024
CLOSE_S = 5.0  # for the client to take the last bytes of an answer
LINGER_S = 5.0  # for the rest of a request that was answered early
MAX_DISCARDED_BYTES = 128 << 20  # of that rest
LOOK_EVERY_S = 0.25
BEGINNING = b"HTTP/1.1 "  # of every answer
MAX_JOINED_BYTES = 64 << 10  # of a body that is written together with its head
MAX_ZEROS = 8  # written before a chunk's length, which then has at most Go's 16 digits
log = logging.getLogger("thermocline.gateway")
LOG_EVERY_S = 10.0
ADMIN_PLACES = 8  # beyond the total, so that admins can reach a full server


def open_files_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def most_connections(num_files: int, wanted: int) -> int:
    """Return how many connections may be open, at least one.

    Args:
        num_files: how many files this process may have open.
        wanted: the configured limit; 0 = ``MAX_CONNECTIONS``, or fewer if files are few.
    """
    reserved = min(max(num_files // 4, _RESERVED_LEAST), _RESERVED_MOST)
    return max(1, min(wanted or MAX_CONNECTIONS, num_files - reserved))


def close_soon(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Close a connection, and abort it if the client does not take its last bytes in time."""
    if not transport.is_closing():
        transport.close()
        loop.call_later(CLOSE_S, transport.abort)


class AnswerTransport:
    """The transport to which uvicorn writes an answer; it leaves closing to a callback.

    If the body follows the head at once, both are sent in one system call: each call wakes the
    client, and costs a tenth of the gateway's time for a short request.
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
        """Send what was written, then call the ``close`` of the constructor."""
        self._send_head()
        self._close()

    def write_ahead(self) -> None:
        """Write the next byte of ``BEGINNING``, if one is left; called before the answer's head."""
        if self._num_ahead < len(BEGINNING):
            self._transport.write(BEGINNING[self._num_ahead : self._num_ahead + 1])
            self._num_ahead += 1

    def write_zero(self) -> None:
        """Write a leading zero of the next chunk's length, ``MAX_ZEROS`` times at most.

        Called after the head of an answer in chunks.
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
    """Sends an answer without chunks to a client of HTTP/1.0; its end is that of the connection.

    uvicorn would write chunks if the length is not known.
    """

    def __init__(self, cycle: RequestResponseCycle, send: Send) -> None:
        self._cycle = cycle
        self._send = send
        self._has_length = False

    async def send(self, message: Message) -> None:
        """Pass a message on; set uvicorn's own fields so that it writes the body unchanged."""
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            self._has_length = b"content-length" in names
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class Lingering:
    """Reads and drops the rest of a request that was answered early, for a while.

    Closing at once would reset the connection, and the client, which is still writing, would lose
    the answer.
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
        """Cancel the timer, since the connection has ended."""
        self._timer.cancel()


class HalfClosed:
    """Finds out whether a client that has closed its sending side still waits for the answer.

    A client that has half closed the connection and one that is gone look the same until bytes are
    written: the latter answers with a reset. Two kinds of bytes can be written before the answer
    is known: its first bytes, which are always the same, and between chunks, leading zeros of the
    next chunk's length. One is written at once, the others at growing intervals.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        write_ahead: Callable[[], None],
    ) -> None:
        """
        Args:
            write_ahead: writes one more of those bytes, if there is one.
        """
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
        """Cancel the timer, since the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()


class Evictable(Protocol):
    """A connection that can be closed while it is idle."""

    def evict(self) -> None:
        """Close this idle connection now."""


class ConnectionObserver(Protocol):
    """Counts connections for the metrics."""

    def connections_open(self, number: int) -> None:
        """Note how many connections are open."""

    def connection_ended(self, reason: str) -> None:
        """Count a connection that was refused or cut; ``reason``: the metric's label."""


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
        """
        Args:
            trusted: networks such as ``127.0.0.0/8`` whose addresses have no limit of their own.
        """
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._trusted = [ipaddress.ip_network(x) for x in trusted]
        self._observer = observer
        self._clock = clock
        self._clients: dict[Evictable, str] = {}  # as ``_client`` names them
        self._per_client: Counter[str] = Counter()
        self._idle: dict[Evictable, None] = {}  # longest idle first
        self._unlogged: Counter[str] = Counter()  # ends since the last log line
        self._logged_at = -LOG_EVERY_S

    def admit(self, connection: Evictable, address: str, *, for_admins: bool = False) -> str:
        """Give a new connection a place, or return in a word why not; "" if it has one.

        Args:
            address: the client's; "" if it has none (a unix socket).
            for_admins: True for a connection to the admins' own address.
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
        """Note that a request has begun, so that the connection keeps its place."""
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
        """Count a connection that was refused or cut; log the counts every ``LOG_EVERY_S``."""
        self._observer.connection_ended(reason)
        self._unlogged[reason] += 1
        now = self._clock()
        if now - self._logged_at < LOG_EVERY_S:
            return
        self._logged_at = now
        words = ", ".join(f"{number} {why}" for why, number in sorted(self._unlogged.items()))
        log.warning("connections were ended: %s; %d are open", words, len(self._clients))
        self._unlogged.clear()

    def _client(self, address: str) -> str:
        """Return the name under which an address is counted; "" if it has no limit of its own."""
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
