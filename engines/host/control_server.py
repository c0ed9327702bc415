"""The engine's end of the control connection: verbs in, replies and notices out.

All engines use this server; each passes its own ``SessionVerbs``. It runs inside the engine's
process, for vLLM in an environment with few of our dependencies, so it imports only the standard
library, ``engines.wire`` and a few modules of ``kvstore`` that use no arrays.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import Final, Protocol

import msgspec

from engines.config import CalibrationOrder
from engines.wire import (
    PAGE_BYTES,
    Adopt,
    Adopted,
    CodecReport,
    ControlReply,
    ControlRequest,
    Demote,
    Done,
    EngineReport,
    Forget,
    GetStats,
    Hello,
    LimitTenants,
    ListSessions,
    Measure,
    Notice,
    Pin,
    Prefetch,
    Refused,
    SessionRef,
    SessionReport,
    Sessions,
    Stats,
    TenantUses,
    TierName,
    Unpin,
    Verb,
    VerbAnswer,
    Welcome,
    WireError,
    absent,
    frame,
    read_request,
)
from kvstore.session import TenantLimits

MAX_UNSENT_BYTES: Final = 16 << 20
logger = logging.getLogger(__name__)
MAX_WORDS: Final = 2000  # longest error message, in characters


def private_socket(path: Path) -> socket.socket:
    """Bind a unix socket that only this user can connect to. Raises ``OSError``."""
    path.unlink(missing_ok=True)  # left by a process that was killed
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError:
        bound.close()
        raise
    return bound


def send_bounded(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Send without waiting; abort the connection if over ``MAX_UNSENT_BYTES`` pile up unread."""
    if writer.is_closing():
        return
    writer.write(body)
    if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
        writer.transport.abort()


class SessionVerbs(Protocol):
    """The verbs that an engine implements; called on the server's event loop, several at once.

    An exception becomes a ``Refused`` with its message.
    """

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        """See ``engines.wire.Demote``; the other verbs are described there, too."""

    async def prefetch(self, session: SessionRef) -> Done: ...

    async def pin(self, session: SessionRef, pinned: bool) -> Done: ...

    async def forget(self, session: SessionRef) -> Done: ...

    async def sessions(self) -> list[SessionReport]: ...

    async def stats(self) -> EngineReport: ...

    async def adopt(self) -> CodecReport: ...

    async def measure(self, order: CalibrationOrder | None) -> CodecReport: ...

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses: ...


class ControlServer:
    """Serves the control connections; each starts with a ``Hello`` that carries the token."""

    def __init__(
        self, token: str, welcome: Callable[[], Awaitable[Welcome]], verbs: SessionVerbs
    ) -> None:
        """``welcome`` is called for every ``Hello`` and returns the answer to it."""
        self._token = token.encode()
        self._welcome = welcome
        self._verbs = verbs
        self._greeted: set[asyncio.StreamWriter] = set()

    async def serve(self, address: str) -> asyncio.Server:
        """Listen at ``unix:/path`` (this user only) or ``tcp://host:port``. Raises ``OSError``."""
        scheme, _, rest = address.partition(":")
        if scheme == "unix":
            return await asyncio.start_unix_server(self._converse, sock=private_socket(Path(rest)))
        host, _, port = rest.removeprefix("//").rpartition(":")
        return await asyncio.start_server(self._converse, host.strip("[]"), int(port))

    def publish(self, notice: Notice) -> None:
        """Send a notice to every connection that has said hello."""
        body = frame(notice)
        for writer in list(self._greeted):
            send_bounded(writer, body)

    def close(self) -> None:
        """End every connection."""
        for writer in list(self._greeted):
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Verbs run side by side: one that waits for a save must not hold up the others.
            async with asyncio.TaskGroup() as group:
                while True:
                    request = await read_request(reader)
                    if isinstance(request.verb, Hello):  # the verbs that follow need its outcome
                        await self._serve(request, writer)
                    else:
                        group.create_task(self._serve(request, writer))
        except* (EOFError, ConnectionError, WireError):
            pass  # the gateway went away, and will come back with a new connection
        finally:
            self._greeted.discard(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, request: ControlRequest, writer: asyncio.StreamWriter) -> None:
        try:
            # If the answer is too long for a frame, only this verb fails, not the connection.
            answer = await self._answer(request.verb, writer)
            self._notify_others(request.verb, answer, writer)
            body = frame(ControlReply(request.number, answer))
        except Exception as error:  # the process's edge: the gateway gets an answer in any case
            verb = type(request.verb).__name__
            is_foreseen = isinstance(error, TimeoutError | ConnectionError)  # a process is away
            logger.error("%s failed: %s", verb, _words(error), exc_info=not is_foreseen)
            body = frame(ControlReply(request.number, Refused(_words(error))))
        send_bounded(writer, body)

    def _notify_others(self, verb: Verb, answer: VerbAnswer, writer: asyncio.StreamWriter) -> None:
        """Send a notice of what a verb has changed to the other gateways that use this engine."""
        if not isinstance(answer, Done) or len(self._greeted) < 2:
            return
        match verb:
            case Forget():
                notice = Notice("lost", absent(verb.session), "forgotten")
            case Demote() | Prefetch() | Pin() | Unpin() if answer.report is not None:
                notice = Notice("moved", answer.report, "asked")
            case _:
                return
        body = frame(notice)
        for other in self._greeted - {writer}:
            send_bounded(other, body)

    async def _answer(self, verb: Verb, writer: asyncio.StreamWriter) -> VerbAnswer:
        if isinstance(verb, Hello):
            if not compare_digest(verb.token.encode(), self._token):
                return Refused("wrong token")
            welcome = await self._welcome()
            self._greeted.add(writer)
            return welcome
        if writer not in self._greeted:
            return Refused("say hello first")
        return await self._execute(verb)

    async def _execute(self, verb: Verb) -> VerbAnswer:
        match verb:
            case Demote():
                return await self._verbs.demote(verb.session, verb.tier)
            case Prefetch():
                return await self._verbs.prefetch(verb.session)
            case Pin() | Unpin():
                return await self._verbs.pin(verb.session, isinstance(verb, Pin))
            case Forget():
                return await self._verbs.forget(verb.session)
            case ListSessions():
                reports = await self._verbs.sessions()
                # Sorting and encoding thousands of reports would block the event loop.
                return await asyncio.to_thread(page_of, reports, verb.after)
            case GetStats():
                return Stats(await self._verbs.stats())
            case Adopt():
                return Adopted(await self._verbs.adopt())
            case Measure():
                return Adopted(await self._verbs.measure(verb.order))
            case LimitTenants():
                return await self._verbs.limit_tenants(verb.tiers)
            case _:
                return Refused(f"{type(verb).__name__} is not known here")


def page_of(reports: Iterable[SessionReport], after: tuple[str, str] | None) -> Sessions:
    """Return the page that ``ListSessions(after)`` asks for: up to ``PAGE_BYTES``, one at least."""
    rest = sorted(
        (x for x in reports if after is None or (x.tenant, x.id) > after),
        key=lambda x: (x.tenant, x.id),
    )
    nbytes = 0
    for i, report in enumerate(rest):
        nbytes += len(msgspec.msgpack.encode(report))
        if i and nbytes > PAGE_BYTES:
            return Sessions(rest[:i], more=True)
    return Sessions(rest)


def _words(error: Exception) -> str:
    """Return an error's description, shortened and without lone surrogates."""
    said = f"{type(error).__name__}: {error}"[:MAX_WORDS]
    return said.encode("utf-8", "replace").decode()
