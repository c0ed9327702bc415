"""Counting a request's tokens by the engine's tokenizer."""

from __future__ import annotations

from tests.unit.gateway.in_process import MODEL, Answered, App, RecordingEngine, Reply

PATH = "/v1/responses/input_tokens"


def app_of(status: int, body: bytes) -> App:
    return App(RecordingEngine(Answered(status, {"content-type": "application/json"}, body)))


async def count(app: App) -> Reply:
    body = {"input": "hi", "instructions": "brief", "tools": [{"type": "function", "name": "a"}]}
    return await app.post(PATH, body)


async def test_the_engine_counts() -> None:
    app = app_of(200, b'{"count": 12, "tokens": [1]}')
    reply = await count(app)
    assert reply.json == {"object": "response.input_tokens", "input_tokens": 12}
    (asked,) = app.engine.asked
    assert asked.path == "/tokenize"
    assert [x["role"] for x in asked.body["messages"]] == ["system", "user"]
    assert asked.body["tools"][0]["function"]["name"] == "a"
    assert (asked.body["model"], "max_tokens" in asked.body) == (MODEL, False)


async def test_an_engine_that_cannot_count() -> None:
    reply = await count(app_of(404, b"{}"))
    assert (reply.status, reply.error["code"]) == (404, "not_supported")
    reply = await count(app_of(400, b'{"error": {"message": "too long", "code": "c"}}'))
    assert (reply.status, reply.error["code"]) == (400, "c")
    assert (await app_of(200, b"{}").post(PATH, {"input": 5})).error["param"] == "input"


async def test_an_engine_that_knows_no_path_is_no_failure_of_the_gateway() -> None:
    reply = await app_of(404, b"404: Not Found").post("/detokenize", {"tokens": [1]})
    assert (reply.status, reply.error["code"]) == (404, "not_supported")
    assert "/detokenize" in reply.error["message"]


async def test_a_count_that_is_none() -> None:
    reply = await count(app_of(200, b"[]"))
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
