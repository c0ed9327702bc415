"""Agents' headers name a session, and the session that started it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.openai.requests import InvalidRequest
from gateway.identity.agents import NamedSession, by_headers, by_user_id
from tests.unit.gateway.in_process import MODEL, App

CLAUDE = {"x-claude-code-session-id": "s1"}


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
            {
                **CLAUDE,
                "x-claude-code-agent-id": "7",
                "x-claude-code-parent-agent-id": "6",
            },
            NamedSession("s1/7", "s1/6", True),
        ),
        ({"x-session-affinity": "o", "session_id": "x"}, NamedSession("o")),
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
    assert main is not None and main.startswith("0a-b1/")
    assert by_user_id(metadata, [user("fix it"), user("more")]) == main
    assert by_user_id(metadata, [user("find files")]) != main


@pytest.mark.parametrize(
    "metadata", [None, {}, {"user_id": None}, {"user_id": "me"}, {"user_id": "{"}, "x"]
)
def test_other_user_ids_name_nothing(metadata: object) -> None:
    assert by_user_id(metadata, [user("x")]) is None
    assert by_user_id({"user_id": '{"session_id": 3}'}, [user("x")]) is None


async def asked_as(app: App, headers: dict[str, str], **fields: Any) -> str:
    body = {"model": MODEL, "messages": [user("hi")], **fields}
    assert (await app.post("/v1/chat/completions", body, **headers)).status == 200
    return app.engine.asked[-1].headers["x-session"]


async def test_the_order_of_names() -> None:
    app = App()
    body = {"session_id": "b", "metadata": {"user_id": "u_session_abc"}}
    assert await asked_as(app, {"x_session_id": "h", "x_session_affinity": "o"}, **body) == "h"
    assert await asked_as(app, {"x_session_affinity": "o"}, **body) == "o"
    assert await asked_as(app, {}, **body) == "b"
    assert (await asked_as(app, {}, metadata=body["metadata"])).startswith("abc/")
    assert (await asked_as(app, {}, previous_response_id="resp_1")).startswith("chat-")


async def test_a_shared_key_is_no_session() -> None:
    app = App()
    one = await asked_as(app, {}, prompt_cache_key="team")
    two = await asked_as(app, {}, prompt_cache_key="team", messages=[user("other")])
    again = await asked_as(app, {}, prompt_cache_key="team", messages=[user("hi"), user("so")])
    assert one == again != two
