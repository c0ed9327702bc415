"""A stream whose model is being loaded: comments, then its turn, or an event that says why not."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from engines.base import EngineUnavailable
from gateway.errors import Failure
from gateway.relay.turn_response import TurnResponse
from gateway.relay.while_loading import WhileLoading


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
    response = WhileLoading(preparing, lambda: "loading", Failure.event, every_s)
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
