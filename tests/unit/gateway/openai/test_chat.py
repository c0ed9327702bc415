"""Chat completions that engines do not know: functions, custom tools, and storing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engines.wire import FillIn
from gateway.openai.chat import ChatEvents
from gateway.openai.chat_fields import ChatCalls
from tests.stored_objects import stored_in
from tests.unit.gateway.in_process import (
    MODEL,
    WELCOME,
    Answered,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
)

LOOK = {"name": "look", "parameters": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}


def stream(*deltas: Any, reason: str = "stop") -> bytes:
    head = {**HEAD, "object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": x, "finish_reason": None}]} for x in deltas
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    lines = [b"data: " + json.dumps(x).encode() + b"\n\n" for x in chunks]
    return b"".join(lines) + b"data: [DONE]\n\n"


def streamed(body: bytes) -> Answered:
    return Answered(200, {"content-type": "text/event-stream"}, body)


def chunks_of(body: bytes) -> list[ChatCompletionChunk]:
    *events, done, _ = body.split(b"\n\n")
    assert done == b"data: [DONE]"
    return [
        ChatCompletionChunk.model_validate_json(x.removeprefix(b"data: "))
        for x in events
        if not x.startswith(b":")
    ]


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    stored = stored_in(tmp_path / "stored.sqlite")
    yield App(RecordingEngine(chat_answer()), stored=stored)
    await stored.close()


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, None),
        ("none", "none"),
        ({"name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
async def test_functions_are_tools_of_an_older_form(choice: Any, wanted: Any) -> None:
    app = App(RecordingEngine(chat_answer(None, "tool_calls", tool_calls=[CALL])))
    past = [
        {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "seen"},
        {"role": "user", "content": "again"},
    ]
    fields = {} if choice is None else {"function_call": choice}
    reply = await app.chat(messages=past, functions=[LOOK], **fields)
    body = app.engine.asked[0].body
    assert body["tools"] == [{"type": "function", "function": LOOK}]
    assert body.get("tool_choice") == wanted
    called, result, _ = body["messages"]
    assert called["tool_calls"][0]["id"] == result["tool_call_id"]
    message = ChatCompletion.model_validate(reply.json).choices[0]
    assert message.finish_reason == "function_call"
    assert message.message.function_call is not None and not message.message.tool_calls
    assert message.message.function_call.name == "look"


async def test_functions_in_a_stream() -> None:
    named = {"index": 0, **CALL, "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    body = stream({"tool_calls": [named]}, {"tool_calls": [more]}, reason="tool_calls")
    app = App(RecordingEngine(streamed(body)))
    chunks = chunks_of((await app.chat(stream=True, functions=[LOOK])).body)
    calls = [x.choices[0].delta.function_call for x in chunks]
    assert [x.name for x in calls if x and x.name] == ["look"]
    assert "".join(x.arguments or "" for x in calls if x) == "{}"
    assert chunks[-1].choices[0].finish_reason == "function_call"


async def test_custom_tools() -> None:
    custom = {"type": "custom", "custom": {"name": "write", "description": "Writes"}}
    function = {"name": "write", "arguments": '{"input":"a b"}'}
    made = {"id": "call_2", "type": "function", "function": function}
    app = App(RecordingEngine(chat_answer(None, "tool_calls", tool_calls=[CALL, made])))
    earlier = {"id": "c", "type": "custom", "custom": {"name": "write", "input": "x"}}
    reply = await app.chat(
        messages=[{"role": "assistant", "tool_calls": [earlier]}, {"role": "user", "content": ""}],
        tools=[{"type": "function", "function": LOOK}, custom],
        tool_choice={"type": "custom", "custom": {"name": "write"}},
    )
    body = app.engine.asked[0].body
    assert [x["function"]["name"] for x in body["tools"]] == ["look", "write"]
    assert body["tool_choice"]["function"]["name"] == "write"
    past = body["messages"][0]["tool_calls"][0]["function"]
    assert past == {"name": "write", "arguments": '{"input":"x"}'}
    shown = ChatCompletion.model_validate(reply.json).choices[0].message.tool_calls
    assert shown is not None and [x.type for x in shown] == ["function", "custom"]
    assert reply.json["choices"][0]["message"]["tool_calls"][1]["custom"]["input"] == "a b"


CUSTOM_STREAM = stream(
    {"role": "assistant", "content": "hm ü"},
    {"tool_calls": [{"index": 0, **CALL}]},
    {"tool_calls": [{"index": 1, "id": "call_2", "type": "function",
                     "function": {"name": "write", "arguments": '{"inp'}}]},
    {"tool_calls": [{"index": 1, "function": {"arguments": 'ut":"a b"}'}}]},
    reason="tool_calls",
)  # fmt: skip


@given(st.lists(st.integers(0, len(CUSTOM_STREAM)), max_size=20))
def test_custom_tools_in_a_stream_however_it_is_cut(cuts: list[int]) -> None:
    edges = sorted({0, len(CUSTOM_STREAM), *cuts})
    events = ChatEvents(ChatCalls(customs=frozenset({"write"})))
    pieces = [CUSTOM_STREAM[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    stream = b"".join(map(events.feed, pieces)) + events.ending(None)
    parts = [json.loads(x[6:]) for x in stream.split(b"\n\n")[:-2]]
    calls = [y for x in parts for y in x["choices"][0]["delta"].get("tool_calls") or ()]
    custom = {"name": "write", "input": "a b"}
    assert [x["index"] for x in calls] == [0, 1]
    assert calls[1] == {"index": 1, "id": "call_2", "type": "custom", "custom": custom}
    assert events.complete and events.whole
    message = events.completion["choices"][0]["message"]
    assert message["content"] == "hm ü"
    assert message["tool_calls"][1]["custom"]["input"] == "a b"


async def test_allowed_tools() -> None:
    app = App(RecordingEngine(chat_answer()))
    tools = [{"type": "function", "function": {"name": x}} for x in "ab"]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert (await app.chat(tools=tools, tool_choice=choice)).status == 200
    body = app.engine.asked[0].body
    assert ([x["function"]["name"] for x in body["tools"]], body["tool_choice"]) == (
        ["b"],
        "required",
    )


async def test_fields_that_change_nothing_are_taken() -> None:
    app = App(RecordingEngine(chat_answer()))
    reply = await app.chat(
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        safety_identifier="s",
        verbosity="low",
        prediction={"type": "content", "content": "x"},
        prompt_cache_options={"mode": "implicit"},
        prompt_cache_retention="24h",
        store=True,  # nothing is stored here
        modalities=["text"],
        audio={"voice": "x", "format": "wav"},
        moderation={"model": "m"},
        web_search_options={},
    )
    assert reply.status == 200
    assert "web_search_options" not in app.engine.asked[0].body
    assert 'kind="web_search"' in (await app.get("/metrics")).body.decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": 5}, "functions"),
        ({"functions": [{}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"moderation": {"policy": {"input": {"mode": "block"}}}}, "moderation"),
        ({"store": True, "metadata": {"a": 1}}, "metadata"),
        ({"store": "true"}, "store"),
        ({"store": True, "messages": 5}, "messages"),
    ],
)
async def test_a_field_that_cannot_be_served_is_named(app: App, fields: Any, param: str) -> None:
    reply = await app.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_an_assistant_that_said_nothing(app: App) -> None:
    past = [{"role": "assistant", "content": None}, {"role": "user", "content": "hi"}]
    assert (await app.chat(messages=past)).status == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stored_chat_is_shown_listed_changed_and_deleted(app: App, streams: bool) -> None:
    if streams:
        app.engine.answer = streamed(
            stream({"role": "assistant", "content": "y"}, {"content": "o"})
        )
    reply = await app.chat("hi", store=True, stream=streams, metadata={"a": "b"})
    assert reply.status == 200
    path = "/v1/chat/completions/chatcmpl-1"
    shown = (await app.get(path)).json
    assert ChatCompletion.model_validate(shown).choices[0].message.content == "yo"
    assert (shown["object"], shown["metadata"]) == ("chat.completion", {"a": "b"})
    listed = (await app.get("/v1/chat/completions?metadata[a]=b&model=" + MODEL)).json
    assert listed["data"] == [shown] and listed["first_id"] == "chatcmpl-1"
    assert (await app.get("/v1/chat/completions?metadata[a]=c")).json["data"] == []
    assert (await app.get("/v1/chat/completions?model=other")).json["data"] == []
    messages = (await app.get(path + "/messages")).json["data"]
    assert messages == [{"id": "chatcmpl-1-0", "role": "user", "content": "hi"}]
    changed = (await app.post(path, {"metadata": {"c": "d"}})).json
    assert changed == {**shown, "metadata": {"c": "d"}} == (await app.get(path)).json
    assert (await app.call("DELETE", path, b"", {})).json["deleted"] is True
    assert (await app.get(path)).status == 404
    assert (await app.get(path + "/messages")).status == 404
    assert (await app.post(path, {"metadata": {}})).status == 404


async def test_only_whole_answers_are_stored_and_only_if_asked(app: App) -> None:
    await app.chat()
    app.engine.answer = streamed(stream({"content": "y"})[:-20])
    await app.chat(store=True, stream=True)
    app.engine.answer = streamed(b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n')
    await app.chat(store=True, stream=True)
    assert (await app.get("/v1/chat/completions")).json["data"] == []


async def complete(app: App, **fields: Any) -> Reply:
    return await app.post("/v1/completions", {"model": MODEL, "prompt": "def f(", **fields})


async def test_a_suffix_is_put_after_the_prompt_where_the_model_learned_that() -> None:
    marks = FillIn("<a>", "<b>", "<c>")
    app = App(RecordingEngine(welcome=msgspec.structs.replace(WELCOME, fill_in=marks)))
    assert (await complete(app, suffix="return x", max_tokens=5)).status == 200
    sent = app.engine.asked[-1].body
    assert sent["prompt"] == "<a>def f(<b>return x<c>" and "suffix" not in sent
    assert sent["max_tokens"] == 5
    for empty in ("", None):
        await complete(app, suffix=empty)
        assert app.engine.asked[-1].body["prompt"] == "def f("
    num_asked = len(app.engine.asked)
    bad: list[dict[str, Any]] = [{"prompt": [1, 2]}, {"prompt": ["a", "b"]}, {"echo": True}]
    for fields in bad:
        reply = await complete(app, suffix="x", **fields)
        assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert (await complete(app, suffix=5)).status == 400
    assert len(app.engine.asked) == num_asked


async def test_a_suffix_is_refused_elsewhere(app: App) -> None:
    reply = await complete(app, suffix="x")
    assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert app.engine.asked == []
