"""A request that comes again while it is served gets the same answer, computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.asgi import ClientGone
from engines.base import EngineUnavailable, Upstream
from gateway.live.requests import LiveRequest
from gateway.prefixes.twins import (
    MAX_HELD_BYTES,
    MAX_SHARED_BYTES,
    FirstLeft,
    SharedTurn,
    Twins,
)
from gateway.relay.deadline import Deadline
from gateway.stored.shelf import Limits
from gateway.stored.sqlite_shelf import SqliteShelf
from gateway.stored.stored import Stored
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply

EVENTS = {"content-type": "text/event-stream"}
SAID = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % i for i in range(3)]
DONE = b"data: [DONE]\n\n"
KEY = ("t", "s", b"digest")


@dataclass
class Slow:
    """An ``Upstream`` that gives each chunk when it is told to."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: EVENTS)
    said: asyncio.Queue[bytes | Exception] = field(default_factory=asyncio.Queue)

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self.said.get():
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def read(self) -> bytes:
        return b"".join([x async for x in self.chunks()])

    def say(self, *chunks: bytes | Exception) -> None:
        for chunk in chunks:
            self.said.put_nowait(chunk)


class SlowEngine(RecordingEngine):
    """Its head comes when ``head`` is set; counts the requests that were cancelled."""

    def __init__(self, headers: Mapping[str, str] = EVENTS) -> None:
        super().__init__()
        self.slow = Slow(headers=headers)
        self.head = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.num_ended = 0

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float = 0.0
    ) -> AsyncIterator[Upstream]:
        try:
            async with super().open(path, body, headers):
                await self.head.wait()
                yield self.slow
        finally:
            await self.may_end.wait()
            self.num_ended += 1


class Asking:
    """Requests as tasks, each with a client that may leave."""

    def __init__(self, app: App) -> None:
        self._app = app

    @property
    def running(self) -> SharedTurn[LiveRequest]:
        """The only turn that runs."""
        (running,) = self._app.gateway.twins.running.values()
        return running

    async def joined(self, num: int) -> None:
        """Wait until a turn has so many twins."""
        running = self._app.gateway.twins.running
        await until(lambda: [x.num_twins for x in running.values()] == [num])

    def ask(
        self,
        leaves: asyncio.Event | None = None,
        session: str = "mine",
        path: str = "/v1/chat/completions",
        reads: asyncio.Event | None = None,
        retries: str = "",
        **fields: Any,
    ) -> asyncio.Task[Reply]:
        body = {"model": MODEL, "stream": True}
        if path.endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": "hi"}]
        headers = {
            "content-type": "application/json",
            "x-session-id": session,
            "x-stainless-retry-count": retries,
        }
        data = json.dumps({**body, **fields}).encode()
        return asyncio.create_task(self._app.call("POST", path, data, headers, leaves, reads))


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


async def test_the_same_request_again_gets_the_same_bytes() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    first = asking.ask()
    await until(lambda: engine.asked)
    second = asking.ask()
    engine.head.set()
    engine.slow.say(*SAID[:2])
    third = asking.ask()  # in the middle of the answer
    await asking.joined(2)
    engine.slow.say(SAID[2], DONE, b"")
    replies = await asyncio.gather(first, second, third)
    assert {x.body for x in replies} == {b"".join(SAID) + DONE}
    assert {x.headers["x-thermocline-session"] for x in replies} == {"mine"}
    assert len(engine.asked) == 1 and app.sessions.num_running == 0


async def test_whole_answers_are_shared_too() -> None:
    app = App(engine := SlowEngine({"content-type": "application/json"}))
    asking = Asking(app)
    tasks = [asking.ask(stream=False) for _ in range(2)]
    await until(lambda: engine.asked)
    await asking.joined(1)
    engine.head.set()
    engine.slow.say(b'{"usage":null}', b"")
    assert [(await x).body for x in tasks] == [b'{"usage":null}'] * 2
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    "other", [{"session": "another"}, {"temperature": 1}, {"user": "x"}, {"stream": False}]
)
async def test_another_request_is_served_by_itself(other: dict[str, Any]) -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    tasks = [asking.ask(), asking.ask(**other)]
    await until(lambda: len(engine.asked) == 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("fields", "retries", "num_asked"),
    [({}, "", 2), ({"temperature": 0}, "", 1), ({"seed": 1}, "", 1), ({}, "1", 1)],
)
async def test_samples_of_an_unnamed_session_are_drawn_each_by_itself(
    fields: dict[str, Any], retries: str, num_asked: int
) -> None:
    app = App(engine := SlowEngine({"content-type": "application/json"}))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    asked = [app.post("/v1/chat/completions", body, x_stainless_retry_count=retries)] * 1
    asked.append(app.post("/v1/chat/completions", body, x_stainless_retry_count=retries))
    tasks = [asyncio.create_task(x) for x in asked]
    await until(lambda: len(engine.asked) == num_asked)
    engine.head.set()
    engine.slow.say(b"{}", b"", b"{}", b"")
    assert [(await x).status for x in tasks] == [200, 200]
    assert len(engine.asked) == num_asked


