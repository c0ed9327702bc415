"""Ends connections so that the last answer arrives, and none stays open for want of a reader."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

CLOSE_S = 5.0  # for the last bytes of an answer to be taken
LINGER_S = 5.0  # for the rest of a request that was answered early
MAX_DISCARDED_BYTES = 128 << 20  # of that rest
PROBE_EVERY_S = 0.25
# A client has to skip any number of these (RFC 9110, 15.2); a closed socket answers with a reset.
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


def close_soon(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Close, and abort if what was written is not taken in time."""
    if not transport.is_closing():
        transport.close()
        loop.call_later(CLOSE_S, transport.abort)


class AnswerTransport:
    """Stands for the connection where an answer is sent: writes at once, does not close itself."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


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
    answers what is written to it with a reset.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        answering: Callable[[], bool],
    ) -> None:
        """``answering``: whether the answer's head is out, after which nothing may be put in."""
        self._loop = loop
        self._transport = transport
        self._answering = answering
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)
        self._timer: asyncio.TimerHandle | None = None
        self._probe()

    def _probe(self) -> None:
        if self._transport.is_closing():
            return
        if self._poll.poll(0):  # reset, or an error
            self._transport.abort()
            return
        if not self._answering():
            self._transport.write(PROBE)
        self._timer = self._loop.call_later(PROBE_EVERY_S, self._probe)

    def stop(self) -> None:
        """Ask no more: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
