"""Responses that are stored: gone on from, shown, listed, deleted, and hidden from others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import Response, ResponseItemList

from gateway.stored.objects import ObjectStore
from gateway.stored.redis_table import RedisTable
from gateway.stored.stored import Stored
from gateway.stored.table import StoredLimits, StoreFailed
from tests.redis_server import RedisServer
from tests.stored_objects import KEY_OF, hidden, stored_in
from tests.unit.gateway.in_process import (
    MODEL,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
    streamed,
)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    yield stored_in(tmp_path / "stored.sqlite")


@pytest.fixture
async def app(stored: Stored) -> Any:
    yield App(RecordingEngine(chat_answer("yo")), stored=stored)
    await stored.close()


async def respond(app: App, text: Any = "hi", **fields: Any) -> Reply:
    return await app.post("/v1/responses", {"model": MODEL, "input": text, **fields})


def messages(app: App) -> list[tuple[str, str]]:
    return [(x["role"], x["content"]) for x in app.engine.asked[-1].body["messages"]]


def session(app: App) -> str:
    return app.engine.asked[-1].headers["x-session"]


async def test_a_response_goes_on_from_the_ones_before(app: App) -> None:
    first = (await respond(app, "one", instructions="be brief")).json
    assert first["store"] is True
    began = session(app)
    app.engine.answer = chat_answer("ya")
    second = (await respond(app, "two", previous_response_id=first["id"])).json
    assert messages(app) == [("user", "one"), ("assistant", "yo"), ("user", "two")]
    assert second["previous_response_id"] == first["id"]
    third = await respond(app, "three", previous_response_id=second["id"], instructions="new")
    assert messages(app) == [
        ("system", "new"),
        *[("user", "one"), ("assistant", "yo"), ("user", "two"), ("assistant", "ya")],
        ("user", "three"),
    ]
    assert third.headers["x-thermocline-session"] == began == session(app)


async def test_a_session_that_the_client_names_goes_first(app: App) -> None:
    first = (await respond(app)).json
    body = {"model": MODEL, "input": "x", "previous_response_id": first["id"]}
    await app.post("/v1/responses", body, x_session_id="mine")
    assert session(app) == "mine"


async def test_conversations_that_began_alike_have_sessions_of_their_own(app: App) -> None:
    first, other = (await respond(app)).json, (await respond(app)).json
    assert session(app).startswith("chat-")
    sessions = []
    for _ in range(2):
        for turn in (first, other):
            turn |= (await respond(app, "on", previous_response_id=turn["id"])).json
            sessions.append(session(app))
    one, two, again, again_two = sessions
    assert (one, two) == (again, again_two)
    assert one != two


async def test_a_lost_turn_is_an_error_and_never_half_a_conversation(app: App) -> None:
    first = (await respond(app)).json
    second = (await respond(app, previous_response_id=first["id"])).json
    assert (await app.call("DELETE", f"/v1/responses/{first['id']}", b"", {})).json["deleted"]
    reply = await respond(app, previous_response_id=second["id"])
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")
    assert len(app.engine.asked) == 2


async def test_a_stored_response_is_shown_listed_and_deleted(app: App) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"id": "msg_mine", "role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    made = (await respond(app, items)).json
    path = f"/v1/responses/{made['id']}"
    shown = await app.get(path)
    assert Response.model_validate(shown.json).output_text == "yo"
    assert shown.json == made
    listed = (await app.get(f"{path}/input_items?limit=2&order=asc")).json
    page = ResponseItemList.model_validate(listed)
    assert (page.has_more, page.last_id) == (True, "msg_mine")
    assert [x["content"][0]["text"] for x in listed["data"]] == ["a", "b"]
    rest = (await app.get(f"{path}/input_items?order=asc&after=msg_mine")).json
    assert [x["content"][0]["text"] for x in rest["data"]] == ["c"]
    assert (await app.post(path + "/cancel")).error["code"] == "not_cancellable"
    assert (await app.call("DELETE", path, b"", {})).status == 200
    for reply in (await app.get(path), await app.call("DELETE", path, b"", {})):
        assert (reply.status, reply.error["type"]) == (404, "not_found_error")


async def test_streams_are_stored_before_their_end_is_sent(app: App) -> None:
    app.engine.answer = streamed()
    stream = (await respond(app, stream=True)).body.decode()
    last = json.loads(stream.rstrip().rpartition("data: ")[2])["response"]
    assert (await app.get(f"/v1/responses/{last['id']}")).json == last
    app.engine.answer = streamed(ending=b"")
    stream = (await respond(app, stream=True)).body.decode()
    failed = json.loads(stream.rstrip().rpartition("data: ")[2])["response"]
    assert failed["status"] == "failed"
    assert (await app.get(f"/v1/responses/{failed['id']}")).status == 404


async def test_who_does_not_want_it_stored_finds_nothing(app: App) -> None:
    made = (await respond(app, store=False)).json
    assert made["store"] is False
    assert (await app.get(f"/v1/responses/{made['id']}")).status == 404


async def test_where_nothing_is_stored_requests_are_served_all_the_same() -> None:
    app = App(RecordingEngine(chat_answer("yo")))
    made = (await respond(app, store=True)).json
    assert (made["status"], made["store"]) == ("completed", False)
    assert (await app.get(f"/v1/responses/{made['id']}")).status == 404
    assert (await respond(app, previous_response_id=made["id"])).status == 400
    assert (await app.post("/v1/conversations", {})).error["code"] == "not_stored"
    assert (await app.get("/v1/conversations/x")).status == 404


async def test_a_store_that_fails_costs_no_answer() -> None:
    def broken() -> Any:
        raise StoreFailed("no disk")

    stored = Stored(broken)
    app = App(RecordingEngine(chat_answer("yo")), stored=stored)
    made = await respond(app)
    assert made.status == 200
    found = await app.get(f"/v1/responses/{made.json['id']}")
    assert (found.status, found.error["code"]) == (503, "store_unavailable")
    await stored.close()


async def test_items_are_referred_to_by_id(app: App) -> None:
    first = (await respond(app, "one")).json
    (output,) = first["output"]
    reference = {"type": "item_reference", "id": output["id"]}
    nothing = {"type": "item_reference", "id": "msg_nothing"}
    assert (await respond(app, [{"role": "user", "content": "x"}, nothing])).status == 404
    asked = [{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}]
    assert (await respond(app, asked)).status == 200
    assert messages(app) == [("user", "one"), ("assistant", "yo"), ("user", "two")]
    listed = (await app.get(f"/v1/responses/{first['id']}/input_items")).json["data"]
    asked = [{"id": listed[0]["id"]}, {"role": "user", "content": "two"}]
    assert (await respond(app, asked)).status == 200
    assert messages(app) == [("user", "one"), ("user", "two")]
    again = [reference, {"role": "user", "content": "two"}]
    assert (await respond(app, again, previous_response_id=first["id"])).status == 200
    assert messages(app) == [("user", "one"), ("assistant", "yo"), ("user", "two")]


@pytest.mark.parametrize("place", ["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def test_the_second_turn_of_the_vercel_ai_sdk(tmp_path: Path, place: str) -> None:
    """By default it sends the model's items by reference, and those of users and tools in full."""
    with ExitStack() as stack:
        made = stored_in(tmp_path / "x")
        if place == "redis":
            server = stack.enter_context(RedisServer())
            made = Stored(
                lambda: ObjectStore(
                    RedisTable(server.url, StoredLimits(10**6, 1000.0), hidden, 5.0), KEY_OF
                )
            )
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        app = App(
            RecordingEngine(chat_answer("a look", reasoning="hm", tool_calls=[call])), stored=made
        )
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        user = {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}
        first = (await respond(app, [user], tools=[tool])).json
        kinds = {x["type"]: x["id"] for x in first["output"]}
        assert set(kinds) == {"reasoning", "message", "function_call"}
        references = [{"type": "item_reference", "id": x["id"]} for x in first["output"]]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
        app.engine.answer = chat_answer("it rains")
        second = await respond(app, [user, *references, result], tools=[tool])
        assert second.status == 200
        asked, called, returned = app.engine.asked[-1].body["messages"]
        assert (asked["content"], returned["content"]) == ("weather?", "rain")
        assert (called["content"], called["reasoning_content"]) == ("a look", "hm")
        assert called["tool_calls"][0]["function"]["name"] == "look"
        references += [result, *({"id": x["id"]} for x in second.json["output"])]
        third = [user, *references, {"role": "user", "content": "thanks"}]
        assert (await respond(app, third, tools=[tool])).status == 200
        assert [x["content"] for x in app.engine.asked[-1].body["messages"]] == [
            *("weather?", "a look", "rain", "it rains", "thanks")
        ]
        deleted = await app.call("DELETE", f"/v1/responses/{first['id']}", b"", {})
        assert deleted.status == 200
        # The second turn has its input, with references resolved, as its own.
        assert (await respond(app, third, tools=[tool])).status == 200
        assert (await app.call("DELETE", f"/v1/sessions/{session(app)}", b"", {})).status == 200
        lost = await respond(app, third, tools=[tool])
        assert (lost.status, lost.error["code"]) == (404, "item_not_found")
        await made.close()


