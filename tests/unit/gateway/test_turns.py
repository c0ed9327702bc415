"""A chat request becomes the request that the engine is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from engines.base import EngineUnavailable
from engines.http import CACHE_HEADER
from engines.wire import TemplateRules
from gateway.edge.bodies import LARGE_BODY_BYTES
from gateway.errors import Failure
from gateway.relay.turn_response import TurnResponse
from gateway.turns import AwaitingModel
from tests.unit.gateway.in_process import MODEL, WELCOME, Answered, App, RecordingEngine

PRIVATE: dict[str, Any] = {
    "cache_salt": "of my victim",
    "kv_transfer_params": {"do_remote_prefill": True},
    "kv_hints": {},
    "priority": -100,
    "vllm_xargs": {"a": 1},
    "request_id": "1",
    "session_id": "mine",
    "prompt_cache_key": "k",
    "conversation": "c",
    "previous_response_id": "r",
}


async def test_private_fields_never_reach_the_engine(app: App) -> None:
    assert (await app.chat(**PRIVATE, temperature=0.5, made_up_field=1)).status == 200
    (asked,) = app.engine.asked
    assert set(asked.body) == {"model", "messages", "temperature", "made_up_field"}


async def test_headers_of_ours_are_never_taken_from_a_client(app: App) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    given = {"x_thermocline_tenant": "victim", "x_thermocline_salt": "00", "x_tenant": "victim"}
    await app.post("/v1/chat/completions", body, **given)
    headers = app.engine.asked[0].headers
    assert headers["x-tenant"] == "local"
    assert not any("victim" in value for value in headers.values())


async def test_the_session_goes_out_and_comes_back(app: App) -> None:
    reply = await app.chat(session_id="café 1")
    assert app.engine.asked[0].headers["x-session"] == "café 1"
    assert reply.headers["x-thermocline-session"] == "caf%C3%A9 1"


async def test_the_engines_report_of_its_cache_is_passed_on() -> None:
    headers = {"content-type": "application/json", CACHE_HEADER: "hot; tokens=3", "server": "x"}
    reply = await App(RecordingEngine(Answered(200, headers, b'{"usage": null}'))).chat()
    assert reply.headers[CACHE_HEADER] == "hot; tokens=3"
    assert "server" not in reply.headers
    assert reply.body == b'{"usage": null}'


async def test_text_completions_take_the_same_walk(app: App) -> None:
    body = {"model": MODEL, "prompt": "once upon", "prompt_cache_key": "tale"}
    assert (await app.post("/v1/completions", body)).status == 200
    (asked,) = app.engine.asked
    assert (asked.path, asked.headers["x-session"]) == ("/v1/completions", "tale")


async def test_the_model_must_be_the_one_that_is_served() -> None:
    app = App(model_aliases=("gpt-x",))
    reply = await app.chat(model="nope")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert (await app.chat(model="gpt-x")).status == 200
    assert app.engine.asked[0].body["model"] == MODEL


async def test_fields_that_engines_answer_differently_are_evened_out(app: App) -> None:
    fields = {"max_tokens": 100, "max_completion_tokens": 99, "stream_options": {}}
    assert (await app.chat(**fields)).status == 200  # the context has 100 tokens
    assert app.engine.asked[0].body.keys() == {"model", "messages", "max_completion_tokens"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1000}
    assert (await app.post("/v1/completions", body)).status == 200
    assert app.engine.asked[1].body["max_tokens"] == 100  # left out it would mean 16
    assert (await app.chat(logit_bias={"foo": 0, "7": 1})).status == 200
    assert app.engine.asked[2].body["logit_bias"] == {"7": 1}


async def test_a_chat_without_a_limit_gets_the_default_one() -> None:
    app = App(default_max_tokens=7)
    for fields in ({}, {"max_tokens": None}, {"max_tokens": 9}, {"max_completion_tokens": 100}):
        assert (await app.chat(**fields)).status == 200
    bodies = [asked.body for asked in app.engine.asked]
    assert [body.get("max_tokens") for body in bodies] == [7, 7, 9, None]
    answered = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    for path, asked in (("messages", answered), ("responses", {"model": MODEL, "input": "x"})):
        await app.post(f"/v1/{path}", asked)
    assert [asked.body["max_tokens"] for asked in app.engine.asked[4:]] == [8, 7]


async def test_reasoning_of_earlier_turns_is_kept_where_the_template_can() -> None:
    switch = {"preserve_thinking": True}
    welcome = msgspec.structs.replace(WELCOME, template=TemplateRules(reasoning_switch=switch))
    app = App(RecordingEngine(welcome=welcome), keep_reasoning=True)
    await app.chat()
    await app.chat(chat_template_kwargs={"preserve_thinking": False, "x": 1})
    kept = [asked.body["chat_template_kwargs"] for asked in app.engine.asked]
    assert kept == [switch, {"preserve_thinking": False, "x": 1}]
    for quiet in (App(RecordingEngine(welcome=welcome)), App(keep_reasoning=True)):
        await quiet.chat()
        assert "chat_template_kwargs" not in quiet.engine.asked[0].body


async def test_an_alias_may_be_any_name() -> None:
    app = App(model_aliases=("*",))
    assert (await app.chat(model="any-name")).status == 200
    assert app.engine.asked[0].body["model"] == MODEL
    assert (await app.get("/v1/models/any-name")).json["id"] == "any-name"
    assert [x["id"] for x in (await app.get("/v1/models")).json["data"]] == [MODEL]


async def test_a_request_waits_for_an_engine_that_died() -> None:
    engine = RecordingEngine()
    app = App(engine)
    assert (await app.chat()).status == 200
    engine.welcome, gone = None, engine.welcome
    waiting = asyncio.create_task(app.chat())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    engine.welcome = gone
    async with asyncio.timeout(10):
        assert (await waiting).status == 200


async def test_a_request_does_not_wait_for_ever() -> None:
    engine = RecordingEngine()
    app = App(engine, engine_wait_s=0.05)
    assert (await app.chat()).status == 200
    engine.welcome = None
    assert (await app.chat()).error["code"] == "engine_unavailable"


async def test_while_the_engine_is_away_it_is_503_with_the_reason() -> None:
    reply = await App(RecordingEngine(welcome=None)).chat()
    assert reply.status == 503
    assert "having a rest" in reply.error["message"]
    assert int(reply.headers["retry-after"]) >= 1


async def test_a_defect_of_ours_is_a_500_without_details() -> None:
    class BrokenEngine(RecordingEngine):
        def prepare_body(self, body: Any, session: Any) -> Any:
            raise RuntimeError("secret detail")

    reply = await App(BrokenEngine()).chat()
    assert reply.status == 500
    assert "secret" not in reply.error["message"]
    assert reply.headers["x-request-id"]


async def test_a_large_body_is_the_same_request(app: App) -> None:
    text = "x" * LARGE_BODY_BYTES
    for _ in range(2):
        assert (await app.chat(text, temperature=0.5)).status == 200
    first, second = app.engine.asked
    assert first.body == second.body
    assert first.body["messages"][0]["content"] == text
    assert first.headers["x-session"] == second.headers["x-session"]
    assert (await app.chat(text, temperature="hot")).error["param"] == "temperature"


@pytest.mark.parametrize(("num_messages", "num_parts"), [(1, 1025), (9, 1000)])
async def test_content_in_too_many_parts_is_refused(num_messages: int, num_parts: int) -> None:
    content = [{"type": "text", "text": ""}] * num_parts
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}] * num_messages}
    reply = await App().post("/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.error["param"].startswith("messages")


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def failing_after(seconds: float, every_s: float) -> list[Message]:
    async def prepare() -> TurnResponse:
        await asyncio.sleep(seconds)
        raise EngineUnavailable("the model small cannot be loaded: no weights")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    preparing = asyncio.create_task(prepare())
    response = AwaitingModel(preparing, lambda: "loading", Failure.event, every_s)
    await response({"type": "http", "headers": [], "state": {}}, never, send)
    return sent


async def test_a_failure_after_a_comment_is_an_event() -> None:
    head, *comments, end = await failing_after(0.05, 0.01)
    assert head["status"] == 200
    assert comments and all(x["body"] == b": loading\n\n" for x in comments)
    assert b"no weights" in end["body"] and not end["more_body"]


async def test_a_failure_before_any_comment_is_an_error() -> None:
    with pytest.raises(EngineUnavailable):
        await failing_after(0.0, 30.0)
