"""The count of a prompt's tokens, in each dialect, and chats fitted to their template."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engines.wire import TemplateRules
from gateway.relay.question import fitted
from tests.unit.gateway.in_process import (
    MODEL,
    WELCOME,
    App,
    RecordingEngine,
    json_answer,
)

ANY = TemplateRules()
FIRST = TemplateRules(inline_system=False)
STRICT = TemplateRules(inline_system=False, repeated_users=False)
NOTE = "<system-reminder>\nn\n</system-reminder>"
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool"])


async def test_a_count_is_of_the_prompt_as_it_would_be_served() -> None:
    rules = TemplateRules(inline_system=False, reasoning_switch={"preserve_thinking": True})
    welcome = msgspec.structs.replace(WELCOME, template=rules)
    engine = RecordingEngine(json_answer({"count": 5}), welcome)
    app = App(engine, keep_reasoning=True)
    said = [{"role": r, "content": "x"} for r in ("user", "assistant", "system", "user")]
    for path, body in (
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": said}),
        ("/v1/responses/input_tokens", {"input": said}),
    ):
        assert (await app.post(path, body)).json["input_tokens"] == 5
    await app.chat()
    *counts, served = engine.asked
    for asked in counts:
        assert asked.body["chat_template_kwargs"] == served.body["chat_template_kwargs"]
        assert [x["role"] for x in asked.body["messages"]].count("system") == 0


def m(role: str, content: str = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_template_that_takes_all_gets_all_as_it_is() -> None:
    chat = [m("system"), m("user"), m("system"), m("developer"), m("assistant")]
    assert fitted(chat, ANY) == chat


def test_a_system_message_becomes_a_users_in_place() -> None:
    chat = [m("system"), m("user"), m("system", "n"), m("assistant"), m("user")]
    assert fitted(chat, FIRST) == [*chat[:2], m("user", NOTE), *chat[3:]]


def test_where_roles_alternate_it_joins_the_message_before() -> None:
    chat = [m("user", "q"), m("system", "n"), m("assistant"), m("tool", "r"), m("system", "n")]
    made = fitted(chat, STRICT)
    assert made == [
        m("user", f"q\n\n{NOTE}"),
        m("assistant"),
        m("tool", f"r\n\n{NOTE}"),
    ]


def test_after_an_answer_it_joins_the_next_message() -> None:
    chat = [m("user"), m("assistant"), m("system", "n"), m("user", "q")]
    assert fitted(chat, STRICT)[2:] == [m("user", f"{NOTE}\n\nq")]


def test_users_in_a_row_are_joined_where_the_template_refuses_them() -> None:
    chat = [m("system"), m("user", "a"), m("user", "b"), m("assistant"), m("user", "c")]
    assert fitted(chat, FIRST) == chat
    assert fitted(chat, STRICT) == [chat[0], m("user", "a\n\nb"), *chat[3:]]


@given(st.lists(ROLES, max_size=12), st.booleans())
def test_longer_chats_begin_as_shorter_ones_did(roles: list[str], repeated: bool) -> None:
    """Messages that were written for a prefix are never moved by later ones."""
    rules = TemplateRules(inline_system=False, repeated_users=repeated)
    chat = [m(role, str(i)) for i, role in enumerate(roles)]
    whole = "\0".join(x["content"] for x in fitted(chat, rules))
    for cut in range(len(chat)):
        shorter = "\0".join(x["content"] for x in fitted(chat[:cut], rules))
        assert whole.replace("\0", "\n\n").startswith(shorter.replace("\0", "\n\n"))
    assert all(x["role"] not in ("system", "developer") for x in fitted(chat, rules)[1:])