async def test_a_conversation_grows_with_its_responses(app: App) -> None:
    made = (
        await app.post(
            "/v1/conversations",
            {"items": [{"role": "user", "content": "zero"}], "metadata": {"a": "b"}},
        )
    ).json
    id = Conversation.model_validate(made).id
    for text in ("one", "two"):
        reply = await respond(app, text, conversation=id, store=False)
        assert reply.json["conversation"] == {"id": id}
        assert session(app) == id
    assert messages(app) == [
        ("user", "zero"),
        *[("user", "one"), ("assistant", "yo"), ("user", "two")],
    ]
    listed = (await app.get(f"/v1/conversations/{id}/items?order=asc")).json
    assert [x["role"] for x in listed["data"]] == ["user", "user", "assistant", "user", "assistant"]
    assert ConversationItemList.model_validate(listed).has_more is False


async def test_a_response_of_a_conversation_can_be_gone_on_from_apart(app: App) -> None:
    id = (await app.post("/v1/conversations", {})).json["id"]
    first = (await respond(app, "one", conversation={"id": id})).json
    await respond(app, "two", conversation=id)
    await respond(app, "other", previous_response_id=first["id"])
    assert messages(app) == [("user", "one"), ("assistant", "yo"), ("user", "other")]


async def test_a_message_whose_id_came_before_is_kept_all_the_same(app: App) -> None:
    talk = (await app.post("/v1/conversations", {})).json["id"]
    for said in ("I am Ann", "My dog is Rex"):
        item = {"type": "message", "id": "msg_user", "role": "user", "content": said}
        await respond(app, [item], conversation=talk)
    await respond(app, "Who is Rex?", conversation=talk)
    assert [x for x in messages(app) if x[0] == "user"] == [
        ("user", "I am Ann"),
        ("user", "My dog is Rex"),
        ("user", "Who is Rex?"),
    ]
    items = [{"id": "msg_user", "role": "user", "content": "again"}]
    path = f"/v1/conversations/{talk}/items"
    (added,) = (await app.post(path, {"items": items})).json["data"]
    assert added["id"] != "msg_user" and added["content"][0]["text"] == "again"
    assert (await app.get(f"{path}/{added['id']}")).json == added


