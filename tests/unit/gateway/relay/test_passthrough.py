"""The relay between an engine and a client, both of them small objects in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import pytest
from starlette.types import Message

from engines.base import EngineStalled, EngineUnavailable
from engines.http import ClientGone
from gateway.relay.answer import AnswerStream
from gateway.relay.passthrough import (
    SLICE_BYTES,
    relay_events,
    send_whole,
)

EVENT = b'data: {"choices":[]}\n\n'
DONE = b"data: [DONE]\n\n"


class ScriptedUpstream:
    """Yields the given chunks; an exception in the list is raised, a number slept."""

    def __init__(self, script: Iterable[bytes | float | Exception], **headers: str) -> None:
        self._script = list(script)
        self.status = 200
        self.headers: Mapping[str, str] = headers

    async def chunks(self) -> AsyncIterator[bytes]:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    async def read(self) -> bytes:
        return b"".join([x async for x in self.chunks()])


class Client:
    """Collects the messages sent; ``takes`` = how many messages before it stops reading."""

    def __init__(self, takes: int = 1_000_000) -> None:
        self.body = b""
        self._takes = takes

    async def send(self, message: Message) -> None:
        if self._takes == 0:
            await asyncio.Event().wait()
        self._takes -= 1
        self.body += message.get("body", b"")


async def relayed(upstream: ScriptedUpstream, client: Client, **limits: Any) -> int | None:
    """Status of the failure, if any; each chunk from the engine was told of."""
    seen: list[int] = []
    events = AnswerStream()
    loop = asyncio.get_running_loop()
    failure = await relay_events(
        upstream,
        events,
        client.send,
        ends_at=loop.time() + limits.get("seconds", 10.0),
        client_stall_s=limits.get("client_stall_s", 10.0),
        on_chunk=lambda: seen.append(events.num_events),
    )
    assert seen == sorted(seen)
    return failure and failure.status


async def test_bytes_go_through_as_they_are():
    client = Client()
    assert await relayed(ScriptedUpstream([b": hi\n\n", EVENT + EVENT, DONE]), client) is None
    assert client.body == b": hi\n\n" + EVENT + EVENT + DONE


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (EngineUnavailable("gone"), 503),
        (EngineStalled("silent"), 504),
        (b"", 503),  # a clean end, but no [DONE]
    ],
)
async def test_a_broken_stream_is_a_failure_and_no_half_event(end: bytes | Exception, status: int):
    client = Client()
    upstream = ScriptedUpstream([EVENT, EVENT[:9], end])
    assert await relayed(upstream, client) == status
    assert client.body == EVENT


async def test_a_whole_answer_goes_out_as_it_is():
    for nbytes in (0, 1, SLICE_BYTES, SLICE_BYTES + 1, 5 * SLICE_BYTES):
        client = Client()
        await send_whole(client.send, [], bytes(nbytes), client_stall_s=10.0)
        assert client.body == bytes(nbytes)


async def test_a_reader_that_takes_no_more_of_a_whole_answer_is_given_up():
    with pytest.raises(ClientGone):
        await send_whole(Client(takes=2).send, [], bytes(3 * SLICE_BYTES), client_stall_s=0.05)


async def test_a_slow_engine_is_not_the_readers_fault():
    upstream = ScriptedUpstream([EVENT, 0.2, EVENT, DONE])
    assert await relayed(upstream, Client(), client_stall_s=0.05) is None
