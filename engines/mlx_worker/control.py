"""The engine's end of the control connection: verbs in, replies and notices out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Final

from engines.mlx_worker.keeping import Cause
from engines.mlx_worker.reports import Reports
from engines.mlx_worker.verbs import Verbs
from engines.wire import (
    Answer,
    Demote,
    Forget,
    GetStats,
    Hello,
    ListSessions,
    Notice,
    Pin,
    Prefetch,
    Refused,
    Reply,
    Request,
    Sessions,
    Stats,
    Unpin,
    Verb,
    Welcome,
    WireError,
    frame,
    read_request,
)
from kvstore.records import SessionRef

logger = logging.getLogger(__name__)

# A peer that lets so much pile up does not read; it is cut off and will connect again.
MAX_UNSENT_BYTES: Final = 16 << 20


class ControlServer:
    """Every connection starts with a ``Hello`` that shows the token."""

    def __init__(self, token: str, welcome: Welcome, verbs: Verbs) -> None:
        self._token = token
        self._welcome = welcome
        self._verbs = verbs
        self._greeted: set[asyncio.StreamWriter] = set()

    async def serve(self, path: str) -> asyncio.Server:
        return await asyncio.start_unix_server(self._converse, path)

    def publish(self, notice: Notice) -> None:
        for writer in list(self._greeted):
            self._send(writer, notice)

    def close(self) -> None:
        for writer in list(self._greeted):
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Verbs run side by side: one that waits for a save must not hold up the others.
            async with asyncio.TaskGroup() as group:
                while True:
                    request = await read_request(reader)
                    group.create_task(self._serve(request, writer))
        except* (EOFError, ConnectionError, WireError):
            pass  # the gateway went away, and will come back with a new connection
        finally:
            self._greeted.discard(writer)
            writer.close()

    async def _serve(self, request: Request, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(request.verb, writer)
        except Exception as error:  # the edge of this process: the gateway gets an answer
            logger.exception("%s failed", type(request.verb).__name__)
            answer = Refused(f"{type(error).__name__}: {error}")
        self._send(writer, Reply(request.number, answer))

    def _send(self, writer: asyncio.StreamWriter, message: Reply | Notice) -> None:
        if writer.is_closing():
            return
        writer.write(frame(message))
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            writer.transport.abort()

    async def _answer(self, verb: Verb, writer: asyncio.StreamWriter) -> Answer:
        if isinstance(verb, Hello):
            if not compare_digest(verb.token.encode(), self._token.encode()):
                return Refused("wrong token")
            self._greeted.add(writer)
            return self._welcome
        if writer not in self._greeted:
            return Refused("say hello first")
        return await self._obey(verb)

    async def _obey(self, verb: Verb) -> Answer:
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
                return Sessions(await self._verbs.sessions())
            case GetStats():
                return Stats(await self._verbs.stats())
            case _:
                return Refused(f"{type(verb).__name__} is not known here")


class Notifier:
    """Turns changes of sessions into notices. Changes that come close together share a look."""

    def __init__(
        self,
        reports: Reports,
        publish: Callable[[Notice], None],
        saved: Callable[[SessionRef], Awaitable[None]],
    ) -> None:
        """``saved`` is awaited for every session that has just been saved."""
        self._reports = reports
        self._publish = publish
        self._saved = saved
        self._changes: dict[tuple[str, str, Cause], SessionRef] = {}
        self._changed = asyncio.Event()

    def hear(self, cause: Cause, session: SessionRef) -> None:
        """On the event loop."""
        change = (session.tenant, session.id, cause)
        self._changes.pop(change, None)  # the latest of its kind, in its place in time
        self._changes[change] = session
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            changes, self._changes = self._changes, {}
            try:
                await self._tell(changes)
            except Exception:  # the edge of this task: later notices matter more than this one
                logger.exception("a notice could not be written")

    async def _tell(self, changes: dict[tuple[str, str, Cause], SessionRef]) -> None:
        for (_, _, cause), session in changes.items():
            if cause == "saved":
                await self._saved(session)
            report = await asyncio.to_thread(self._reports.session, session)
            self._publish(Notice(cause, report or self._reports.absent(session)))
