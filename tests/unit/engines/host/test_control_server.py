"""The engine's end of the control connection, against callers that do not behave."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engines.fake_worker.fake_sessions import FakeSessions
from engines.host.control_server import MAX_UNSENT_BYTES, ControlServer
from engines.wire import (
    MAX_FRAME_BYTES,
    ControlReply,
    ControlRequest,
    Demote,
    Done,
    Forget,
    GetStats,
    Hello,
    ListSessions,
    Notice,
    Pin,
    Refused,
    SessionRef,
    Stats,
    TierName,
    Unpin,
    Verb,
    VerbAnswer,
    Welcome,
    absent,
    frame,
    read_from_engine,
)
from tests.unit.engines.conftest import WELCOME, welcomed

ONE = SessionRef(tenant="alice", id="one", salt=b"a")
REPORT = absent(ONE)


class Verbs(FakeSessions):
    """A fake engine whose demote waits for ``release`` and whose forget fails."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.release = asyncio.Event()
        self.words = "the shelf fell down"
        self.error: type[Exception] = ValueError

    async def demote(self, session: SessionRef, tier: TierName | None) -> Done:
        await self.release.wait()
        return await super().demote(session, tier)

    async def forget(self, session: SessionRef) -> Done:
        raise self.error(self.words)


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, number: int, verb: Verb) -> None:
        self.writer.write(frame(ControlRequest(number, verb)))

    async def reply(self) -> ControlReply:
        message = await read_from_engine(self.reader)
        assert isinstance(message, ControlReply)
        return message

    async def ask(self, verb: Verb) -> VerbAnswer:
        self.send(0, verb)
        return (await self.reply()).answer

    async def is_cut_off(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


class Served:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.verbs = Verbs()
        self.control = ControlServer("secret", welcomed, self.verbs)

    @asynccontextmanager
    async def call(self, token: str | None = "secret") -> AsyncIterator[Caller]:
        """A connection; one that says hello, if there is a ``token`` to show."""
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        try:
            caller = Caller(reader, writer)
            if token is not None:
                assert await caller.ask(Hello(token)) == WELCOME
            yield caller
        finally:
            writer.close()


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    served = Served(folder / "control.sock")
    server = await served.control.serve(f"unix:{served.path}")
    yield served
    server.close()
    served.control.close()


# ---- who may speak


@pytest.mark.parametrize("first", [GetStats(), Hello("guess"), Hello("")])
async def test_only_who_knows_the_token_is_obeyed(served: Served, first: Verb) -> None:
    async with served.call(token=None) as caller:
        assert isinstance(await caller.ask(first), Refused)
        assert await caller.ask(GetStats()) == Refused("say hello first")
        assert await caller.ask(Hello("secret")) == WELCOME


async def test_a_request_right_after_the_hello_waits_for_the_welcome(folder: Path) -> None:
    async def slowly() -> Welcome:
        await asyncio.sleep(0.05)  # an engine asks its ranks first
        return WELCOME

    served = Served(folder / "control.sock")
    served.control = ControlServer("secret", slowly, served.verbs)
    server = await served.control.serve(f"unix:{served.path}")
    async with served.call(token=None) as caller:
        caller.send(0, Hello("secret"))
        caller.send(1, GetStats())
        assert (await caller.reply()).answer == WELCOME
        assert isinstance((await caller.reply()).answer, Stats)
    server.close()
    served.control.close()


async def test_the_socket_is_its_owners_alone(served: Served) -> None:
    assert served.path.stat().st_mode & 0o777 == 0o600


async def test_the_socket_of_a_process_that_was_killed_is_replaced(folder: Path) -> None:
    path = folder / "control.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    server = await Served(path).control.serve(f"unix:{path}")
    server.close()


async def test_it_listens_on_tcp_too(served: Served) -> None:
    server = await served.control.serve("tcp://127.0.0.1:0")
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await Caller(reader, writer).ask(Hello("secret")) == WELCOME
    writer.close()
    server.close()


# ---- messages


async def test_a_slow_verb_does_not_hold_up_the_others(served: Served) -> None:
    async with served.call() as caller:
        caller.send(1, Demote(ONE))
        caller.send(2, ListSessions())
        assert (await caller.reply()).number == 2
        served.verbs.release.set()
        assert (await caller.reply()).number == 1


@pytest.mark.parametrize(
    ("error", "is_ours"), [(ValueError, True), (TimeoutError, False), (ConnectionError, False)]
)
async def test_a_verb_that_fails_is_refused_with_its_words(served, caplog, error, is_ours):
    served.verbs.error, words = error, f"{error.__name__}: the shelf fell down"
    async with served.call() as caller:
        assert await caller.ask(Forget(ONE)) == Refused(words)
        assert isinstance(await caller.ask(GetStats()), Stats)
    assert f"Forget failed: {words}" in caplog.text
    assert ("Traceback" in caplog.text) == is_ours, "a defect of ours alone needs one"


async def test_an_answer_too_long_for_a_frame_is_refused_and_the_link_goes_on(served, caplog):
    huge = SessionRef(tenant="alice", id="x" * MAX_FRAME_BYTES, salt=b"")
    served.verbs.begin(huge, ["a"])
    async with served.call() as caller:
        refused = await caller.ask(ListSessions())
        assert isinstance(refused, Refused) and "over" in refused.message
        assert isinstance(await caller.ask(GetStats()), Stats)
    assert "ListSessions failed" in caplog.text


@pytest.mark.parametrize(
    "words", ["x" * MAX_FRAME_BYTES, "no such file: \udcff"], ids=["endless", "surrogate"]
)
async def test_the_link_goes_on_after_an_error_with_any_words(served, words, caplog):
    served.verbs.words = words
    async with served.call() as caller:
        assert isinstance(await caller.ask(Forget(ONE)), Refused)
        assert isinstance(await caller.ask(GetStats()), Stats)


@pytest.mark.parametrize(
    "message",
    [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", (MAX_FRAME_BYTES + 1).to_bytes(4, "big")],
    ids=["garbage", "endless", "too long"],
)
async def test_bytes_that_are_no_control_message_end_their_connection_only(served, message):
    async with served.call() as other, served.call() as caller:
        caller.writer.write(message)
        assert await caller.is_cut_off()
        assert isinstance(await other.ask(GetStats()), Stats)


# ---- notices


async def test_notices_go_to_those_who_said_hello(served: Served) -> None:
    async with served.call() as known, served.call(token=None) as stranger:
        assert isinstance(await stranger.ask(GetStats()), Refused)  # it is connected by now
        served.control.publish(Notice("saved", REPORT))
        assert await read_from_engine(known.reader) == Notice("saved", REPORT)
        stranger.send(7, GetStats())
        assert (await stranger.reply()).number == 7


async def test_verbs_of_one_gateway_are_seen_by_the_others(served: Served) -> None:
    served.verbs.begin(ONE, ["a", "b"])
    served.verbs.end(ONE, ["a", "b"])
    served.verbs.release.set()
    async with served.call() as one, served.call() as other:
        await one.ask(Pin(ONE))
        notice = await read_from_engine(other.reader)
        assert (notice.cause, notice.session.pinned) == ("moved", True)
        await one.ask(Demote(ONE))  # and itself has its answers only
        notice = await read_from_engine(other.reader)
        assert not notice.session.hot
        assert isinstance(await one.ask(Forget(ONE)), Refused)  # this engine's fails: no notice
        await one.ask(Unpin(ONE))
        notice = await read_from_engine(other.reader)
        assert (notice.cause, notice.session.pinned) == ("moved", False)


async def test_a_caller_that_does_not_read_is_cut_off(served: Served) -> None:
    notice = Notice("saved", msgspec.structs.replace(REPORT, id="x" * 100_000))
    async with served.call() as caller:
        for _ in range(2 * MAX_UNSENT_BYTES // len(frame(notice))):
            served.control.publish(notice)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            async with asyncio.timeout(10):
                while True:
                    await read_from_engine(caller.reader)


async def test_close_ends_every_connection(served: Served) -> None:
    async with served.call() as caller:
        served.control.close()
        assert await caller.is_cut_off()


# ---- where it may run


def test_it_needs_few_of_the_gateways_packages() -> None:
    """vLLM's environment has msgspec, and none of our web framework."""
    code = "import sys, engines.host.control_server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"fastapi", "starlette", "aiohttp", "uvicorn", "mlx", "vllm", "httptools"}