async def test_a_branch_has_nothing_that_came_after_it(app: App) -> None:
    talk = (await app.post("/v1/conversations", {})).json["id"]
    first, *_ = [(await respond(app, x, conversation=talk)).json for x in ("one", "two", "three")]
    path = f"/v1/conversations/{talk}/items"
    await app.call("DELETE", f"{path}/{first['output'][0]['id']}", b"", {})
    await respond(app, "again", previous_response_id=first["id"])
    assert messages(app) == [("user", "one"), ("user", "again")]
    (one, *_) = (await app.get(f"{path}?order=asc")).json["data"]
    await app.call("DELETE", f"{path}/{one['id']}", b"", {})
    reply = await respond(app, "again", previous_response_id=first["id"])
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_a_session_that_is_deleted_while_it_is_answered_leaves_nothing(
    app: App, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = app.engine.open

    @asynccontextmanager
    async def deleted_meanwhile(*args: Any) -> AsyncIterator[Any]:
        async with opened(*args) as upstream:
            gone = await app.call("DELETE", "/v1/sessions/mine", b"", {})
            assert gone.json["deleted"]
            yield upstream

    body = {"model": MODEL, "store": True}
    body |= {"input": "x"} if "resp" in path else {"messages": [{"role": "user", "content": "x"}]}
    monkeypatch.setattr(app.engine, "open", deleted_meanwhile)
    reply = await app.post(path, body, x_session_id="mine")
    assert reply.status == 200 and reply.headers["x-thermocline-stored"] == "no; reason=gone"
    assert (await app.get(f"{path}/{reply.json['id']}")).status == 404


async def test_conversations_are_changed_and_deleted(app: App) -> None:
    path = f"/v1/conversations/{(await app.post('/v1/conversations', {})).json['id']}"
    changed = await app.post(path, {"metadata": {"topic": "x"}})
    assert changed.json == (await app.get(path)).json
    assert changed.json["metadata"] == {"topic": "x"}
    items = [{"role": "user", "content": x} for x in "ab"]
    added = (await app.post(f"{path}/items", {"items": items})).json
    first, second = (x["id"] for x in added["data"])
    assert (await app.get(f"{path}/items/{first}")).json["content"][0]["text"] == "a"
    assert (await app.call("DELETE", f"{path}/items/{first}", b"", {})).json == changed.json
    assert (await app.get(f"{path}/items/{first}")).status == 404
    listed = (await app.get(f"{path}/items")).json["data"]
    assert [x["id"] for x in listed] == [second]
    assert (await app.call("DELETE", path, b"", {})).json["deleted"] is True
    assert (await app.get(path)).status == 404
    assert (await respond(app, conversation=path.rpartition("/")[2])).status == 404


async def test_forgetting_a_session_deletes_its_stored_objects(app: App) -> None:
    first = (await respond(app)).json
    id = (await app.post("/v1/conversations", {})).json["id"]
    for name in (session(app), id):
        assert (await app.call("DELETE", f"/v1/sessions/{name}", b"", {})).status == 200
    assert (await app.get(f"/v1/responses/{first['id']}")).status == 404
    assert (await app.get(f"/v1/conversations/{id}")).status == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/conversations", {"items": [{"role": "king"}]}, "items[0].role"),
        ("/v1/conversations", {"items": [{}] * 600}, "items"),
        ("/v1/conversations", {"metadata": {"a": 1}}, "metadata[...]"),
        ("/v1/conversations/x", {}, "metadata"),
        ("/v1/conversations/x/items", {"items": 5}, "items"),
    ],
)
async def test_bad_bodies(app: App, path: str, body: Any, param: str) -> None:
    reply = await app.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "query", ["limit=x", "limit=0000", "limit=101", "limit=-1", "limit=٣", "order=up"]
)
async def test_bad_pages(app: App, query: str) -> None:
    made = (await respond(app)).json
    conversation = (await app.post("/v1/conversations", {})).json
    for path in (
        f"/v1/responses/{made['id']}/input_items",
        f"/v1/conversations/{conversation['id']}/items",
        "/v1/chat/completions",
    ):
        reply = await app.get(f"{path}?{query}")
        assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])
        assert reply.error["type"] == "invalid_request_error"
        assert (await app.get(f"{path}?limit=1")).status == 200


