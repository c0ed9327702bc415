"""Agents' headers name a session, and the session that started it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engines.openai.requests import InvalidRequest
from gateway.identity.names import (
    NamedSession,
    SessionChoice,
    by_headers,
    by_user_id,
    choose_session,
)
from gateway.identity.outline import Outline, hashed
from tests.unit.gateway.in_process import MODEL, App, HoldingEngine
from tests.waiting import eventually

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
def test_unfit_ids_are_refused(headers: dict[str, str]) -> None:
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
