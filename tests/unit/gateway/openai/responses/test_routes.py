"""POST /v1/responses: the request to the engine, and the answer to the client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

from tests.unit.gateway.in_process import (
    MODEL,
    Answered,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
    json_answer,
)

PATH = "/v1/responses/input_tokens"


def app_of(**settings: Any) -> App:
    return App(RecordingEngine(chat_answer()), **settings)


async def respond(app: App, **fields: Any) -> Reply:
    return await app.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})


async def test_a_text_is_asked_and_answered() -> None:
    app = app_of()
    reply = await respond(
        app,
        instructions="be brief",
        max_output_tokens=9,
        temperature=0.5,
        reasoning={"effort": "low"},
        prompt_cache_key="k",
        prompt_cache_options={"mode": "explicit", "ttl": "30m", "prewarm": True},
        prompt_cache_retention="24h",
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )
    assert reply.status == 200, reply.body
    (asked,) = app.engine.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert asked.body["max_completion_tokens"] == 9
    assert asked.body["reasoning_effort"] == "low"
    assert asked.body["response_format"]["json_schema"]["name"] == "n"
    response = Response.model_validate(reply.json)
    assert response.output_text == "yo"
    assert (response.status, response.instructions) == ("completed", "be brief")
    assert reply.json["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert (response.prompt_cache_key, response.prompt_cache_retention) == ("k", "24h")
    assert response.usage.total_tokens == 4
    assert reply.headers["x-thermocline-session"]


async def test_tools_become_functions_and_others_are_counted() -> None:
    app = app_of()
    tools = [
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True},
        {"type": "web_search"},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "S: x"}},
        {"type": "brand_new"},
    ]
    reply = await respond(app, tools=tools, parallel_tool_calls=False)
    assert [x["type"] for x in reply.json["tools"]] == [x["type"] for x in tools], "all come back"
    body = app.engine.asked[0].body
    look, patch = (x["function"] for x in body["tools"])
    assert look == {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert patch["parameters"]["required"] == ["input"]
    assert "S: x" in patch["description"]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
    metrics = (await app.get("/metrics")).body.decode()
    assert 'thermocline_left_out_total{kind="web_search"} 1.0' in metrics
    assert 'thermocline_left_out_total{kind="other"} 1.0' in metrics


@pytest.mark.parametrize(
    ("choice", "names", "wanted"),
    [
        ("required", ["a", "b"], "required"),
        ({"type": "function", "name": "b"}, ["a", "b"], "b"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]},
         ["b"], "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "a"}]}, ["a"],
         "required"),
    ],
)  # fmt: skip
async def test_the_choice_of_tools(choice: Any, names: list[str], wanted: str) -> None:
    app = app_of()
    tools = [{"type": "function", "name": x} for x in "ab"]
    assert (await respond(app, tools=tools, tool_choice=choice)).status == 200
    body = app.engine.asked[0].body
    assert [x["function"]["name"] for x in body["tools"]] == names
    found = body["tool_choice"]
    assert (found if isinstance(found, str) else found["function"]["name"]) == wanted


async def test_a_probe_with_empty_input() -> None:
    for given in ([], "", None):
        app = app_of()
        assert (await respond(app, input=given, max_output_tokens=1)).status == 200
        assert app.engine.asked[0].body["messages"] == [{"role": "user", "content": ""}]


async def test_without_a_model_it_is_the_one_that_is_served() -> None:
    app = app_of()
    reply = await app.post("/v1/responses", {"input": "hi"})
    assert reply.json["model"] == MODEL
    assert (await respond(app, model="nope")).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
        ({"conversation": "c", "previous_response_id": "r"}, "conversation"),
    ],
)  # fmt: skip
async def test_a_field_that_cannot_be_served_is_refused_by_name(fields: Any, param: str) -> None:
    app = app_of()
    reply = await respond(app, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert reply.error["message"]
    assert app.engine.asked == []


async def test_a_refusal_of_the_engine_names_the_clients_field() -> None:
    for param, name in (("messages", "input"), ("response_format", "text.format")):
        said = {"error": {"message": f"{param}: no", "param": param, "code": "c"}}
        reply = await respond(App(RecordingEngine(json_answer(said, 400))))
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "c")
        assert reply.error["message"] == f"{name}: no"


def counting_app(status: int, body: bytes) -> App:
    return App(RecordingEngine(Answered(status, {"content-type": "application/json"}, body)))


async def count(app: App) -> Reply:
    body = {"input": "hi", "instructions": "brief", "tools": [{"type": "function", "name": "a"}]}
    return await app.post(PATH, body)


async def test_the_engine_counts() -> None:
    app = counting_app(200, b'{"count": 12, "tokens": [1]}')
    reply = await count(app)
    assert reply.json == {"object": "response.input_tokens", "input_tokens": 12}
    (asked,) = app.engine.asked
    assert asked.path == "/tokenize"
    assert [x["role"] for x in asked.body["messages"]] == ["system", "user"]
    assert asked.body["tools"][0]["function"]["name"] == "a"
    assert (asked.body["model"], "max_tokens" in asked.body) == (MODEL, False)


async def test_an_engine_that_cannot_count() -> None:
    reply = await count(counting_app(404, b"{}"))
    assert (reply.status, reply.error["code"]) == (404, "not_supported")
    reply = await count(counting_app(400, b'{"error": {"message": "too long", "code": "c"}}'))
    assert (reply.status, reply.error["code"]) == (400, "c")
    assert (await counting_app(200, b"{}").post(PATH, {"input": 5})).error["param"] == "input"


async def test_an_engine_that_knows_no_path_is_no_failure_of_the_gateway() -> None:
    reply = await counting_app(404, b"404: Not Found").post("/detokenize", {"tokens": [1]})
    assert (reply.status, reply.error["code"]) == (404, "not_supported")
    assert "/detokenize" in reply.error["message"]


async def test_a_count_that_is_none() -> None:
    reply = await count(counting_app(200, b"[]"))
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
