"""GET /v1/snapshot, and who is an admin where."""

from __future__ import annotations

import gzip

import msgspec
import pytest

from engines.base import SessionRef
from engines.wire import KVSize
from gateway.keys import generate_key
from tests.unit.gateway.in_process import MODEL, WELCOME, Answered, App, RecordingEngine

ROOT = generate_key("root")


ALICE, BOB = generate_key("alice"), generate_key("bob")


async def test_an_answer_is_empty_while_nothing_has_changed(app: App):
    first = await app.get("/v1/snapshot")
    tag = first.headers["etag"]
    assert first.status == 200 and first.json["sessions"] == []
    again = await app.get("/v1/snapshot", if_none_match=tag)
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    other = await app.get("/v1/snapshot", if_none_match='"another"')
    assert (other.status, other.body) == (200, first.body)


async def test_a_large_snapshot_is_packed_for_those_who_can_unpack_it(app: App):
    for i in range(200):
        app.sessions.table.begin(SessionRef("local", f"s{i}", b""))
    plain = await app.get("/v1/snapshot")
    packed = await app.get("/v1/snapshot", accept_encoding="gzip, br")
    assert packed.headers["content-encoding"] == "gzip" and len(packed.body) < len(plain.body) / 4
    assert gzip.decompress(packed.body) == plain.body
    few = await app.get("/v1/snapshot?limit=7")
    assert len(few.json["sessions"]) == 7
    again = await app.get("/v1/snapshot?limit=500", if_none_match=few.headers["etag"])
    assert again.status == 200 and len(again.json["sessions"]) == 200
    for limit in ("0", "-1", "2001", "x"):
        assert (await app.get(f"/v1/snapshot?limit={limit}")).status == 400


async def test_a_key_is_needed_where_there_are_keys():
    app = App(api_keys=(ALICE[1], BOB[1]))
    assert (await app.get("/v1/snapshot")).status == 401
    shown = (await app.get("/v1/snapshot", authorization=f"Bearer {ALICE[0]}")).json["server"]
    assert (shown["tenant"], shown["admin"]) == ("alice", False)
    app.gateway.tenants.replace([BOB[1]])
    assert (await app.get("/v1/snapshot", authorization=f"Bearer {ALICE[0]}")).status == 401


async def test_who_saw_everything_without_a_key_does_not_once_admins_have_one(app: App):
    assert (await app.get("/v1/snapshot")).json["server"]["admin"]
    app.gateway.tenants.replace([], [ROOT[1]])
    assert not (await app.get("/v1/snapshot")).json["server"]["admin"]


KEY = (ROOT[1],)
AT_9000 = {"admin_address": "127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("settings", "port", "has_key", "is_admin"),
    [
        ({}, 8080, False, True),  # the one user of an open server
        ({"host": "0.0.0.0"}, 8080, False, False),
        ({"admin_keys": KEY}, 8080, False, False),
        ({"admin_keys": KEY}, 8080, True, True),
        ({"host": "0.0.0.0", "admin_keys": KEY}, 8080, True, True),
        ({"admin_keys": KEY, **AT_9000}, 9000, True, True),
        ({"admin_keys": KEY, **AT_9000}, 8080, True, False),  # admins have a port of their own
        ({"admin_keys": KEY, **AT_9000}, 9000, False, False),
        (AT_9000, 9000, False, True),
        (AT_9000, 8080, False, False),
    ],
)
async def test_who_is_an_admin_where(settings, port, has_key, is_admin):
    app = App(**settings)
    app.address = ("127.0.0.1", port)
    key = f"Bearer {ROOT[0]}" if has_key else ""
    said = await app.get("/v1/snapshot", authorization=key)
    assert said.json.get("server", {}).get("admin", False) == is_admin


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
