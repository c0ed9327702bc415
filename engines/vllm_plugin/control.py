"""The plug-in's end of the gateway's control connection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from typing import Final

from engines.vllm_plugin.verbs import Verbs
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

logger = logging.getLogger("thermocline.vllm")

# A peer that lets so much pile up does not read; it is cut off and will connect again.
MAX_UNSENT_BYTES: Final = 16 << 20


class ControlServer:
    """Every connection starts with a ``Hello`` that shows the token."""

    def __init__(self, token: str, welcome: Welcome, verbs: Verbs) -> None:
        self._token = token
        self._welcome = welcome
        self._verbs = verbs
        self._greeted: set[asyncio.StreamWriter] = set()

    async def serve(self, address: str) -> asyncio.Server:
        """``unix:/path`` or ``tcp://host:port``. Raises ``OSError``."""
        scheme, _, rest = address.partition(":")
        if scheme == "unix":
            Path(rest).unlink(missing_ok=True)
            server = await asyncio.start_unix_server(self._converse, rest)
            Path(rest).chmod(0o600)
            return server
        host, _, port = rest.removeprefix("//").rpartition(":")
        return await asyncio.start_server(self._converse, host.strip("[]"), int(port))

    def publish(self, notice: Notice) -> None:
        for writer in list(self._greeted):
            self._send(writer, notice)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Verbs run side by side: one that moves KV must not hold up the others.
            async with asyncio.TaskGroup() as group:
                while True:
                    request = await read_request(reader)
                    group.create_task(self._serve(request, writer))
        except* (EOFError, ConnectionError, WireError):
            pass  # the gateway went away, and will come back with a new connection
        finally:
            self._greeted.discard(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

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
                return await self._verbs.demote(verb)
            case Prefetch():
                return await self._verbs.prefetch(verb)
            case Pin() | Unpin():
                return await self._verbs.pin(verb)
            case Forget():
                return await self._verbs.forget(verb)
            case ListSessions():
                return Sessions(await self._verbs.sessions())
            case GetStats():
                return Stats(await self._verbs.stats())
            case _:
                return Refused(f"{type(verb).__name__} is not known here")