async def test_the_turn_goes_on_for_the_second_when_the_first_leaves() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(leaves)
    await until(lambda: engine.asked)
    second = asking.ask()
    await asking.joined(1)
    leaves.set()
    await settle()
    assert not engine.num_ended
    engine.head.set()
    engine.slow.say(*SAID, DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE
    await first
    assert len(engine.asked) == engine.num_ended == 1


async def test_the_turn_ends_when_all_have_left() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    gone = [asyncio.Event(), asyncio.Event()]
    tasks = [asking.ask(gone[0])]
    await until(lambda: engine.asked)
    tasks.append(asking.ask(gone[1]))
    await asking.joined(1)
    for leaves in gone:
        leaves.set()
    await asyncio.gather(*tasks)
    assert engine.num_ended == 1 and app.sessions.num_running == 0


async def test_a_broken_answer_is_broken_for_both() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    tasks = [asking.ask(), asking.ask()]
    await until(lambda: engine.asked)
    await asking.joined(1)
    engine.head.set()
    engine.slow.say(SAID[0], EngineUnavailable("it died"))
    for reply in await asyncio.gather(*tasks):
        assert reply.body.startswith(SAID[0]) and b"error" in reply.body


async def test_a_turn_that_all_have_left_is_joined_no_more() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(leaves)
    await until(lambda: engine.asked)
    engine.head.set()
    engine.slow.say(SAID[0])
    await until(lambda: asking.running.pieces)
    engine.may_end.clear()  # the engine takes its time to let go of it
    leaves.set()
    await until(lambda: asking.running.over)
    second = asking.ask()
    await until(lambda: len(engine.asked) == 2)
    engine.may_end.set()
    engine.slow.say(*SAID, DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE
    await first


async def test_a_name_that_several_conversations_may_have_makes_no_twins() -> None:
    app = App(engine := SlowEngine({"content-type": "application/json"}))
    asking = Asking(app)
    fields = {"prompt": "hi", "prompt_cache_key": "all of ours", "stream": False}
    tasks = [asking.ask(session="", path="/v1/completions", **fields) for _ in range(2)]
    await until(lambda: len(engine.asked) == 2)
    engine.head.set()
    engine.slow.say(b"{}", b"", b"{}", b"")
    assert [(await x).status for x in tasks] == [200, 200]


async def test_the_first_retry_joins_a_request_that_named_nothing() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    first = asking.ask(session="", retries="0")
    await until(lambda: engine.asked)
    second = asking.ask(session="", retries="1")
    await asking.joined(1)
    engine.head.set()
    engine.slow.say(*SAID, DONE, b"")
    assert (await first).body == (await second).body == b"".join(SAID) + DONE
    assert len(engine.asked) == 1


@pytest.fixture
async def stored(tmp_path: Path) -> Any:
    made = Stored(partial(SqliteShelf, tmp_path / "stored.sqlite", Limits(100_000, 1000.0)))
    yield made
    await made.close()


async def test_a_conversation_holds_a_turn_once_that_only_a_twin_has_heard(stored: Stored) -> None:
    app = App(engine := SlowEngine(), stored=stored)
    asking = Asking(app)
    made = (await app.post("/v1/conversations", {})).json["id"]
    leaves = asyncio.Event()
    fields = {"path": "/v1/responses", "session": "", "input": "hi", "conversation": made}
    first = asking.ask(leaves, **fields)
    await until(lambda: engine.asked)
    second = asking.ask(**fields)
    await asking.joined(1)
    leaves.set()
    engine.head.set()
    await settle()
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    engine.slow.say(*SAID, last, DONE, b"")
    assert b"response.completed" in (await second).body
    await first
    items = (await app.get(f"/v1/conversations/{made}/items")).json["data"]
    assert sorted(x["role"] for x in items) == ["assistant", "user"]


async def test_a_client_that_takes_nothing_keeps_its_twin_waiting_for_nothing() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    reads = asyncio.Event()
    first = asking.ask(reads=reads)
    await until(lambda: engine.asked)
    engine.head.set()
    engine.slow.say(*SAID[:2])
    await until(lambda: asking.running.pieces)
    second = asking.ask()
    engine.slow.say(SAID[2], DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE
    assert not first.done()
    reads.set()
    assert (await first).body == b"".join(SAID) + DONE
    assert len(engine.asked) == 1


@pytest.mark.parametrize("closes", [False, True])
async def test_a_client_that_takes_nothing_is_cut_and_its_turn_is_counted(closes: bool) -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(leaves, reads=asyncio.Event())
    await until(lambda: engine.asked)
    second = asking.ask()
    await asking.joined(1)
    engine.head.set()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    engine.slow.say(SAID[0])
    await until(lambda: asking.running.pieces)
    if closes:
        leaves.set()
    engine.slow.say(*SAID[1:], usage, DONE, b"")
    assert (await second).body.endswith(DONE)
    assert (await first).body == b""
    assert app.sessions.num_running == 0
    assert b'thermocline_tokens_total{kind="answered"} 3.0' in (await app.get("/metrics")).body


async def test_a_turn_ends_when_its_client_was_cut_and_then_its_twin_leaves() -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(reads=asyncio.Event())
    await until(lambda: engine.asked)
    second = asking.ask(leaves)
    await asking.joined(1)
    engine.head.set()
    engine.slow.say(*SAID)
    # All of it is taken for the first one only after that was cut.
    await until(lambda: asking.running.first.used_so_far().completion_tokens == len(SAID))
    assert app.sessions.num_running == 1
    leaves.set()
    await until(lambda: engine.num_ended)
    await asyncio.gather(first, second)
    assert app.sessions.num_running == 0


async def test_the_turn_of_a_client_that_takes_nothing_is_joined_no_more() -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    asking = Asking(app)
    first = asking.ask(reads=asyncio.Event())
    await until(lambda: engine.asked)
    engine.may_end.clear()  # the engine takes its time to let go of it
    engine.head.set()
    engine.slow.say(SAID[0])
    await until(lambda: asking.running.over)
    engine.may_end.set()
    await first


async def test_a_turn_keeps_the_deadline_of_its_last_twin() -> None:
    app = App(engine := SlowEngine(), request_timeout_s=4.0)
    asking = Asking(app)
    first = asking.ask()
    await until(lambda: engine.asked)
    with asking.running.joined(asyncio.get_running_loop().time() + 60):
        await asyncio.sleep(2.1)
        engine.head.set()
        engine.slow.say(SAID[0])
        await asyncio.sleep(2.1)
        engine.slow.say(*SAID[1:], DONE, b"")
        assert (await first).body == b"".join(SAID) + DONE


async def test_a_deadline_is_kept_and_may_be_put_off_while_it_runs() -> None:
    now = asyncio.get_running_loop().time
    deadline = Deadline(now())
    deadline.put_off(now() - 1)
    with pytest.raises(TimeoutError):
        async with deadline.kept():
            await asyncio.sleep(60)
    deadline = Deadline(now())
    async with deadline.kept():
        deadline.put_off(now() + 60)
        await asyncio.sleep(0.01)
    deadline = Deadline(now())
    async with deadline.kept():
        with pytest.raises(TimeoutError):  # the inner one keeps it alone, to end it its own way
            async with deadline.kept():
                await asyncio.sleep(60)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_twin_is_shown_as_its_turn_and_counted_once(streams: bool) -> None:
    app = App(engine := SlowEngine(EVENTS if streams else {"content-type": "application/json"}))
    asking = Asking(app)
    tasks = [asking.ask(stream=streams) for _ in range(2)]
    await until(lambda: engine.asked)
    await asking.joined(1)
    with app.gateway.live.reading(None) as scope:

        def now() -> Any:
            app.gateway.live.look()
            return json.loads(b"".join(scope.snapshot()))["now"]

        assert [x["phase"] for x in now()["requests"]] == ["prefill", "prefill"]
        assert (now()["running"], now()["waiting"]) == (2, 0)
        engine.head.set()
        usage = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
        engine.slow.say(*([*SAID, b"data: %b\n\n" % usage, DONE] if streams else [usage]), b"")
        await asyncio.gather(*tasks)
        assert now()["turns_today"] == 1
    await app.gateway.live.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_twin_of_a_request_that_ended_without_an_answer_is_on_its_own() -> None:
    twins: Twins[str] = Twins()
    with pytest.raises(ClientGone), twins.serving(KEY, "first", never) as shared:
        assert twins.find(KEY) is shared
        with shared.joined(0.0) as twin:
            shared.end(ClientGone())
            with pytest.raises(FirstLeft):
                await twin.begin()
        assert twins.find(KEY) is None
        raise ClientGone
    assert twins.find(KEY) is None


def never(deadline: float) -> None:
    """Put nothing off."""


async def test_what_is_held_for_twins_to_come_is_bounded() -> None:
    upstream = Slow()
    upstream.say(*[b"x" * 1000] * (MAX_HELD_BYTES // 1000 + 2), b"")
    twins: Twins[str] = Twins()
    with twins.serving(KEY, "first", never) as shared:
        async with shared.answered(upstream) as first:
            assert len(await first.read()) > MAX_HELD_BYTES
        assert len(shared.pieces) <= 1 and twins.find(KEY) is None


async def test_what_is_held_for_twins_that_read_is_bounded() -> None:
    upstream, piece = Slow(), b"x" * (1 << 20)
    upstream.say(*[piece] * 40, b"")
    with Twins[str]().serving(KEY, "first", never) as shared, shared.joined(0.0) as twin:
        async with shared.answered(upstream) as first:
            await until(lambda: shared.too_long)
            await settle()
            assert len(shared.pieces) == MAX_SHARED_BYTES // len(piece) + 1
            with pytest.raises(EngineUnavailable, match="too long"):
                await twin.read()
            assert len(await first.read()) == 40 * len(piece)
            assert len(shared.pieces) <= 1
