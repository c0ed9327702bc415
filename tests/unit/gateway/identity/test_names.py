"""Requests name their session: in a header, a field or an agent's way; and what ids may be."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from engines.openai.requests import InvalidRequest
from gateway.identity.names import (
    MAX_RETAIN_S,
    NamedSession,
    SessionChoice,
    asked_seconds,
    by_headers,
    by_user_id,
    checked_id,
    choose_session,
    client_name,
    id_from_header,
    id_to_header,
    named_in_body,
)
from gateway.identity.outline import Outline, hashed
from tests.unit.gateway.in_process import (
    MODEL,
    App,
    HoldingEngine,
)
from tests.waiting import eventually


def test_first_name_wins():
    raw = {"session_id": "b", "prompt_cache_key": "c", "conversation": {"id": "d"}}
    assert named_in_body(raw) == "b"
    del raw["session_id"]
    assert named_in_body(raw) == "d"
    del raw["conversation"]
    assert named_in_body(raw) is None
    assert named_in_body({"session_id": None, "conversation": "k"}) == "k"
    with pytest.raises(InvalidRequest):
        named_in_body({"conversation": 5})


@pytest.mark.parametrize(
    "value",
    ["", "a\nb", "a\r\nset-cookie: x", "x\x00", "\u202egnp", "\ud800", 7, ["a"], {"a": 1}]
    + ["y" * 257, "ü" * 129, "🙂" * 65],
)
def test_unfit_ids_are_refused(value: object):
    with pytest.raises(InvalidRequest) as caught:
        named_in_body({"session_id": value})
    assert caught.value.status == 400
    assert caught.value.param == "session_id"


@pytest.mark.parametrize(
    "value",
    ["etc/..passwd", "a b", "ümlaut:@x", "x" * 256, "🙂" * 64, "50%25"]
    + ["...", "a/", "/a", "a//b", "%2e%2e"],
)
def test_odd_but_printable_ids_are_taken(value: str):
    assert checked_id(value, "session_id") == value


@pytest.mark.parametrize("value", [".", "..", "./a", "a/..", "a/../b", "../../etc/passwd"])
async def test_ids_that_clients_resolve_in_a_path_are_refused_wherever_they_are_named(app, value):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    text = {"model": MODEL, "prompt": "hi", "prompt_cache_key": value}
    for reply in (
        await app.post("/v1/chat/completions", chat, x_session_id=value),
        await app.post("/v1/chat/completions", chat, session_id=value),
        await app.post("/v1/chat/completions", {**chat, "session_id": value}),
        await app.post("/v1/chat/completions", {**chat, "conversation": {"id": value}}),
        await app.post("/v1/completions", text),
    ):
        assert reply.status == 400
        assert "any other printable" in reply.error["message"]
    assert app.engine.asked == []


@given(st.text(st.sampled_from("./%2ea"), min_size=1, max_size=12))
def test_the_path_of_an_id_is_the_same_after_a_client_has_resolved_it(value: str):
    try:
        checked_id(value, "session_id")
    except InvalidRequest:
        return
    assert URL(f"http://h/v1/sessions/{value.replace('%', '%25')}").path == f"/v1/sessions/{value}"
    assert URL(f"http://h/v1/sessions/{quote(value, safe='')}").path == f"/v1/sessions/{value}"


@given(st.text(min_size=1, max_size=256).filter(str.isprintable))
def test_ids_survive_headers(session_id: str):
    text = id_to_header(session_id)
    assert text.isascii() and text.isprintable()
    assert id_from_header(text) == session_id
    plain = "user-17/chat:3 (b)"
    assert id_to_header(plain) == plain


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("thermocline", "thermocline"),
        ("Cline/3.50.0", "cline"),
        ("codex_cli_rs/0.98.0", "codex"),
        ("OpenAI/Python 2.9.0", "openai-sdk"),
        ("Python/3.11 aiohttp/3.14.5", "python"),
        ("", "other"),
    ],
)
def test_a_client_is_known_by_its_user_agent(agent: str, name: str) -> None:
    assert client_name({"user-agent": agent}) == name


def directive(priority: object, **more: object) -> dict[str, object]:
    return {"start": 0, "end": 100, "priority": priority, **more}


@pytest.mark.parametrize(
    ("directives", "seconds"),
    [
        ([directive(90, duration=60.0)], 60.0),
        ([directive(70, duration=60), directive(50, duration=90.5)], 90.5),  # the longest one
        ([directive(90)], MAX_RETAIN_S),
        ([directive(90, duration=None)], MAX_RETAIN_S),
        ([directive(90, duration=1e9)], MAX_RETAIN_S),
        ([directive(90, duration=-5)], 0.0),
        ([directive(49, duration=60)], 0.0),  # may go sooner than others
        ("90", 0.0),
        ([None, "90", [90], directive("90"), directive(True), directive(90, duration="60")], 0.0),
    ],
)
def test_how_long_a_router_or_openais_field_asks_to_keep_a_session(directives, seconds):
    asked = {"retention_directives": directives, "prompt_cache_retention": "24h"}
    assert asked_seconds(asked) == seconds
    options = [({"ttl": "30s"}, 30.0), ({"ttl": "30m"}, 1800.0), ({"ttl": "9d"}, MAX_RETAIN_S)]
    for option, least in [*options, ("30m", 0.0)]:
        assert asked_seconds({**asked, "prompt_cache_options": option}) == max(seconds, least)


# ---- agents, and the sessions that they start


CLAUDE = {"x-claude-code-session-id": "s1"}
SALT = b"s" * 32
MINE, LESSER = SessionChoice("s"), SessionChoice("s/beside", True)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, None),
        ({"x-session-id": "a", **CLAUDE, "session-id": "c"}, NamedSession("a")),
        ({"x-session-id": "a", "x-parent-session-id": "p"}, NamedSession("a", "p", True)),
        ({"x-session-id": "a", "x-session-type": "Child"}, NamedSession("a", None, True)),
        ({**CLAUDE, "x-session-affinity": "o"}, NamedSession("s1")),
        ({**CLAUDE, "x-claude-code-agent-id": "7"}, NamedSession("s1/7", "s1", True)),
        (
            {**CLAUDE, "x-claude-code-agent-id": "7", "x-claude-code-parent-agent-id": "6"},
            NamedSession("s1/7", "s1/6", True),
        ),
        ({"x-session-affinity": "o", "session_id": "x"}, NamedSession("o")),
        ({"x-openwebui-chat-id": "c1", "x-openwebui-user-id": "u"}, NamedSession("c1")),
        (
            {"x-session-affinity": "o", "x-parent-session-id": "p"},
            NamedSession("o", "p", True),
        ),
        ({"x-session-affinity": "o", "x-parent-session-id": "o"}, NamedSession("o")),
        ({"session-id": "c", "session_id": "d"}, NamedSession("c")),
        ({"session_id": "d"}, NamedSession("d")),
        ({"x-claude-code-agent-id": "7"}, None),
    ],
)
def test_headers(headers: dict[str, str], named: NamedSession | None) -> None:
    assert by_headers(headers) == named


@pytest.mark.parametrize(
    "headers",
    [
        {"x-claude-code-session-id": "a%0Ab"},
        {"x-session-affinity": "x" * 257},
        {"session-id": "%ff"},
        {"x-session-id": "a", "x-parent-session-id": "%00"},
        {"x-claude-code-session-id": "x" * 200, "x-claude-code-agent-id": "y" * 100},
    ],
)
def test_unfit_ids_in_headers_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        by_headers(headers)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "user_id",
    [
        "user_9f_account__session_0a-b1",
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": "0a-b1"}),
    ],
)
def test_older_claude_code_names_its_session_in_the_user_id(user_id: str) -> None:
    metadata = {"user_id": user_id}
    main = by_user_id(metadata, [{"role": "system", "content": "s"}, user("fix it")])
    assert main.startswith("0a-b1/")
    assert by_user_id(metadata, [user("fix it"), user("more")]) == main
    assert by_user_id(metadata, [user("find files")]) != main


@pytest.mark.parametrize(
    "metadata", [None, {}, {"user_id": None}, {"user_id": "me"}, {"user_id": "{"}, "x"]
)
def test_other_user_ids_name_nothing(metadata: object) -> None:
    assert by_user_id(metadata, [user("x")]) is None
    assert by_user_id({"user_id": '{"session_id": 3}'}, [user("x")]) is None


async def session_of(app: App, body: dict[str, Any], **headers: str) -> str:
    """The session of a turn, as the engine and the client are given it."""
    asked = {"model": MODEL, "messages": [user("hi")], **body}
    reply = await app.post("/v1/chat/completions", asked, **headers)
    assert reply.status == 200, reply.body
    return reply.headers["x-thermocline-session"]


async def test_the_order_of_names(app: App) -> None:
    body = {"session_id": "b", "metadata": {"user_id": "u_session_abc"}}
    assert await session_of(app, body, x_session_id="h", x_session_affinity="o") == "h"
    assert await session_of(app, body, x_session_affinity="o") == "o"
    assert await session_of(app, body) == "b"
    assert (await session_of(app, {"metadata": body["metadata"]})).startswith("abc/")
    assert (await session_of(app, {"previous_response_id": "resp_1"})).startswith("chat-")


async def test_a_shared_key_is_no_session(app: App) -> None:
    asked = ([user("hi")], [user("other")], [user("hi"), user("so")])
    one, two, again = [
        await session_of(app, {"prompt_cache_key": "team", "messages": x}) for x in asked
    ]
    assert one == again != two


def chat(system: str | None, *texts: str) -> dict[str, Any]:
    first = [{"role": "system", "content": system}] if system else []
    return {"model": MODEL, "messages": first + [user(x) for x in texts]}


MAIN = chat("you code", "fix it " * 200)
LATER = chat("you code", "fix it " * 200, "thanks", "more")
SWITCHED = chat("you plan", "fix it " * 200, "thanks")
COMPACTED = chat("you code", "a summary")
TITLE = chat("you name things", "title: fix it")
TITLE_2 = chat("you name things", "title: something else")
PROBE = chat(None, "quota")
ANEW = chat(None, "another task " * 200)


class Rows:
    """The two rows of the session "s", which take requests one after the other."""

    def __init__(self) -> None:
        self.held: dict[str, Outline] = {}
        self.busy: set[str] = set()

    def take(self, body: dict[str, Any]) -> SessionChoice:
        now = hashed(body["model"], body["messages"], None, SALT).outline
        row = choose_session("s", now, self.held.get, lambda id: id not in self.busy)
        self.held[row.id] = now
        return row


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ([MAIN, LATER], [MINE, MINE]),
        ([MAIN, TITLE, LATER, TITLE_2, LATER], [MINE, LESSER, MINE, LESSER, MINE]),
        ([TITLE, MAIN, LATER, TITLE], [MINE, MINE, MINE, LESSER]),
        ([MAIN, TITLE, PROBE, LATER], [MINE, LESSER, LESSER, MINE]),
        ([MAIN, SWITCHED, LATER], [MINE, MINE, MINE]),
        ([LATER, COMPACTED, TITLE], [MINE, MINE, MINE]),  # nothing of it is large any more
        ([MAIN, ANEW, MAIN], [MINE, MINE, MINE]),
    ],
)
def test_rows(asked: list[dict[str, Any]], rows: list[SessionChoice]) -> None:
    session = Rows()
    assert [session.take(body) for body in asked] == rows


def test_a_conversation_that_comes_while_its_title_is_made_keeps_a_row_of_its_own() -> None:
    session = Rows()
    session.take(TITLE)
    session.busy.add("s")
    assert session.take(MAIN) == SessionChoice("s/beside")
    session.busy.clear()
    assert session.take(LATER) == SessionChoice("s/beside")
    assert session.take(TITLE_2) == SessionChoice("s", True)
    assert session.take(PROBE) == SessionChoice("s", True)


async def test_a_title_is_asked_beside_and_goes_with_its_session(app: App) -> None:
    rows = [await session_of(app, x, x_session_affinity="o") for x in (MAIN, TITLE, LATER)]
    assert rows == ["o", "o/beside", "o"]
    shown = {x["id"]: x for x in (await app.get("/v1/sessions")).json["data"]}
    assert (shown["o/beside"]["kind"], shown["o/beside"]["parent"]) == ("child", "o")
    assert shown["o"]["kind"] == "main"
    assert (await app.call("DELETE", "/v1/sessions/o", b"", {})).status == 200
    assert (await app.get("/v1/sessions")).json["data"] == []


@pytest.mark.parametrize(
    ("headers", "settings", "row"),
    [
        ({"x_session_id": "mine"}, {}, "mine"),  # a user chose it
        ({}, {"sessions": 1}, "o"),  # the key has room for no other session
    ],
)
async def test_where_there_is_no_row_beside_a_title_is_asked_in_the_session(headers, settings, row):
    app = App(**settings)
    for body in (MAIN, TITLE):
        assert await session_of(app, body, x_session_affinity="o", **headers) == row


async def test_both_at_once() -> None:
    app = App(engine := HoldingEngine())
    turns = []
    for body in (TITLE, MAIN):
        turns.append(asyncio.create_task(session_of(app, body, x_session_affinity="o")))
        await eventually(lambda: len(engine.asked) == len(turns))
    engine.going_on.set()
    assert [await x for x in turns] == ["o", "o/beside"]
