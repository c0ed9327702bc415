"""Compaction: which items stay, which are summed up, and that the summary is the tenant's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.responses import ResponseCompactionItem
from openai.types.responses.compacted_response import CompactedResponse

from engines.wire import TemplateRules
from gateway.keys import generate_key
from gateway.openai.responses.compaction import MAX_SUMMARY_TOKENS
from tests.stored_objects import stored_in
from tests.unit.gateway.in_process import (
    MODEL,
    WELCOME,
    Answered,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
    json_answer,
)

COMPACT, RESPONSES = "/v1/responses/compact", "/v1/responses"
USERS = {name: generate_key(name) for name in ("alice", "bob")}
ROOMY = msgspec.structs.replace(WELCOME, max_context=16384)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
TALK: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": "be kind"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "look"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
    {"role": "assistant", "content": "There is a tree."},
    {"role": "user", "content": "which?"},
]


def said(text: str | None, ending: str = "stop", **message: Any) -> Answered:
    usage = {"prompt_tokens_details": {"cached_tokens": 20}}
    usage |= {"prompt_tokens": 30, "completion_tokens": 5}
    return chat_answer(text, ending, usage, **message)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    stored = stored_in(tmp_path / "stored.sqlite")
    keys = tuple(line for _, line in USERS.values())
    engine = RecordingEngine(said("They looked: a tree."), welcome=ROOMY)
    yield App(engine, stored=stored, api_keys=keys)
    await stored.close()


async def ask(app: App, path: str, who: str = "alice", **body: Any) -> Reply:
    auth = {"authorization": f"Bearer {USERS[who][0]}"}
    return await app.post(path, {"model": MODEL, **body}, **auth)


def prompt(app: App) -> list[tuple[str, str]]:
    return [(x["role"], x["content"]) for x in app.engine.asked[-1].body["messages"]]


async def test_messages_stay_and_all_else_becomes_one_item(app: App) -> None:
    reply = await ask(app, COMPACT, input=TALK)
    # Their type of an output item knows no messages of users, though they say that these come.
    answer = CompactedResponse.model_validate({**reply.json, "output": reply.json["output"][-1:]})
    *kept, last = reply.json["output"]
    assert [(x["type"], x["role"], x["content"][0]["text"]) for x in kept] == [
        ("message", "developer", "be kind"),
        ("message", "user", "look"),
        ("message", "user", "which?"),
    ]
    assert len({x["id"] for x in reply.json["output"]}) == 4
    assert isinstance(answer.output[-1], ResponseCompactionItem)
    assert "tree" not in last["encrypted_content"]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (30, 5)
    assert answer.usage.input_tokens_details.cached_tokens == 20
    assert answer.usage.total_tokens == 35


async def test_the_summary_is_asked_for_after_the_conversation_as_it_stands(app: App) -> None:
    await ask(app, RESPONSES, input=TALK, tools=[TOOL], instructions="rules")
    before = app.engine.asked[-1].body
    await ask(app, COMPACT, input=TALK, tools=[TOOL], instructions="rules", stream=True)
    asked = app.engine.asked[-1].body
    assert asked["messages"][:-1] == before["messages"] and asked["tools"] == before["tools"]
    assert asked["messages"][-1]["role"] == "user" and "summary" in asked["messages"][-1]["content"]
    assert (asked["tool_choice"], asked["temperature"]) == ("none", 0)
    assert "stream" not in asked and "response_format" not in asked
    assert asked["max_completion_tokens"] == ROOMY.max_context // 16


async def test_the_summary_is_bounded(app: App) -> None:
    app.engine.welcome = msgspec.structs.replace(ROOMY, max_context=1 << 20)
    await ask(app, COMPACT, input=TALK)
    assert app.engine.asked[-1].body["max_completion_tokens"] == MAX_SUMMARY_TOKENS
    await ask(app, COMPACT, input=TALK, max_output_tokens=9)
    assert app.engine.asked[-1].body["max_completion_tokens"] == 9


async def test_a_window_that_is_sent_back_is_shown_to_the_model(app: App) -> None:
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    reply = await ask(app, RESPONSES, input=[*window, {"role": "user", "content": "go on"}])
    assert reply.status == 200
    system, look, which, summary, last = prompt(app)
    assert (system, look, which) == (("system", "be kind"), ("user", "look"), ("user", "which?"))
    assert summary[0] == "user" and summary[1].endswith("\nThey looked: a tree.")
    assert last == ("user", "go on")
    assert not reply.json.get("error")


async def test_other_names_of_the_item_are_known(app: App) -> None:
    item = (await ask(app, COMPACT, input=TALK)).json["output"][-1]
    for kind in ("compaction_summary", "context_compaction"):
        sealed = {"type": kind, "encrypted_content": item["encrypted_content"]}
        await ask(app, RESPONSES, input=[sealed])
        assert prompt(app)[0][1].endswith("a tree.")


async def test_templates_that_want_roles_to_alternate_get_that(app: App) -> None:
    strict = TemplateRules(inline_system=False, repeated_users=False)
    app.engine.welcome = msgspec.structs.replace(ROOMY, template=strict)
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    await ask(app, RESPONSES, input=[*window, {"role": "user", "content": "go on"}])
    roles = [role for role, _ in prompt(app)]
    assert roles == ["system", "user"]
    assert "a tree." in prompt(app)[1][1]


async def test_it_goes_on_from_a_stored_response(app: App) -> None:
    first = (await ask(app, RESPONSES, input="one")).json
    reply = await ask(app, COMPACT, previous_response_id=first["id"])
    assert prompt(app)[:-1] == [("user", "one"), ("assistant", "They looked: a tree.")]
    assert [x["type"] for x in reply.json["output"]] == ["message", "compaction"]
    began = app.engine.asked[0].headers["x-session"]
    assert app.engine.asked[-1].headers["x-session"] == began
    # A compacted item can be stored, and be gone on from, as any other can.
    second = (await ask(app, RESPONSES, input=reply.json["output"])).json
    await ask(app, RESPONSES, input="two", previous_response_id=second["id"])
    assert prompt(app)[1][1].endswith("a tree.") and prompt(app)[-1] == ("user", "two")


async def test_a_second_compaction_sums_up_the_first(app: App) -> None:
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    app.engine.answer = said("all of it")
    again = (await ask(app, COMPACT, input=window)).json["output"]
    assert "a tree." in prompt(app)[3][1]
    assert [x["type"] for x in again] == ["message"] * 3 + ["compaction"]
    await ask(app, RESPONSES, input=again)
    assert prompt(app)[-1][1].endswith("\nall of it") and "tree" not in str(prompt(app))


async def test_another_tenant_learns_nothing(app: App) -> None:
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    num_asked = len(app.engine.asked)
    for path in (RESPONSES, COMPACT, "/v1/responses/input_tokens"):
        foreign = await ask(app, path, "bob", input=window[-1:])
        made_up = await ask(app, path, "bob", input=[{**window[-1], "encrypted_content": "AQ=="}])
        assert foreign.status == 400 and foreign.error == made_up.error
        assert foreign.error["code"] == "invalid_encrypted_content"
        assert foreign.error["param"] == "input[0].encrypted_content"
        assert "compact it again" in foreign.error["message"]
    assert len(app.engine.asked) == num_asked
    items = {"items": window[-1:]}
    assert (await ask(app, "/v1/conversations", "bob", **items)).status == 400
    assert (await ask(app, "/v1/conversations", **items)).status == 200


@pytest.mark.parametrize("sealed", [None, 5, "", "x", "AQ==", "ä", "A" * 100_000, ["a"], {}])
async def test_content_that_is_no_seal_is_refused(app: App, sealed: Any) -> None:
    item = {"type": "compaction", "encrypted_content": sealed}
    reply = await ask(app, RESPONSES, input=[{"role": "user", "content": "x"}, item])
    assert (reply.status, reply.error["param"]) == (400, "input[1].encrypted_content")
    assert app.engine.asked == []


async def test_a_trigger_in_the_input_is_refused_by_name(app: App) -> None:
    reply = await ask(app, RESPONSES, input=[*TALK, {"type": "compaction_trigger"}])
    assert reply.status == 400 and "/v1/responses/compact" in reply.error["message"]


async def test_a_model_that_says_nothing_loses_nothing(app: App) -> None:
    app.engine.answer = said("  ")
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    await ask(app, RESPONSES, input=window)
    assert prompt(app)[-1][1].endswith("\nlook({})\na tree\nThere is a tree.")
    again = (await ask(app, COMPACT, input=window)).json["output"]
    await ask(app, RESPONSES, input=again)
    assert prompt(app)[-1][1].endswith("\nlook({})\na tree\nThere is a tree.")
    app.engine.answer = said(None, reasoning_content="there was a tree")
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    await ask(app, RESPONSES, input=window)
    assert prompt(app)[-1][1].endswith("\nthere was a tree")


async def test_a_thought_that_was_cut_is_no_summary(app: App) -> None:
    for content in (None, "", " \n"):
        app.engine.answer = said(content, "length", reasoning_content="The user asks, so I sh")
        window = (await ask(app, COMPACT, input=TALK)).json["output"]
        await ask(app, RESPONSES, input=window)
        assert prompt(app)[-1][1].endswith("\nlook({})\na tree\nThere is a tree.")


async def test_a_summary_that_was_cut_says_so(app: App) -> None:
    app.engine.answer = said("They looked: a tr", "length", reasoning_content="hm")
    window = (await ask(app, COMPACT, input=TALK)).json["output"]
    await ask(app, RESPONSES, input=window)
    summary = prompt(app)[-1][1]
    assert "\nThey looked: a tr [...]\n" in summary and "cut here" in summary
    assert "hm" not in summary


async def test_a_client_does_not_say_where_the_summary_ends(app: App) -> None:
    ends = {"stop": ["\n"], "min_tokens": 5000, "ignore_eos": True}
    assert (await ask(app, COMPACT, input=TALK, top_p=0.5, **ends)).status == 200
    asked = app.engine.asked[-1].body
    assert not ends.keys() & asked.keys() and asked["top_p"] == 0.5


async def test_nothing_is_compacted_to_nothing(app: App) -> None:
    reply = await ask(app, COMPACT)
    assert [x["type"] for x in reply.json["output"]] == ["compaction"]
    assert app.engine.asked[-1].body["max_completion_tokens"] == 1
    await ask(app, RESPONSES, input=[*reply.json["output"], {"role": "user", "content": "hi"}])
    assert prompt(app) == [("user", "hi")]
    # Where all is kept, there is nothing to sum up either.
    window = (await ask(app, COMPACT, input="hi")).json["output"]
    await ask(app, RESPONSES, input=window)
    assert prompt(app) == [("user", "hi")]


async def test_requests_that_cannot_be_compacted(app: App) -> None:
    gone = await ask(app, COMPACT, previous_response_id="resp_none")
    assert (gone.status, gone.error["code"]) == (400, "previous_response_not_found")
    named = await ask(app, COMPACT, input=[{"role": "king", "content": "x"}])
    assert (named.status, named.error["param"]) == (400, "input[0].role")
    too_long = {"message": "too long", "code": "context_length_exceeded", "param": "messages"}
    app.engine.answer = json_answer({"error": too_long}, 400)
    refused = await ask(app, COMPACT, input=TALK)
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert refused.error["code"] == "context_length_exceeded"
