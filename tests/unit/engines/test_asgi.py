"""Bodies are bounded while they are read; work for a client that left is cancelled."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from engines.asgi import ClientGone, read_body, while_client_stays
from engines.openai.errors import InvalidRequest


def request(*chunks: bytes, declared: int | None = None, leaves: bool = False) -> Request:
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": leaves or i < len(chunks) - 1}
        for i, chunk in enumerate(chunks)
    ]
    if leaves:
        messages.append({"type": "http.disconnect"})

    async def receive() -> Message:
        return messages.pop(0)

    headers = [] if declared is None else [(b"content-length", b"%d" % declared)]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def test_a_body_up_to_the_limit_is_read() -> None:
    assert await read_body(request(b"ab", b"", b"cd", declared=4), 4) == b"abcd"


@pytest.mark.parametrize("declared", [None, 3, 5])
async def test_a_larger_one_is_refused(declared: int | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await read_body(request(b"abc", b"de", declared=declared), 4)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


async def test_a_client_that_leaves_in_mid_body_is_noticed() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(request(b"abc", leaves=True), 4)


class Connection:
    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_work_gives_its_result_while_the_client_stays() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await while_client_stays(Connection().receive, work) == 7


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    connection, ended = Connection(), []

    async def work() -> None:
        try:
            connection.left.set()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ClientGone):
        await while_client_stays(connection.receive, work)
    assert ended


async def test_work_that_fails_says_so() -> None:
    async def work() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await while_client_stays(Connection().receive, work)


async def test_the_waiting_task_may_be_cancelled_too() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(while_client_stays(Connection().receive, work))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
