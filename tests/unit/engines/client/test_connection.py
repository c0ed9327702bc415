"""Reads responses of an engine, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineError, EngineStalled, EngineUnavailable
from engines.client.connection import FAST_S, GATHER_S, MAX_HELD_BYTES, HttpAddress, HttpResponse

BODY = "data: größer 思考\n\n".encode() * 3
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CHUNKED = (
    STREAM_HEAD
    + b"".join(b"%x\r\n%b\r\n" % (len(x), x) for x in (BODY[:7], BODY[7:8], BODY[8:]))
    + b"0\r\n\r\n"
)
MEASURED = b"HTTP/1.1 404 Nope\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
UNTIL_END = b"HTTP/1.1 200 OK\r\n\r\n" + BODY


class Wire(asyncio.Transport):
    """A transport that remembers whether reading is paused and whether it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.aborted = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def connected(clock: Callable[[], float] | None = None) -> tuple[HttpResponse, Wire]:
    response, wire = HttpResponse(clock), Wire()
    response.connection_made(wire)
    return response, wire


async def body_of(response: HttpResponse) -> bytes:
    chunks = []
    while chunk := await response.next_chunk():
        chunks.append(chunk)
    return b"".join(chunks)


@given(
    st.sampled_from([CHUNKED, MEASURED, UNTIL_END]),
    st.lists(st.integers(1, len(CHUNKED)), max_size=20),
)
def test_any_cut_gives_the_same_answer(stream: bytes, cuts: list[int]) -> None:
    async def check() -> None:
        response, _ = connected()
        reading = asyncio.create_task(body_of(response))
        edges = [0, *sorted({x for x in cuts if x < len(stream)}), len(stream)]
        for a, b in zip(edges, edges[1:], strict=False):
            response.data_received(stream[a:b])
            await asyncio.sleep(0)
        response.connection_lost(None)
        await response.head()
        assert response.status in (200, 404)
        assert response.headers.get("CONTENT-type", "text/event-stream") == "text/event-stream"
        assert await reading == BODY

    asyncio.run(check())


@pytest.mark.parametrize("stream", [CHUNKED, MEASURED])
@pytest.mark.parametrize("cut", [0, 1, 20, -1])
async def test_an_early_end_is_an_error_wherever_it_comes(stream: bytes, cut: int) -> None:
    response, _ = connected()
    response.data_received(stream[:cut])
    response.connection_lost(None)
    with pytest.raises(EngineUnavailable, match="broke"):
        await response.head()
        await body_of(response)


async def test_bytes_before_the_break_are_still_delivered() -> None:
    response, _ = connected()
    response.data_received(CHUNKED[:-5])
    response.connection_lost(ConnectionResetError())
    assert await response.next_chunk() == BODY
    with pytest.raises(EngineUnavailable):
        await response.next_chunk()


@pytest.mark.parametrize("bytes_", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00" * 99])
async def test_bytes_that_are_not_http_are_an_error(bytes_: bytes) -> None:
    response, wire = connected()
    response.data_received(bytes_)
    with pytest.raises(EngineUnavailable, match="not HTTP"):
        await response.head()
    assert wire.aborted
    response.data_received(b"more")
    response.connection_lost(None)


async def test_a_reader_that_falls_behind_pauses_the_engine() -> None:
    response, wire = connected()
    response.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
    response.data_received(b"x" * MAX_HELD_BYTES)
    assert not wire.paused
    response.data_received(b"x")
    assert wire.paused
    assert len(await response.next_chunk()) == MAX_HELD_BYTES + 1
    assert not wire.paused


async def test_fail_reaches_a_waiting_reader_with_its_reason() -> None:
    response, wire = connected()
    waiting = asyncio.create_task(response.head())
    await asyncio.sleep(0)
    response.fail(EngineStalled("silent"))
    response.connection_lost(None)
    with pytest.raises(EngineStalled, match="silent"):
        await waiting
    assert wire.aborted


def test_requests_of_one_line_each() -> None:
    address = HttpAddress("/run/http.sock")
    head = address.request_head("POST", "/v1/x", {"a": "b"}, 3)
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\nhost: engine\r\na: b\r\ncontent-length: 3\r\n")
    assert head.endswith(b"\r\n\r\n")
    with pytest.raises(ValueError, match="more than one line"):
        address.request_head("POST", "/v1/x", {"a": "b\r\nc: d"}, 3)


def test_urls() -> None:
    head = HttpAddress("", "http://user@[::1]:8000/base/").request_head("POST", "/v1/x", {}, 0)
    assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: [::1]:8000\r\n")
    for url in ("ftp://x", "localhost:8000", "http://"):
        with pytest.raises(EngineError, match=r"engine\.url"):
            HttpAddress("", url)


async def test_a_slow_stream_is_read_at_once_and_a_burst_is_gathered() -> None:
    now = 100.0
    response, wire = connected(lambda: now)
    response.data_received(STREAM_HEAD)
    assert not wire.paused
    response.data_received(b"1\r\na\r\n")
    assert not wire.paused  # the first piece after a pause
    now += 1.01 * FAST_S
    response.data_received(b"1\r\nb\r\n")
    assert not wire.paused
    now += 0.99 * FAST_S
    response.data_received(b"1\r\nc\r\n")
    assert wire.paused  # two within the time that counts as fast
    assert await response.next_chunk() == b"abc"  # nothing that was read is kept back
    async with asyncio.timeout(10):
        while wire.paused:
            await asyncio.sleep(GATHER_S)
    response.data_received(b"1\r\nd\r\n0\r\n\r\n")
    assert await body_of(response) == b"d"


async def test_a_burst_never_resumes_a_stream_whose_reader_is_behind() -> None:
    response, wire = connected(lambda: 100.0)
    response.data_received(STREAM_HEAD)
    for _ in range(2):
        response.data_received(b"%x\r\n%b\r\n" % (MAX_HELD_BYTES, bytes(MAX_HELD_BYTES)))
    await asyncio.sleep(3 * GATHER_S)
    assert wire.paused
    assert len(await response.next_chunk()) == 2 * MAX_HELD_BYTES
    async with asyncio.timeout(10):
        while wire.paused:
            await asyncio.sleep(GATHER_S)
