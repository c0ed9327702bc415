"""The fake engine's end of the control connection."""

from __future__ import annotations

import asyncio
from hmac import compare_digest

from engines.fake_worker.shelf import Shelf
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
    Sessions,
    Stats,
    Unpin,
    Verb,
    Welcome,
    WireError,
    frame,
    read_request,
)


class ControlServer:
    def __init__(self, token: str, welcome: Welcome) -> None:
        self._token = token
        self._welcome = welcome
        self._greeted: set[asyncio.StreamWriter] = set()

    def notify(self, notice: Notice) -> None:
        for writer in self._greeted:
            writer.write(frame(notice))

    def close(self) -> None:
        """End every connection."""
        for writer in self._greeted:
            writer.close()

    async def serve(self, path: str, shelf: Shelf) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._converse(reader, writer, shelf)

        return await asyncio.start_unix_server(connected, path)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shelf: Shelf
    ) -> None:
        try:
            while True:
                request = await read_request(reader)
                answer = self._answer(request.verb, shelf, writer in self._greeted)
                writer.write(frame(Reply(request.number, answer)))
                if isinstance(answer, Welcome):
                    self._greeted.add(writer)
                await writer.drain()
        except (EOFError, ConnectionError, WireError):
            pass  # the gateway went away; it will come back with a new connection
        finally:
            self._greeted.discard(writer)
            writer.close()

    def _answer(self, verb: Verb, shelf: Shelf, greeted: bool) -> Answer:
        if isinstance(verb, Hello):
            right = compare_digest(verb.token.encode(), self._token.encode())
            return self._welcome if right else Refused("wrong token")
        if not greeted:
            return Refused("say hello first")
        match verb:
            case Demote():
                return shelf.demote(verb.session, verb.tier)
            case Prefetch():
                return shelf.prefetch(verb.session)
            case Pin() | Unpin():
                return shelf.pin(verb.session, isinstance(verb, Pin))
            case Forget():
                return shelf.forget(verb.session)
            case ListSessions():
                return Sessions(shelf.reports())
            case GetStats():
                return Stats(shelf.stats())
