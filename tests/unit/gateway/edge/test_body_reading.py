"""The bytes of bodies that count while they come, while turns wait and while engines compute."""

from __future__ import annotations

import asyncio

import pytest

from gateway.keys import generate_key
from scheduler.config import SchedulerConfig
from tests.unit.gateway.in_process import App, HoldingEngine, RecordingEngine
from tests.waiting import eventually

TEXT = "x" * 50_000
DECLARED = {"content-type": "application/json", "content-length": "60000"}


async def until_asked(engine: RecordingEngine, times: int) -> None:
    await eventually(lambda: len(engine.asked) >= times)


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

    async def receive() -> dict[str, object]:
        if pieces:
            return pieces.pop()
        waiting.set()
        return await asyncio.Future()

    async def send(message: object) -> None:
        raise AssertionError("it is answered before its body has come")

    headers = [(k.encode(), v.encode()) for k, v in {"host": "localhost", **DECLARED}.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"raw_path": b"", "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1)}
    scope |= {"server": ("127.0.0.1", 8080), "http_version": "1.1", "scheme": "http"}
    await app.app(scope, receive, send)  # type: ignore[arg-type]


@pytest.mark.parametrize("tenants", [("alice", "alice"), ("alice", "bob")])
async def test_one_tenant_cannot_fill_the_budget(tenants: tuple[str, str]) -> None:
    (a_key, a_line), (b_key, b_line) = (generate_key(x) for x in ("alice", "bob"))
    app = App(max_bodies_bytes=130_000, api_keys=(a_line, b_line))
    app.gateway.bodies.take("alice", 60_000)
    key = a_key if tenants[1] == "alice" else b_key
    body = {"model": "org/model-1", "messages": [{"role": "user", "content": TEXT}]}
    answer = await app.post("/v1/chat/completions", body, authorization=f"Bearer {key}")
    assert answer.status == (503 if tenants[1] == "alice" else 200), answer.body


async def test_a_body_counts_in_the_line_but_not_while_the_engine_computes() -> None:
    engine = HoldingEngine()
    app = App(engine, SchedulerConfig(max_running=1), max_bodies_bytes=150_000)
    first = asyncio.create_task(app.chat(TEXT, session_id="a"))
    await until_asked(engine, 1)
    assert app.gateway.bodies.nbytes == 0
    second = asyncio.create_task(app.chat(TEXT, session_id="b"))
    await eventually(lambda: app.sessions.num_waiting)
    assert app.gateway.bodies.nbytes > len(TEXT)
    engine.going_on.set()
    assert [(await x).status for x in (first, second)] == [200, 200]
    assert app.gateway.bodies.nbytes == 0
