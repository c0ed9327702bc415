"""GET /v1/events: readers that take nothing, and who is an admin where."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from engines.base import SessionRef
from engines.http import ClientGone
from engines.wire import KVSize
from gateway.context import caller_of, sees_all
from gateway.edge.accounts import BODY_SHARE, BodyShare
from gateway.events import GOODBYE, LiveEvents, events, page_rows
from gateway.keys import ANONYMOUS, Tenant, generate_key
from tests.unit.gateway.in_process import MODEL, WELCOME, Answered, App, RecordingEngine

ROOT = generate_key("root")
CALLER = Tenant(ANONYMOUS, b"")


class Reader:
    """Takes so many messages, then nothing more."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.body = b""

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if self.takes == 0:
            await asyncio.Event().wait()
        self.takes -= 1
        self.body += message.get("body", b"")


@pytest.mark.parametrize("takes", [1, 2, 4, 5])
async def test_a_reader_that_takes_nothing_is_cut_and_its_place_is_free(takes: int):
    app = App(client_stall_s=0.05, max_event_streams=1)
    for i in range(2000):
        app.sessions.table.begin(SessionRef("local", f"s{i}", b""))
    for _ in range(2):  # the second finds the place of the first
        reader = Reader(takes)
        with pytest.raises(ClientGone):
            await LiveEvents(app.gateway, app.model, CALLER, None, "")(
                {}, reader.receive, reader.send
            )
        assert len(reader.body) < 500_000, "events that it did not take were not even made"
    await app.model.live.close()


async def test_a_question_for_the_head_ends_at_once_and_holds_no_place():
    app = App(max_event_streams=1)
    async with asyncio.timeout(5):
        for _ in range(3):
            reply = await app.call("HEAD", "/v1/events", b"", {})
            assert (reply.status, reply.body) == (200, b"")
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert "content-length" not in reply.headers
    with app.gateway.event_places.place(ANONYMOUS):
        assert (await app.call("HEAD", "/v1/events", b"", {})).status == 200
    keyed = App(api_keys=(ROOT[1],))
    assert (await keyed.call("HEAD", "/v1/events", b"", {})).status == 401


@pytest.mark.parametrize(
    ("asked", "rows"), [("", 0), ("-1", 0), ("1", 50), ("250", 250), ("20000", 1000)]
)
def test_a_page_is_neither_tiny_nor_the_whole(asked: str, rows: int) -> None:
    assert page_rows(asked) == rows


ALICE, BOB = generate_key("alice"), generate_key("bob")


def has_snapshot(reader: Reader) -> bool:
    return b"event: snapshot" in reader.body and reader.body.endswith(b"\n\n")


async def followed(app: App, caller: Tenant, tenant: str | None, keys: Any) -> bytes:
    """The bytes that a reader gets from its snapshot on, if keys change before a session does."""
    reader = Reader(-1)
    events = LiveEvents(app.gateway, app.model, caller, tenant, "")
    reading = asyncio.create_task(events({}, reader.receive, reader.send))
    async with asyncio.timeout(20):
        while not has_snapshot(reader):
            await asyncio.sleep(0.001)
        had = len(reader.body)
        app.gateway.tenants.replace(*keys)
        app.sessions.table.begin(SessionRef(tenant or "local", "s", b""))
        app.model.live.look()
        await reading
    await app.model.live.close()
    return reader.body[had:]


async def test_a_revoked_key_gets_nothing_more():
    app = App(api_keys=(ALICE[1], BOB[1]))
    caller = app.gateway.tenants.authenticate(f"Bearer {ALICE[0]}")
    assert await followed(app, caller, "alice", ([BOB[1]],)) == GOODBYE


async def test_who_saw_everything_without_a_key_leaves_when_admins_have_one(app: App):
    assert await followed(app, CALLER, None, ([], [ROOT[1]])) == GOODBYE


