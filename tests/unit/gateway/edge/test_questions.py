"""Requests beside turns (tokens, counts) are within the key's limits, and of bounded weight."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import FrameType

import pytest

from gateway.edge.bodies import LARGE_BODY_BYTES, check_weight, parse_whole
from gateway.openai.models import _for_engine
from scheduler.sessions import QUESTIONS_AT_ONCE
from tests.unit.gateway.in_process import MODEL, App, HoldingEngine, RecordingEngine, json_answer
from tests.waiting import eventually

HI = [{"role": "user", "content": "hi"}]
QUESTIONS = {
    "/tokenize": {"model": MODEL, "prompt": "hi"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "hi"},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": HI},
}
# Of 500,000 objects, each of which takes many times its bytes.
HEAVY = b'{"model": "' + MODEL.encode() + b'", "x": [' + b"{}," * 500_000 + b"{}]}"


def counting_engine() -> RecordingEngine:
    return RecordingEngine(json_answer({"count": 3}))


@pytest.mark.parametrize("path", QUESTIONS)
async def test_a_question_is_a_request_of_its_key(path: str) -> None:
    app = App(counting_engine(), requests_per_minute=1)
    first = await app.post(path, QUESTIONS[path])
    assert first.status == 200, first.body
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await app.post(path, QUESTIONS[path])).status == 429


@pytest.mark.parametrize("path", QUESTIONS)
async def test_a_question_runs_until_it_is_answered(path: str) -> None:
    engine = HoldingEngine(json_answer({"count": 3}))
    app = App(engine, concurrent_requests=1)
    first = asyncio.create_task(app.post(path, QUESTIONS[path]))
    await eventually(lambda: engine.asked)
    assert (await app.post(path, QUESTIONS[path])).status == 429
    engine.going_on.set()
    assert (await first).status == 200
    assert (await app.post(path, QUESTIONS[path])).status == 200


async def test_few_questions_are_with_the_engine_at_once() -> None:
    """Otherwise one tenant's would all wait in the engine, before any other's."""
    engine = HoldingEngine(json_answer({"count": 3}))
    app = App(engine)
    asking = [asyncio.create_task(app.post("/tokenize", QUESTIONS["/tokenize"])) for _ in range(9)]
    await eventually(lambda: len(engine.asked) >= QUESTIONS_AT_ONCE)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(engine.asked) == QUESTIONS_AT_ONCE
    engine.going_on.set()
    assert [x.status for x in await asyncio.gather(*asking)] == [200] * 9


@pytest.mark.parametrize("path", [*QUESTIONS, "/v1/conversations", "/v1/conversations/conv_1"])
async def test_too_many_values_are_refused_before_they_are_parsed(path: str) -> None:
    reply = await App(counting_engine()).post(path, HEAVY)
    assert reply.status == 400, reply.body
    assert b"too many values" in reply.body


async def test_a_large_question_is_parsed_on_a_thread() -> None:
    """Streams go on meanwhile: the event loop's thread has no part in it."""
    app = App(counting_engine())
    work = {x.__code__: x.__name__ for x in (check_weight, parse_whole, _for_engine)}
    done: set[tuple[str, bool]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if name := work.get(frame.f_code):
            done.add((name, threading.current_thread() is threading.main_thread()))

    question = {"model": MODEL, "prompt": "x " * LARGE_BODY_BYTES}
    threading.setprofile(note)  # of threads that start from now on
    sys.setprofile(note)  # of this thread
    try:
        assert (await app.post("/tokenize", question)).status == 200
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert done == {(name, False) for name in work.values()}


async def test_far_too_many_tokens_never_reach_the_engine() -> None:
    app = App(counting_engine())  # of 100 tokens
    reply = await app.post("/detokenize", {"model": MODEL, "tokens": [1] * 401})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    assert app.engine.asked == []
    assert (await app.post("/detokenize", {"model": MODEL, "tokens": [1] * 400})).status == 200
