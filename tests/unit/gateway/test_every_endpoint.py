"""Rules that hold on every path, in the shape of its dialect.

The paths are those of ``/openapi.json``, so a new one is in these tests by itself.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.keys import generate_key
from tests.stored_objects import stored_in
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply, chat_answer

JSON = {"content-type": "application/json"}
NO_JSON = [b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"a":' * 3000, b'{"a": NaN}']
NO_JSON += [b'{"a": 1e999}', b'{"a": "\xff"}']
USERS = {name: generate_key(name) for name in ("alice", "bob")}
# The ids in paths, and the other names that bodies may have for them.
IDS = ("response_id", "conversation_id", "item_id", "completion_id", "session_id")


def auth(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {USERS[name][0]}"}


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    stored = stored_in(tmp_path / "stored.sqlite")
    yield App(
        RecordingEngine(chat_answer()),
        stored=stored,
        api_keys=tuple(line for _, line in USERS.values()),
    )
    await stored.close()


async def paths(app: App) -> list[tuple[str, str]]:
    """Every method and path."""
    api = (await app.get("/openapi.json")).json["paths"]
    return [(method.upper(), path) for path, methods in api.items() for method in methods]


def has_its_shape(path: str, reply: Reply) -> None:
    """Check that an error is in the shape of the path's dialect, and gives nothing away."""
    said = reply.json
    if path.startswith("/v1/messages"):
        assert set(said) == {"type", "error", "request_id"} and said["type"] == "error"
        assert set(said["error"]) == {"type", "message"}
    else:
        assert set(reply.error) == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.body.decode() and len(reply.body) < 2000


async def test_bodies_that_are_no_json_object_are_refused(app: App):
    posts = [path for method, path in await paths(app) if method == "POST"]
    assert len(posts) >= 18
    for path in posts:
        at = path
        for name in (*IDS, "key_id"):
            at = at.replace("{" + name + "}", "x")
        for body in NO_JSON:
            reply = await app.post(at, body, **auth("alice"))
            assert 400 <= reply.status < 500, (path, body[:20])
            has_its_shape(path, reply)
    assert app.engine.asked == []


async def test_a_body_beyond_the_bound_is_refused(app: App):
    large = b" " * (app.gateway.config.max_body_bytes + 1)
    for method, path in await paths(app):
        if method == "POST" and "{" not in path and not path.startswith("/admin"):
            reply = await app.post(path, large, **auth("alice"))
            assert reply.status == 413, path
            has_its_shape(path, reply)


async def test_without_a_key_nothing_private_is_sent(app: App):
    of_all = {"/", "/docs", "/ui", "/ui/{version}/{name}", "/livez", "/readyz", "/health", "/ping"}
    of_all |= {"/version", "/openapi.json", "/metrics", "/ui/clients"}
    for method, path in await paths(app):
        if path not in of_all:
            reply = await app.call(method, path.replace("{", "").replace("}", ""), b"", {})
            assert reply.status == 401, (method, path)
            has_its_shape(path, reply)


async def made_by_alice(app: App) -> dict[str, str]:
    """Store one of each kind; returns their ids."""
    mine = auth("alice")
    response = (await app.post("/v1/responses", {"input": "hi"}, **mine)).json["id"]
    item = {"role": "user", "content": "x"}
    conversation = (await app.post("/v1/conversations", {"items": [item]}, **mine)).json["id"]
    listed = await app.get(f"/v1/conversations/{conversation}/items", **mine)
    chat = {"model": MODEL, "messages": [item], "store": True, "session_id": "of-alice"}
    completion = (await app.post("/v1/chat/completions", chat, **mine)).json["id"]
    found = {
        "response_id": response,
        "conversation_id": conversation,
        "item_id": listed.json["data"][0]["id"],
        "completion_id": completion,
        "session_id": "of-alice",
    }
    assert set(found) == set(IDS)
    return found


async def test_another_tenants_objects_are_ones_that_never_were(app: App):
    ids = await made_by_alice(app)
    never = {name: f"never-{name}" for name in ids}
    body = json.dumps({"metadata": {}, "items": []}).encode()
    seen = set[str]()
    for method, path in await paths(app):
        if not any("{" + name + "}" in path for name in ids):
            continue
        answers = []
        for known in (never, ids):
            at = path
            for name, id in known.items():
                at = at.replace("{" + name + "}", id)
            given = b"" if method != "POST" or "sessions" in path else body
            reply = await app.call(method, at, given, {**auth("bob"), **(JSON if given else {})})
            has_its_shape(path, reply)
            said = reply.body.decode()
            for name, id in known.items():
                said = said.replace(id, name)
            answers.append((reply.status, said))
        assert answers[0] == answers[1], (method, path)
        assert answers[0][0] == 404, (method, path)
        seen.add(f"{method} {path}")
    assert len(seen) >= 18
    for name, path in (
        ("response_id", "/v1/responses/{}"),
        ("conversation_id", "/v1/conversations/{}"),
        ("completion_id", "/v1/chat/completions/{}"),
        ("session_id", "/v1/sessions/{}"),
    ):
        assert (await app.get(path.format(ids[name]), **auth("alice"))).status == 200


@pytest.mark.parametrize("path", [f"/v1/responses{x}" for x in ("", "/input_tokens")])
async def test_nor_can_they_be_gone_on_from(app: App, path: str):
    ids = await made_by_alice(app)
    num_asked = len(app.engine.asked)
    for field, id in [
        ("previous_response_id", ids["response_id"]),
        ("conversation", ids["conversation_id"]),
        ("input", [{"type": "item_reference", "id": ids["item_id"]}]),
    ]:
        never = json.loads(json.dumps(id).replace(ids["item_id"], "never"))
        if isinstance(id, str):
            never = "never"
        answers = []
        for value in (id, never):
            reply = await app.post(path, {"input": "x", field: value}, **auth("bob"))
            shown = value if isinstance(value, str) else value[0]["id"]
            answers.append((reply.status, reply.body.decode().replace(shown, "ID")))
        assert answers[0] == answers[1] and answers[0][0] in (400, 404)
    assert len(app.engine.asked) == num_asked
