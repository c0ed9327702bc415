"""The budget of all bodies, while they come, wait and are computed, and the weight of one."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from engines.openai.errors import InvalidRequest
from gateway.edge.bodies import LARGE_BODY_BYTES, BodyBudget, BodyShare, check_weight
from gateway.errors import RequestRefused
from gateway.keys import generate_key
from scheduler.config import SchedulerConfig
from tests.unit.gateway.in_process import MODEL, App, HoldingEngine
from tests.waiting import eventually

TEXT = "x" * 50_000


def share_of(budget: BodyBudget, tenant: str) -> BodyShare:
    share = BodyShare(budget)
    share.tenant = tenant
    return share


def test_one_tenant_leaves_a_quarter_to_others() -> None:
    budget = BodyBudget(100)
    first, second = share_of(budget, "one"), share_of(budget, "one")
    first.grow(60)
    second.grow(15)
    with pytest.raises(RequestRefused):
        second.grow(16)
    share_of(budget, "other").grow(25)
    first.give_back()
    second.grow(75)


def test_shares_never_exceed_the_budget_and_come_back() -> None:
    budget = BodyBudget(100)
    one, other = share_of(budget, "one"), share_of(budget, "other")
    one.grow(60)
    one.grow(40)  # less than it has
    with pytest.raises(RequestRefused):
        other.grow(41)
    other.grow(40)
    assert budget.nbytes == 100
    one.give_back()
    one.give_back()
    assert budget.nbytes == 40
    other.give_back()
    assert budget.nbytes == 0


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(JSON)
def test_marks_inside_texts_weigh_nothing(value: object) -> None:
    """A body is refused for its values, not for the characters of its texts."""
    text = json.dumps(value) * 3
    body = msgspec.json.encode({"a": [text * (LARGE_BODY_BYTES // max(1, len(text)) * 5), value]})
    check_weight(body)


@pytest.mark.parametrize("item", [b"{}", b"[]", b'{"":0}', b'"ab"', b"1"])
def test_a_body_that_would_take_too_much_is_refused(item: bytes) -> None:
    body = b'{"x": [' + b",".join([item] * 1_200_000) + b"]}"
    with pytest.raises(InvalidRequest, match="too many values"):
        check_weight(body)


def test_a_long_prompt_of_token_ids_is_taken() -> None:
    check_weight(json.dumps({"prompt": list(range(400_000))}).encode())


# ---- of requests


async def test_bytes_that_never_come_keep_no_client_out() -> None:
    app = App(max_bodies_bytes=100_000)
    started = [asyncio.Event() for _ in range(8)]
    idle = [asyncio.create_task(begun(app, event)) for event in started]
    async with asyncio.timeout(10):
        for event in started:
            await event.wait()
    assert app.gateway.bodies.nbytes == 8  # of 480,000 that they declare
    assert (await app.chat(TEXT)).status == 200
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)
    assert app.gateway.bodies.nbytes == 0


async def begun(app: App, waiting: asyncio.Event) -> None:
    """POST a body of which one byte comes."""
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Message:
        if pieces:
            return pieces.pop()
        waiting.set()
        return await asyncio.Future()

    async def send(message: Message) -> None:
        raise AssertionError("it is answered before its body has come")

    headers = {"content-type": "application/json", "content-length": "60000"}
    scope = app.scope("POST", "/v1/chat/completions", headers)
    await app.app(scope, receive, send)


@pytest.mark.parametrize("tenants", [("alice", "alice"), ("alice", "bob")])
async def test_one_tenant_cannot_fill_the_budget(tenants: tuple[str, str]) -> None:
    (a_key, a_line), (b_key, b_line) = (generate_key(x) for x in ("alice", "bob"))
    app = App(max_bodies_bytes=130_000, api_keys=(a_line, b_line))
    app.gateway.bodies.take("alice", 60_000)
    key = a_key if tenants[1] == "alice" else b_key
    body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
    answer = await app.post("/v1/chat/completions", body, authorization=f"Bearer {key}")
    assert answer.status == (503 if tenants[1] == "alice" else 200), answer.body


async def test_a_body_counts_in_the_line_but_not_while_the_engine_computes() -> None:
    engine = HoldingEngine()
    app = App(engine, SchedulerConfig(max_running=1), max_bodies_bytes=150_000)
    first = asyncio.create_task(app.chat(TEXT, session_id="a"))
    await eventually(lambda: engine.asked)
    assert app.gateway.bodies.nbytes == 0
    second = asyncio.create_task(app.chat(TEXT, session_id="b"))
    await eventually(lambda: app.sessions.num_waiting)
    assert app.gateway.bodies.nbytes > len(TEXT)
    engine.going_on.set()
    assert [(await x).status for x in (first, second)] == [200, 200]
    assert app.gateway.bodies.nbytes == 0
