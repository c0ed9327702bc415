"""Items that a request recalls are counted before they are read; reading ends with the client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.http import ClientGone
from gateway.openai.responses.history import full_items
from gateway.openai.responses.items import MAX_DEPTH, MAX_VALUES
from gateway.stored.objects import Objects
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.stored import Stored
from tests.stored_objects import stored_in
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply, chat_answer
from tests.waiting import eventually

KIB = 1 << 10
JSON = {"content-type": "application/json"}
LIMIT = 600 * KIB


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    made = stored_in(tmp_path / "stored.sqlite", 1 << 27)
    yield made
    await made.close()


def app_of(stored: Stored, **settings: Any) -> App:
    return App(RecordingEngine(chat_answer()), stored=stored, **settings)


async def conversation(app: App, *texts: str) -> str:
    id = (await app.post("/v1/conversations", {})).json["id"]
    for text in texts:
        items = {"items": [{"role": "user", "content": text}]}
        assert (await app.post(f"/v1/conversations/{id}/items", items)).status == 200
    return str(id)


async def respond(app: App, **fields: Any) -> Reply:
    return await app.post("/v1/responses", {"model": MODEL, "input": "x", **fields})


PATHS = ["/v1/responses", "/v1/responses/input_tokens"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_conversation_counts_as_the_body_that_names_it(stored: Stored, path: str) -> None:
    app = app_of(stored, max_body_bytes=LIMIT)
    id = await conversation(app, *("x" * 200 * KIB for _ in range(2)))
    assert (await respond(app, conversation=id, store=False)).status == 200
    parts = [{"role": "user", "content": "x" * 250 * KIB}]
    large = {"model": MODEL, "input": parts, "conversation": id}
    replies = [await app.post(path, large)]
    id = await conversation(app, *("x" * 200 * KIB for _ in range(4)))
    num_asked = len(app.engine.asked)
    replies.append(await app.post(path, {"model": MODEL, "input": "x", "conversation": id}))
    for reply in replies:
        assert (reply.status, reply.error["code"]) == (400, "conversation_too_large")
        assert reply.error["param"] == "conversation"
        assert "Begin a new conversation" in reply.error["message"]
    assert len(app.engine.asked) == num_asked
    assert app.gateway.bodies.nbytes == 0


async def test_so_do_the_turns_before_a_response(stored: Stored) -> None:
    app = app_of(stored, max_body_bytes=LIMIT)
    before = None
    statuses = []
    for _ in range(5):
        text = [{"role": "user", "content": "x" * 150 * KIB}]
        reply = await respond(app, input=text, previous_response_id=before)
        statuses.append(reply.status)
        before = reply.json.get("id", before)
    assert statuses == [200, 200, 200, 400, 400]
    assert reply.error["code"] == "conversation_too_large"
    assert reply.error["param"] == "previous_response_id"


async def test_and_the_items_that_are_referred_to(stored: Stored) -> None:
    app = app_of(stored, max_body_bytes=LIMIT)
    references = []
    for _ in range(3):
        id = await conversation(app, "x" * 250 * KIB)
        (item,) = (await app.get(f"/v1/conversations/{id}/items")).json["data"]
        references.append({"type": "item_reference", "id": item["id"]})
    assert (await respond(app, input=references[:2])).status == 200
    reply = await respond(app, input=references)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert (await respond(app, input=[references[0]] * 1000)).status == 400


async def test_nothing_of_a_body_that_is_too_large_is_read(stored, monkeypatch):
    app = app_of(stored, max_body_bytes=LIMIT)
    id = await conversation(app, *("x" * 200 * KIB for _ in range(4)))
    read = []
    pages = SqliteTable.pages
    monkeypatch.setattr(SqliteTable, "pages", lambda *args: read.append(args) or pages(*args))
    assert (await respond(app, conversation=id)).status == 400
    assert read == []


async def test_a_long_line_is_read_as_far_as_it_is_new(stored, monkeypatch):
    app = app_of(stored)
    read = []
    pages = SqliteTable.pages

    def noted(self: SqliteTable, tenant: str, name: str, numbers: Any) -> Any:
        read.extend(numbers)
        return pages(self, tenant, name, numbers)

    monkeypatch.setattr(SqliteTable, "pages", noted)
    before, num_read, ids = None, [], []
    for number in range(30):
        read.clear()
        reply = await respond(app, input=f"question {number}", previous_response_id=before)
        before = reply.json["id"]
        ids.append(before)
        num_read.append(len(read))
    assert len(set(num_read[1:])) == 1 <= num_read[1] <= 2  # the turn before, at any depth
    texts = [x["content"] for x in app.engine.asked[-1].body["messages"] if x["role"] == "user"]
    assert texts == [f"question {number}" for number in range(30)]
    assert (await app.call("DELETE", f"/v1/responses/{ids[10]}", b"", {})).status == 200
    assert (await respond(app, previous_response_id=before)).status == 400


async def test_recalled_items_count_in_the_budget_of_all_bodies(stored: Stored) -> None:
    app = app_of(stored, max_bodies_bytes=1000 * KIB)
    id = await conversation(app, *("x" * 200 * KIB for _ in range(4)))
    reply = await respond(app, conversation=id)
    assert (reply.status, reply.error["code"]) == (503, "bodies_full")
    assert app.gateway.bodies.nbytes == 0


async def test_values_are_counted_before_they_are_parsed(stored: Stored) -> None:
    app = app_of(stored)
    outputs = [
        {"type": "function_call_output", "call_id": "c", "output": [[1]] * (MAX_VALUES // 3)}
    ]
    id = (await app.post("/v1/conversations", {})).json["id"]
    for _ in range(10):
        items = {"items": outputs * 4}
        assert (await app.post(f"/v1/conversations/{id}/items", items)).status == 200
    reply = await respond(app, conversation=id)
    assert (reply.status, reply.error["code"]) == (400, "too_many_values")
    assert "history that the request continues" in reply.error["message"]


def nested(depth: int) -> Any:
    inner: Any = 1
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "output", [nested(MAX_DEPTH), {"a": nested(MAX_DEPTH)}, [0] * MAX_VALUES, [[]] * MAX_VALUES]
)
async def test_an_item_has_bounds_of_its_own(stored: Stored, output: Any) -> None:
    app = app_of(stored)
    bad = {"type": "function_call_output", "call_id": "c", "output": output}
    fine = {**bad, "output": [nested(MAX_DEPTH - 3), [0] * (MAX_VALUES // 2)]}
    id = await conversation(app)
    for path, field in [
        ("/v1/conversations", "items"),
        (f"/v1/conversations/{id}/items", "items"),
        ("/v1/responses", "input"),
    ]:
        reply = await app.post(path, {"model": MODEL, field: [fine, bad]})
        assert (reply.status, reply.error["param"]) == (400, f"{field}[1]")
        assert (await app.post(path, {"model": MODEL, field: [fine]})).status == 200


async def test_who_leaves_ends_the_reading(stored: Stored) -> None:
    """Steps of the work wait for this test, so it is known where the client leaves."""
    app = app_of(stored)
    id = await conversation(app, *("x" * 400 * KIB for _ in range(8)))
    leaves, reading, go_on = asyncio.Event(), threading.Event(), threading.Event()
    steps = []
    ask = stored.ask

    async def slow(tenant: str, work: Any, absent: Any, *hold: Any) -> Any:
        def slowly(objects: Objects) -> Any:
            own = work(objects)
            while True:
                steps.append(len(steps))
                if len(steps) == 3:
                    reading.set()
                    go_on.wait(20)
                try:
                    yield next(own) or 1
                except StopIteration as end:
                    return end.value

        return await ask(tenant, slowly, absent, *hold)

    stored.ask = slow  # type: ignore[method-assign]
    body = json.dumps({"model": MODEL, "input": "x", "conversation": id}).encode()
    asked = asyncio.create_task(app.call("POST", "/v1/responses", body, JSON, leaves))
    await asyncio.to_thread(reading.wait, 20)
    leaves.set()
    reply = await asyncio.wait_for(asked, 20)  # though the step that runs has not ended
    go_on.set()
    assert reply.status == 0  # no client is there to be answered
    await asyncio.sleep(0.2)
    assert len(steps) == 3
    assert app.engine.asked == [] and app.gateway.bodies.nbytes == 0
    assert ClientGone  # the error that ends it


async def test_an_answer_counts_while_it_is_sent(stored: Stored) -> None:
    app = app_of(stored)
    id = await conversation(app, *("x" * 200 * KIB for _ in range(4)))
    reads, leaves = asyncio.Event(), asyncio.Event()
    path = f"/v1/conversations/{id}/items"
    asked = asyncio.create_task(app.call("GET", path, b"", {}, leaves, reads))
    await eventually(lambda: app.gateway.bodies.nbytes >= 800 * KIB)
    reads.set()
    assert len((await asked).json["data"]) == 4
    assert app.gateway.bodies.nbytes == 0


def test_an_items_id_that_is_too_long_is_replaced() -> None:
    kept, made = full_items([{"role": "user", "content": "a", "id": "x" * n} for n in (256, 257)])
    assert kept["id"] == "x" * 256
    assert made["id"].startswith("msg_") and len(made["id"]) < 100
