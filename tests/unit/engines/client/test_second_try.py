"""Requests that an engine gets again: one that ended, and one with no room for a connection."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec
import pytest
import uvloop

from engines.base import EngineBusy, EngineStalled, EngineUnavailable, EngineUnreached
from engines.client.connection import HttpAddress, HttpExchange
from engines.client.engine_client import EngineClient
from engines.client.second_try import Candidate, RequestBody, SecondTry
from engines.wire import Welcome
from tests.unit.engines.conftest import WELCOME, FakeProcess
from tests.waiting import eventually


def life(client: EngineClient, wait_s: float = 60.0, hopeless: bool = False) -> Candidate:
    return Candidate("", lambda: client.welcome, nullcontext, wait_s, lambda: hopeless)


async def test_one_that_ends_and_comes_back(client: EngineClient, fake: FakeProcess) -> None:
    now, hopeless = life(client), life(client, hopeless=True)
    assert not now.ended
    assert not await asyncio.wait_for(now.next_is_ready(), 30), "it stays: there is no next life"
    impatient = life(client, 0.1)
    await fake.stop()
    await eventually(lambda: now.ended)
    assert not await hopeless.next_is_ready()
    assert not await impatient.next_is_ready()
    waiting = asyncio.create_task(now.next_is_ready())
    await fake.start()
    assert await waiting and client.ready and now.ended


# ---- an engine of which only the answers count

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nsaid"
REFUSED = b"HTTP/1.1 400 Oh\r\ncontent-length: 3\r\n\r\nbad"
FAILED = b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b"data: 1\n\n"
ERROR = b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n'
COMMENT = b": prefill 10/20\n\n: pre"


class Engine:
    """Gives one answer after the other; its control connection is lost before each but the last."""

    def __init__(self, folder: Path, answers: list[bytes]) -> None:
        self.answers = answers
        self.bodies: list[bytes] = []
        self.welcome: Welcome | None = WELCOME
        self.path = str(folder / "engine.sock")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        self.bodies.append(await reader.readexactly(length))
        answer = self.answers.pop(0)
        if self.answers:
            self.welcome = msgspec.structs.replace(WELCOME)  # equal, and another one
        writer.write(answer)
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[SecondTry]:
        async with await asyncio.start_unix_server(self._serve, self.path):
            asked = SecondTry(lambda but: self.candidate(HttpAddress(self.path)))
            try:
                yield asked
            finally:
                await asked.close()

    def candidate(self, address: HttpAddress, stall_timeout_s: float = 60.0) -> Candidate:
        @asynccontextmanager
        async def opened(body: RequestBody) -> AsyncIterator[HttpExchange]:
            exchange = HttpExchange(address, stall_timeout_s)
            try:
                await exchange.send("/", {}, body.content)
                body.sent()
                await exchange.head()
                yield exchange
            finally:
                exchange.close()

        return Candidate("", lambda: self.welcome, opened, 10.0, lambda: False)


ASKED = {
    "it ended before the head": ([b"", OK], 200, b"said"),
    "its last word was an error": ([FAILED, OK], 200, b"said"),
    "it ended after the head": ([STREAM, STREAM + EVENT], 200, EVENT),
    "its last event": ([STREAM + ERROR, STREAM + EVENT], 200, EVENT),
    "in a prefill": ([STREAM + COMMENT, STREAM + EVENT], 200, COMMENT + b"\n\n" + EVENT),
    "the next one fails by itself": ([b"", FAILED], 500, b"no"),
    "it stays, and fails": ([FAILED], 500, b"no"),
    "it stays": ([STREAM + EVENT], 200, EVENT),
}


@pytest.mark.parametrize(("answers", "status", "body"), ASKED.values(), ids=ASKED)
async def test_who_is_asked(folder: Path, answers: list[bytes], status: int, body: bytes) -> None:
    engine = Engine(folder, list(answers))
    async with engine.asked() as exchange:
        await exchange.begin(RequestBody(b"{}"))
        assert await exchange.read() == body
        assert exchange.status == status
    assert engine.bodies == [b"{}"] * len(answers)


KEPT = {
    "a whole answer": (OK, 200, b"said"),
    "an event": (STREAM + EVENT, 200, EVENT),
    "a refusal": (REFUSED, 400, b"bad"),
}


@pytest.mark.parametrize(("answer", "status", "body"), KEPT.values(), ids=KEPT)
async def test_an_answer_that_is_there_is_kept(folder, answer, status, body):
    """Although the control connection is another one by now."""
    engine = Engine(folder, [answer, FAILED])
    async with engine.asked() as exchange:
        await exchange.begin(RequestBody(b"{}"))
        assert (exchange.status, await exchange.read()) == (status, body)
    assert len(engine.bodies) == 1


async def test_the_next_engine_may_not_fall_silent_either(folder: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        engine.welcome = msgspec.structs.replace(WELCOME)
        writer.write(STREAM)
        with suppress(OSError):
            await reader.read()  # until the other side gives up
        writer.close()

    engine = Engine(folder, [])
    async with await asyncio.start_unix_server(serve, engine.path):
        exchange = SecondTry(lambda but: engine.candidate(HttpAddress(engine.path), 0.2))
        await exchange.begin(RequestBody(b"{}"))
        with pytest.raises(EngineStalled):
            await asyncio.wait_for(exchange.read(), 30)
        await exchange.close()


LOST = {
    "the next one ends as well": [b"", b"", OK],
    "another kind of answer than was promised": [STREAM, OK],
    "an error, after a head that went out": [STREAM, FAILED],
}


@pytest.mark.parametrize("answers", LOST.values(), ids=LOST)
async def test_an_answer_that_cannot_be_had(folder: Path, answers: list[bytes]) -> None:
    engine = Engine(folder, list(answers))
    async with engine.asked() as exchange:
        with pytest.raises(EngineUnavailable):
            await exchange.begin(RequestBody(b"{}"))
            await exchange.read()
    assert len(engine.bodies) == 2


async def test_a_stream_that_has_begun_is_not_asked_for_again(folder: Path) -> None:
    """Its client has had a part of it, and another answer may be another one."""
    cut = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nsaid\r\n"
    engine = Engine(folder, [cut])
    async with engine.asked() as exchange:
        await exchange.begin(RequestBody(b"{}"))
        chunks = exchange.chunks()
        assert await anext(chunks) == b"said"
        engine.welcome = None
        with pytest.raises(EngineUnavailable):
            await anext(chunks)
    assert len(engine.bodies) == 1


async def test_a_large_body_is_not_held(folder: Path) -> None:
    engine = Engine(folder, [b"", OK])
    body = RequestBody(b" " * (2 << 20))
    async with engine.asked() as exchange:
        with pytest.raises(EngineUnavailable):
            await exchange.begin(body)
    assert len(engine.bodies) == 1 and body.content == b""


# ---- an engine whose socket has more connections waiting than it takes

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
Loop = Callable[[], asyncio.AbstractEventLoop]


@contextmanager
def one_waits_at(engine: Engine, loop: Loop) -> Iterator[tuple[socket.socket, asyncio.Runner]]:
    """A socket with room for one connection that nothing takes up yet, and a loop to run on."""
    with socket.socket(socket.AF_UNIX) as listener, asyncio.Runner(loop_factory=loop) as runner:
        listener.bind(engine.path)
        listener.listen(1)
        yield listener, runner


@LOOPS
def test_a_full_line_of_connections_is_waited_for(folder: Path, loop: Loop) -> None:
    async def main(listener: socket.socket) -> None:
        address = HttpAddress(engine.path)
        exchanges = [HttpExchange(address, 60.0) for _ in range(40)]
        sending = [asyncio.create_task(x.send("/", {}, b"{}")) for x in exchanges]
        await eventually(lambda: any(x.done() for x in sending))
        await asyncio.sleep(0.2)
        assert not all(x.done() for x in sending), "the line is full"
        async with await asyncio.start_unix_server(engine._serve, sock=listener):
            await asyncio.gather(*sending)
            for exchange in exchanges:
                await exchange.head()
                assert await exchange.read() == b"said"
                exchange.close()

    engine = Engine(folder, [OK] * 40)
    with one_waits_at(engine, loop) as (listener, runner):
        runner.run(main(listener))


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no more files for a moment, as where a burst took all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(next_file := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@LOOPS
def test_a_file_for_the_connection_is_waited_for(folder: Path, loop: Loop) -> None:
    async def main() -> None:
        exchange = HttpExchange(HttpAddress(engine.path), 60.0)
        async with await asyncio.start_unix_server(engine._serve, engine.path):
            with no_more_files():
                sending = asyncio.create_task(exchange.send("/", {}, b"{}"))
                await asyncio.sleep(0.1)
                assert not sending.done()
            await asyncio.wait_for(sending, 30)
            await exchange.head()
            assert await exchange.read() == b"said"
            exchange.close()

    engine = Engine(folder, [OK])
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@LOOPS
def test_a_network_connection_without_a_file_is_tried_again(folder: Path, loop: Loop) -> None:
    """By ``SecondTry``, as where the engine has no room for one."""

    async def main() -> None:
        async with await asyncio.start_server(engine._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            exchange = HttpExchange(HttpAddress("", f"http://127.0.0.1:{port}"), 60.0)
            with no_more_files(), pytest.raises(EngineBusy):
                await exchange.send("/", {}, b"{}")

    engine = Engine(folder, [])
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@LOOPS
def test_the_wait_in_a_full_line_ends_with_the_engine(folder: Path, loop: Loop) -> None:
    async def main() -> None:
        address = HttpAddress(engine.path)
        exchanges = [HttpExchange(address, 60.0) for _ in range(10)]
        sending = [asyncio.create_task(x.send("/", {}, b"{}")) for x in exchanges]
        await asyncio.sleep(0.2)
        waiting = [(x, y) for x, y in zip(exchanges, sending, strict=True) if not y.done()]
        assert len(waiting) > 5
        for exchange, _ in waiting:
            exchange.fail(EngineStalled("silent"))
        for _, task in waiting:
            with pytest.raises(EngineUnreached):
                await asyncio.wait_for(task, 30)
        for exchange in exchanges:
            exchange.close()

    engine = Engine(folder, [])
    with one_waits_at(engine, loop) as (_, runner):
        runner.run(main())


async def test_a_burst_waits_while_a_network_socket_has_no_room(folder: Path) -> None:
    """Until the engine takes connections again, many times later than one try may last."""
    engine, num_requests = Engine(folder, []), 40

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(OK)
        await writer.drain()
        writer.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        address = HttpAddress("", url, connect_s=0.1)

        async def ask() -> bytes:
            asked = SecondTry(lambda but: engine.candidate(address))
            try:
                await asked.begin(RequestBody(b"{}"))
                return await asked.read()
            finally:
                await asked.close()

        asking = [asyncio.create_task(ask()) for _ in range(num_requests)]
        await asyncio.sleep(1.0)
        assert not any(x.done() for x in asking)
        async with await asyncio.start_server(serve, sock=listener):
            assert await asyncio.gather(*asking) == [b"said"] * num_requests


async def test_an_engine_that_ends_is_not_connected_to_for_ever(client, fake):
    await fake.stop()
    await eventually(lambda: not client.ready)
    with pytest.raises(EngineUnreached):
        async with asyncio.timeout(30), client.open("/", b"{}", {}, wait_s=0.0):
            pass
