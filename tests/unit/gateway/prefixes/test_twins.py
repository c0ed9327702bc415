"""A request that comes again while it is served gets the same answer, computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.asgi import ClientGone
from engines.base import EngineUnavailable, Upstream
from gateway.prefixes.twins import MAX_HELD_BYTES, FirstLeft, Twins
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
        self.num_ended = 0

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Upstream]:
        try:
            async with super().open(path, body, headers):
                await self.head.wait()
                yield self.slow
        finally:
            self.num_ended += 1


class Asking:
    """Requests as tasks, each with a client that may leave."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def joined(self, num: int) -> None:
        """Wait until a turn has so many twins."""
        running = self._app.app.state.gateway.twins.running  # type: ignore[attr-defined]
        await until(lambda: [x.num_twins for x in running.values()] == [num])

    def ask(
        self, leaves: asyncio.Event | None = None, session: str = "mine", **fields: Any
    ) -> asyncio.Task[Reply]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        headers = {"content-type": "application/json", "x-session-id": session}
        data = json.dumps({**body, **fields}).encode()
        call = self._app.call("POST", "/v1/chat/completions", data, headers, leaves)
        return asyncio.create_task(call)


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
    for _ in range(20):
        await asyncio.sleep(0)
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


async def test_a_twin_of_a_request_that_ended_without_an_answer_is_on_its_own() -> None:
    twins = Twins()
    with pytest.raises(ClientGone), twins.serving(KEY) as shared:
        assert shared is not None and twins.find(KEY) is shared
        with shared.joined() as twin:
            shared.end(ClientGone())
            with pytest.raises(FirstLeft):
                await twin.begin()
        assert twins.find(KEY) is None
        raise ClientGone
    assert twins.find(KEY) is None


def test_what_is_held_for_twins_to_come_is_bounded() -> None:
    with (twins := Twins()).serving(KEY) as shared:
        assert shared is not None
        for _ in range(MAX_HELD_BYTES // 1000 + 1):
            shared.tell(b"x" * 1000)
        assert not shared.pieces and twins.find(KEY) is None
