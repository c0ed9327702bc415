"""Requests of Anthropic's dialect become chats, or are refused; what is left out is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http import CACHE_HEADER, PROMPT_HEADER
from engines.openai.errors import InvalidRequest
from engines.openai.requests import validate_chat
from gateway.anthropic.conversation import ATTRIBUTION
from gateway.anthropic.routes import num_unknown
from gateway.anthropic.translation import translated
from tests.unit.gateway.anthropic.test_errors import BODY
from tests.unit.gateway.in_process import App, RecordingEngine, chat_answer, streamed

HI = {"role": "user", "content": "hi"}
NONCE = f"{ATTRIBUTION} cc_version=2.1; cch=a1b2c;"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    raw = {"model": "m", "max_tokens": 9, "messages": list(messages), **fields}
    made = translated(raw).raw
    validate_chat(made)
    return made


def said(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(*messages, **fields)["messages"]
    return found


def test_a_plain_question() -> None:
    made = chat(HI, system="be brief", stop_sequences=["x"], temperature=0.5, top_k=3, stream=True)
    assert made["messages"] == [{"role": "system", "content": "be brief"}, HI]
    assert (made["stop"], made["temperature"], made["top_k"]) == (["x"], 0.5, 3)
    assert made["stream_options"] == {"include_usage": True}
    assert made["max_tokens"] == 9


def test_a_text_is_the_same_as_one_block_of_it() -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert said({"role": "user", "content": [block]}) == said(HI)
    assert said(HI, system=[{"type": "text", "text": "s"}]) == said(HI, system="s")


def test_a_tool_call_and_its_results_in_order() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"b": 1, "a": [2]}}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "gone", "is_error": True}
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    fine = {"type": "tool_result", "tool_use_id": "t2", "content": parts}
    empty = {"type": "tool_result", "tool_use_id": "t3"}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    found = said(
        HI,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "ok"}, call]},
        {"role": "user", "content": [failed, fine, empty, {"type": "text", "text": "go on"}]},
    )
    function = {"name": "ls", "arguments": '{"b":1,"a":[2]}'}
    assert found[1] == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }
    assert found[2:] == [
        {"role": "tool", "content": "Error: gone", "tool_call_id": "t1"},
        {"role": "tool", "content": "x\ny", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "go on"},
    ]


def test_system_messages_in_the_middle_stay_there() -> None:
    reminder = {"type": "mid_conv_system", "content": [{"type": "text", "text": "note"}]}
    found = said(
        HI,
        {"role": "system", "content": "9 tokens left"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, reminder]},
        system="top",
    )
    assert [x["role"] for x in found] == ["system", "user", "system", "assistant", "user", "system"]
    assert (found[2]["content"], found[5]["content"]) == ("9 tokens left", "note")


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": NONCE}, {"type": "text", "text": "You are"}],
        [{"type": "text", "text": f"{NONCE}\nYou are"}],
        f"{NONCE}\n\nYou are",
    ],
)
def test_the_attribution_line_is_taken_out_of_the_top(system: Any) -> None:
    assert said(HI, system=system)[0] == {"role": "system", "content": "You are"}
    raw = {"model": "m", "max_tokens": 1, "messages": [HI], "system": system}
    assert translated(raw).dropped == ["attribution"]


def test_attribution_lines_elsewhere_are_the_clients_own_words() -> None:
    found = said({"role": "user", "content": NONCE}, {"role": "system", "content": NONCE})
    assert [x["content"] for x in found] == [NONCE, NONCE]
    text = f"as they say: {NONCE}"
    assert said(HI, system=text)[0]["content"] == text


def test_parts_that_mean_nothing_to_a_model_are_left_out_and_counted() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}},
        {"type": "invented_yesterday"},
        {"type": "text", "text": "rest"},
    ]
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    raw = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    made = translated(
        {**raw, "tools": tools, "container": {"id": "c"}, "mcp_servers": [{"name": "x"}]}
    )
    left_out = "block_server_tool_use block_other tool container mcp_servers"
    assert made.dropped == left_out.split()
    assert made.raw["messages"] == [{"role": "user", "content": "rest"}]
    assert "tools" not in made.raw


def test_a_turn_of_which_nothing_is_left_stays_a_turn() -> None:
    found = said({"role": "user", "content": [{"type": "fallback"}]})
    assert found == [{"role": "user", "content": ""}]


def test_documents_of_text_are_read() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    content = [{"type": "text", "text": "C"}]
    result = {"type": "search_result", "title": "R", "source": "u", "content": content}
    found = said({"role": "user", "content": [document, result]})
    assert found == [{"role": "user", "content": "T\nD\nR\nu\nC"}]


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "user", "content": [IMAGE]}], {}, "messages[0].content[0].type"),
        (
            [HI, {"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}],
            {},
            "messages[1].content[0]",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result"}]}],
            {},
            "messages[0].content[0].tool_use_id",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text"),
        (
            [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "x"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "input": 3}]},
                HI,
            ],
            {},
            "messages[1].content[0].input",
        ),
        ([HI, {"role": "assistant", "content": "I am"}], {}, "messages"),
        ([HI], {"temperature": 1.5}, "temperature"),
        ([HI], {"tools": [{"name": "x"}]}, "tools[0]"),
        ([HI], {"tool_choice": {"type": "any"}}, "tools"),
        ([HI], {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ([{"role": "tool", "content": "x"}], {}, "messages[0].role"),
        ([], {}, "messages"),
        ([{"role": "user", "content": ["text"]}], {}, "messages[0].content[0]"),
    ],
)
def test_refusals_name_the_field(messages: Any, fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(*messages, **fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_tools_and_their_choice() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    tool |= {"cache_control": {"type": "ephemeral"}, "defer_loading": True, "input_examples": []}
    made = chat(HI, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert (made["tool_choice"], made["parallel_tool_calls"]) == ("required", False)
    named = chat(HI, tools=[tool], tool_choice={"type": "tool", "name": "f"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat(HI, tools=[tool], tool_choice={"type": "none"})["tool_choice"] == "none"
    assert "tool_choice" not in chat(HI, tools=[tool])


def test_thinking_and_output() -> None:
    assert chat(HI, thinking={"type": "disabled"})["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    made = chat(
        HI,
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"a": 1}}},
    )
    assert made["chat_template_kwargs"] == {"enable_thinking": True}
    assert made["reasoning_effort"] == "high"
    assert made["response_format"]["json_schema"]["schema"] == {"a": 1}
    form = {"type": "json_schema", "schema": {"a": 1}}
    assert chat(HI, output_format=form)["response_format"] == made["response_format"]
    with pytest.raises(InvalidRequest, match="send only one of them"):
        chat(HI, output_format=form, output_config={"format": form})
    assert "chat_template_kwargs" not in chat(HI)


# ---- counts in the metrics


def test_only_unknown_betas_are_counted() -> None:
    assert num_unknown("") == 0
    assert num_unknown("cache-diagnosis-2026-04-07, effort-2025-11-24") == 0
    assert num_unknown("made-up-2026-01-01,,context-management-2025-06-27 ") == 2


async def test_left_out_parts_show_in_the_metrics() -> None:
    app = App(RecordingEngine(chat_answer("x")))
    blocks = [{"type": "compaction", "content": "x"}, {"type": "text", "text": "hi"}]
    nonce = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    body = {**BODY, "system": [nonce], "messages": [{"role": "user", "content": blocks}]}
    assert (await app.post("/v1/messages", body, anthropic_beta="made-up-1")).status == 200
    text = (await app.get("/metrics")).body.decode()
    for kind in ("attribution", "block_compaction", "beta"):
        assert f'thermocline_left_out_total{{kind="{kind}"}} 1.0' in text


async def test_a_changed_prompt_shows_in_the_metrics() -> None:
    app = App(RecordingEngine(chat_answer("x")))
    for text in ("one", "two"):
        body = {**BODY, "system": text}
        await app.post("/v1/messages", body, x_session_id="s")
    metrics = (await app.get("/metrics")).body.decode()
    assert 'thermocline_prompt_divergences_total{changed="system"} 1.0' in metrics


async def test_a_stream_begins_with_the_counts_of_its_prompt() -> None:
    answer = streamed()
    answer.headers = {**answer.headers, CACHE_HEADER: "hot; tokens=30", PROMPT_HEADER: "70"}
    reply = await App(RecordingEngine(answer)).post("/v1/messages", {**BODY, "stream": True})
    start = json.loads(reply.body.partition(b"data: ")[2].partition(b"\n")[0])
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (40, 30)


# ---- any bodies

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(
    ["text", "tool_use", "tool_result", "thinking", "image", "document", "search_result"]
    + ["mid_conv_system", "redacted_thinking", "server_tool_use", "nothing", None, 3, []]
)
SOURCES = st.fixed_dictionaries({"type": st.sampled_from(["text", "content", "url"])}) | JSON


@st.composite
def blocks(draw: Any) -> dict[str, Any]:
    block = {"type": draw(KINDS)}
    names = ["text", "thinking", "id", "name", "tool_use_id", "title", "is_error", "cache_control"]
    for name in draw(st.lists(st.sampled_from(names), unique=True)):
        block[name] = draw(st.text(max_size=3) | JSON)
    for name in draw(st.lists(st.sampled_from(["content", "input", "source"]), unique=True)):
        inner = st.lists(st.fixed_dictionaries({"type": KINDS, "text": st.text(max_size=3)}))
        block[name] = draw(SOURCES | inner)
    return block


TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=5) | st.lists(blocks(), max_size=4),
    }
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "max_tokens": st.sampled_from([0, 1, 50]),
        "messages": st.lists(TURNS | JSON, min_size=1, max_size=4),
    },
    optional={
        "system": st.text(max_size=5) | st.lists(blocks(), max_size=3) | JSON,
        "tools": st.lists(st.dictionaries(st.sampled_from(["name", "input_schema"]), JSON)) | JSON,
        "tool_choice": JSON,
        "thinking": JSON,
        "output_config": JSON,
        "cache_control": JSON,
        "diagnostics": JSON,
    },
)


@given(BODIES)
def test_a_body_is_a_chat_or_refused(body: dict[str, Any]) -> None:
    try:
        made = translated(body, True).raw
        validate_chat(made)
    except InvalidRequest as refusal:
        assert refusal.status == 400 and refusal.message