def request(app: App, port: int, **headers: str) -> Request:
    scope: dict[str, Any] = {
        "type": "http",
        "app": app.app,
        "endpoint": events,
        "server": ("127.0.0.1", port),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "state": {BODY_SHARE: BodyShare(app.gateway.bodies)},
    }
    return Request(scope)


def is_admin(app: App, port: int = 8080, **headers: str) -> bool:
    asked = request(app, port, **headers)
    return sees_all(asked, caller_of(asked))


BY_KEY = {"authorization": f"Bearer {ROOT[0]}"}


async def test_the_one_user_of_an_open_loopback_server_is_its_admin():
    assert is_admin(App())
    assert not is_admin(App(host="0.0.0.0"))
    assert not is_admin(App(admin_keys=(ROOT[1],)))
    assert is_admin(App(admin_keys=(ROOT[1],)), **BY_KEY)
    assert is_admin(App(host="0.0.0.0", admin_keys=(ROOT[1],)), **BY_KEY)


async def test_with_a_port_of_their_own_admins_have_no_rights_elsewhere():
    app = App(admin_keys=(ROOT[1],), admin_port=9000)
    assert is_admin(app, 9000, **BY_KEY)
    assert not is_admin(app, 8080, **BY_KEY)
    assert not is_admin(app, 9000)
    alone = App(admin_port=9000)
    assert is_admin(alone, 9000) and not is_admin(alone, 8080)


async def test_a_page_of_another_site_cannot_act(app: App):
    reply = await app.post("/admin/measure", {}, origin="http://evil.example")
    assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    reply = await app.get("/admin/keys", host="evil.example")
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


async def test_titles_are_shown_only_where_they_are_asked_for_and_go_with_their_session():
    plain = App()
    await plain.chat("a very secret plan", session_id="s")
    assert "title" not in (await plain.get("/v1/sessions/s")).json
    app = App(session_titles=True)
    await app.chat("a very secret plan", session_id="s")
    assert (await app.get("/v1/sessions/s")).json["title"] == "a very secret plan"
    assert (await app.call("DELETE", "/v1/sessions/s", b"", {})).status == 200
    assert app.model.live.histories.of(("local", "s")) is None
    await app.post("/v1/completions", {"model": MODEL, "prompt": "x", "session_id": "s"})
    assert "title" not in (await app.get("/v1/sessions/s")).json


async def test_a_title_is_in_no_log_and_no_metric(caplog: pytest.LogCaptureFixture):
    app = App(session_titles=True, api_keys=(ALICE[1], BOB[1]))
    with caplog.at_level(0):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hush-hush"}]}
        key = f"Bearer {ALICE[0]}"
        asked = {"x_session_id": "s", "authorization": key}
        assert (await app.post("/v1/chat/completions", body, **asked)).status == 200
        assert (await app.get("/v1/sessions/s", authorization=key)).json["title"] == "hush-hush"
        metrics = await app.get("/metrics", authorization=key)
    assert metrics.status == 200 and b"hush-hush" not in metrics.body
    assert "s" in {getattr(x, "session", "") for x in caplog.records}
    assert "hush-hush" not in caplog.text + str([vars(x) for x in caplog.records])
    his = await app.get("/v1/sessions/s", authorization=f"Bearer {BOB[0]}")
    assert his.status == 404


async def test_one_session_is_shown_by_its_tokens_until_the_engine_reports_its_bytes():
    usage = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 1}}'
    answer = Answered(200, {"content-type": "application/json"}, usage)
    sizes = {"live_kv": KVSize(100), "bf16_kv": KVSize(50)}
    app = App(RecordingEngine(answer, msgspec.structs.replace(WELCOME, **sizes)))
    await app.chat("hello", session_id="s")
    shown = (await app.get("/v1/sessions/s")).json
    assert (shown["tokens"], shown["bytes"], shown["bf16_bytes"], shown["turns"]) == (
        4,
        400,
        200,
        1,
    )