async def test_a_list_of_no_rows_is_the_last_page(app: App) -> None:
    """A client that pages on from the last row while there is more would never end."""
    made = (await respond(app)).json
    items = {"items": [{"role": "user", "content": "a"}]}
    conversation = (await app.post("/v1/conversations", items)).json
    asked = {"messages": [{"role": "user", "content": "hi"}], "store": True}
    chat = (await app.post("/v1/chat/completions", {"model": MODEL, **asked})).json
    for path in (
        f"/v1/responses/{made['id']}/input_items",
        f"/v1/conversations/{conversation['id']}/items",
        "/v1/chat/completions",
        f"/v1/chat/completions/{chat['id']}/messages",
    ):
        assert len((await app.get(path)).json["data"]) == 1
        empty = {"object": "list", "data": [], "first_id": None, "last_id": None}
        for query in ("limit=0", "limit=0&order=desc"):
            assert (await app.get(f"{path}?{query}")).json == {**empty, "has_more": False}
    assert (await app.get("/v1/responses/resp_x/input_items?limit=0")).status == 404


async def test_a_stored_response_is_streamed_again(app: App) -> None:
    made = (await respond(app)).json
    path = f"/v1/responses/{made['id']}?stream=true"
    streamed = await app.get(path)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["x-accel-buffering"] == "no"
    events = [
        json.loads(x.partition("data: ")[2]) for x in streamed.body.decode().split("\n\n")[:-1]
    ]
    assert events[-1]["response"] == made
    rest = (await app.get(f"{path}&starting_after={len(events) - 2}")).body
    assert rest.count(b"\n\n") == 1
    assert (await app.get(path + "&starting_after=x")).error["param"] == "starting_after"
