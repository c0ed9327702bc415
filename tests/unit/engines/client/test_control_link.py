"""The control link against peers that do not behave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.base import EngineRefused, EngineUnavailable
from engines.client.control_link import MAX_NOTICES, ControlLink
from engines.wire import (
    ALL_CHANGED,
    ControlReply,
    Done,
    GetStats,
    ListSessions,
    Notice,
    Refused,
    SessionRef,
    Sessions,
    Welcome,
    WireError,
    absent,
    frame,
    read_request,
)
from tests.unit.engines.conftest import WELCOME
from tests.waiting import eventually

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REPORT = absent(SessionRef("t", "s", b""))


def answering(answer: Any, *notices: Notice) -> Peer:
    """One that says ``notices``, and gives ``answer`` to the first request."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for notice in notices:
            writer.write(frame(notice))
        request = await read_request(reader)
        writer.write(frame(ControlReply(request.number, answer)))

    return peer


@asynccontextmanager
async def linked(
    folder: Path,
    peer: Peer | None = None,
    *,
    silence_s: float = 30.0,
    welcome: Welcome = WELCOME,
    stays: bool = True,
) -> AsyncIterator[ControlLink]:
    """A link to one that says welcome, does what ``peer`` does, and then only ``stays`` there."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await read_request(reader)
            writer.write(frame(ControlReply(hello.number, welcome)))
            if peer is not None:
                await peer(reader, writer)
            if stays:
                await reader.read()
        except (EOFError, ConnectionError, WireError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(converse, f"{folder}/c.sock")
    link = ControlLink(f"unix:{folder}/c.sock", "token", welcome_timeout_s=5.0, silence_s=silence_s)
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        server.close()


async def test_replies_find_their_requests_in_any_order(folder: Path) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, second = await read_request(reader), await read_request(reader)
        writer.write(frame(ControlReply(second.number, Sessions([]))))
        writer.write(frame(ControlReply(first.number, Done(None, "busy"))))

    async with linked(folder, peer) as link:
        await eventually(lambda: link.welcome)
        asking = link.ask(GetStats(), 5.0), link.ask(ListSessions(), 5.0)
        first, second = await asyncio.gather(*asking)
        assert first == Done(None, "busy") and second == Sessions([])


async def test_no_answer_in_time(folder: Path) -> None:
    async with linked(folder) as link:
        await eventually(lambda: link.welcome)
        with pytest.raises(EngineUnavailable, match="GetStats"):
            await link.ask(GetStats(), 0.05)
        assert link.welcome is not None  # one slow verb is not the end of the link


async def test_a_refused_verb(folder: Path) -> None:
    async with linked(folder, answering(Refused("not now"))) as link:
        await eventually(lambda: link.welcome)
        with pytest.raises(EngineRefused, match="not now"):
            await link.ask(GetStats(), 5.0)


async def test_a_frozen_engine_is_given_up_and_welcomed_back(folder: Path) -> None:
    connections: list[int] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await asyncio.sleep(60)

    async with linked(folder, peer, silence_s=0.1) as link:
        await eventually(lambda: link.welcome)
        await eventually(lambda: link.welcome is None)
        assert "does not answer" in link.trouble
        await eventually(lambda: link.welcome)
        assert len(connections) >= 2


async def test_the_heartbeat_keeps_a_quiet_link(folder: Path) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        while True:
            request = await read_request(reader)
            beats.append(request.number)
            writer.write(frame(ControlReply(request.number, Sessions([]))))

    connections: list[int] = []
    beats: list[int] = []
    async with linked(folder, peer, silence_s=1.5):
        await eventually(lambda: len(beats) >= 4)  # three of them in the time of silence
    assert connections == [1]


async def test_garbage_ends_the_connection_only(folder: Path) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x03abc")

    async with linked(folder, peer) as link:
        await eventually(lambda: "not a control message" in link.trouble)


UNUSABLE = [
    ({"version": 99}, "version 99"),
    ({"model": "m\ntest-cmd: x"}, r"control characters: 'm\ntest-cmd: x'"),
    ({"model": "m\x1b[2J"}, r"control characters: 'm\x1b[2J'"),
]


@pytest.mark.parametrize(("change", "trouble"), UNUSABLE)
async def test_an_engine_that_cannot_be_used_is_refused_with_a_reason(folder, change, trouble):
    async with linked(folder, welcome=msgspec.structs.replace(WELCOME, **change)) as link:
        await eventually(lambda: trouble in link.trouble)
        assert link.welcome is None


async def test_too_many_notices_become_one_question(folder: Path) -> None:
    saved = [Notice("saved", REPORT)] * (MAX_NOTICES + 10)
    async with linked(folder, answering(Sessions([]), *saved)) as link:
        await eventually(lambda: link.welcome)
        await link.ask(ListSessions(), 10.0)  # all notices came before this answer
        notices = link.notices.read()
        assert await anext(notices) is None
        assert await anext(notices) == saved[0]


async def test_found_sessions_are_a_question_as_well(folder: Path) -> None:
    found, moved = (Notice("moved", REPORT, x) for x in (ALL_CHANGED, "budget"))
    async with linked(folder, answering(None, found, moved)) as link:
        notices = link.notices.read()
        assert [await anext(notices) for _ in range(2)] == [None, None]  # connected, found
        assert await anext(notices) == moved


@pytest.mark.parametrize("has_read", [True, False])  # False: as one that was killed, a reset
async def test_open_requests_end_with_the_link(folder: Path, has_read: bool) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if has_read:
            await read_request(reader)
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.3)

    async with linked(folder, peer, stays=False) as link:
        await eventually(lambda: link.welcome)
        with pytest.raises(EngineUnavailable, match="closed the connection"):
            await link.ask(GetStats(), 10.0)
