"""Embeddings at the gateway: the request to an engine, and the answer of one that has none."""

from __future__ import annotations

import asyncio

from engines.http import TENANT_HEADER
from tests.unit.gateway.in_process import (
    MODEL,
    Answered,
    App,
    HoldingEngine,
    RecordingEngine,
    json_answer,
)
from tests.waiting import eventually

PATH = "/v1/embeddings"
JSON = {"content-type": "application/json"}
ANSWER = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [1.0]}],
    "usage": {"prompt_tokens": 7, "total_tokens": 7},
}


def app_of(answer: Answered, **settings: object) -> App:
    return App(RecordingEngine(answer), **settings)


async def test_the_engine_is_asked_and_its_answer_is_passed_on() -> None:
    app = app_of(json_answer(ANSWER), model_aliases=["text-embedding-3-small"])
    more = {"encoding_format": "base64", "dimensions": 4, "user": "u", "cache_salt": "x"}
    body = {"model": "text-embedding-3-small", "input": ["a", "b"], **more}
    reply = await app.post(PATH, body)
    assert reply.json == ANSWER
    assert reply.headers["x-thermocline-ignored"] == "cache_salt"
    (asked,) = app.engine.asked
    assert asked.path == PATH
    assert asked.body == {
        "model": MODEL,
        "input": ["a", "b"],
        "encoding_format": "base64",
        "dimensions": 4,
    }
    assert "x-session" not in asked.headers
    assert asked.headers[TENANT_HEADER] == "local"


async def test_its_tokens_are_those_of_the_key() -> None:
    app = app_of(json_answer(ANSWER), tokens_per_minute=5)
    assert (await app.post(PATH, {"model": MODEL, "input": "a"})).status == 200
    assert (await app.post(PATH, {"model": MODEL, "input": "a"})).status == 429
    metrics = (await app.get("/metrics")).body.decode()
    counted = [
        x for x in metrics.splitlines() if 'operation_name="embeddings"' in x and "_sum" in x
    ]
    assert len(counted) == 1 and counted[0].endswith(" 7.0")


async def test_an_engine_that_makes_none() -> None:
    for body in (b"404: Not Found", b'{"detail": "Not Found"}'):
        reply = await app_of(Answered(404, JSON, body)).post(PATH, {"model": MODEL, "input": "a"})
        assert (reply.status, reply.error["code"]) == (404, "not_supported")
        assert PATH in reply.error["message"]


async def test_bodies_that_are_no_request_for_embeddings() -> None:
    app = app_of(json_answer(ANSWER))
    for body, param in (
        ({"model": MODEL}, "input"),
        ({"input": "a"}, "model"),
        ({"model": MODEL, "input": [["a"]]}, "input"),
        ({"model": MODEL, "input": [1, "a"]}, "input"),
        ({"model": MODEL, "input": [-1]}, "input"),
        ({"model": MODEL, "input": ["a"] * 2049}, "input"),
        ({"model": MODEL, "input": "a", "dimensions": "4"}, "dimensions"),
    ):
        reply = await app.post(PATH, body)
        assert reply.status == 400 and (reply.error["param"] or "").startswith(param)
    assert (await app.post(PATH, {"model": "other", "input": "a"})).status == 404
    assert app.engine.asked == []


async def test_questions_that_are_held_count_as_bodies_until_they_are_answered() -> None:
    engine = HoldingEngine(json_answer(ANSWER))
    app = App(engine, max_bodies_bytes=4 << 20, max_body_bytes=1 << 20)
    body = {"model": MODEL, "input": "x" * 1_000_000}
    asking = [asyncio.create_task(app.post(PATH, body)) for _ in range(6)]
    await eventually(lambda: len(engine.asked) + sum(x.done() for x in asking) >= 6)
    # Three quarters of all bodies' bytes are one tenant's.
    assert len(engine.asked) == 3
    assert app.gateway.bodies.nbytes > 3_000_000
    engine.going_on.set()
    replies = await asyncio.gather(*asking)
    assert sorted(x.status for x in replies) == [200, 200, 200, 503, 503, 503]
    assert app.gateway.bodies.nbytes == 0
