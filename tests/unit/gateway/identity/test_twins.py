"""A request that comes again while it is served gets the same answer, computed once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.stored.stored import Stored
from tests.stored_objects import stored_in
from tests.unit.gateway.identity.twin_requests import (
    DONE,
    EVENTS,
    SAID,
    Asking,
    SlowEngine,
    settle,
    until,
)
from tests.unit.gateway.in_process import MODEL, App


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
    made = stored_in(tmp_path / "stored.sqlite")
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


@pytest.mark.parametrize("streams", [False, True])
async def test_a_twin_is_shown_as_its_turn_and_counted_once(streams: bool) -> None:
    app = App(engine := SlowEngine(EVENTS if streams else {"content-type": "application/json"}))
    asking = Asking(app)
    tasks = [asking.ask(stream=streams) for _ in range(2)]
    await until(lambda: engine.asked)
    await asking.joined(1)
    with app.model.live.reading(None) as scope:

        def now() -> Any:
            app.model.live.look()
            return json.loads(b"".join(scope.snapshot()))["now"]

        assert [x["phase"] for x in now()["requests"]] == ["prefill", "prefill"]
        assert (now()["running"], now()["waiting"]) == (2, 0)
        engine.head.set()
        usage = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
        engine.slow.say(*([*SAID, b"data: %b\n\n" % usage, DONE] if streams else [usage]), b"")
        await asyncio.gather(*tasks)
        assert now()["turns_today"] == 1
    await app.model.live.close()
