r"""Lone surrogates, as programs write them that cut text by UTF-16 (``\ud83d``)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.openai.errors import InvalidRequest
from gateway.edge.bodies import REPLACED_HEADER, parse_whole
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply, chat_answer
from tests.unit.gateway.test_images import PATHS, after_a_tool, heard, text_of, text_part

HALF, OTHER_HALF = "\ud83d", "\ude00"
CUT = f"a{HALF} {OTHER_HALF}b\U0001f600{HALF}{HALF}"
MENDED = "a\ufffd \ufffdb\U0001f600\ufffd\ufffd"


@pytest.mark.parametrize("path", PATHS)
async def test_halves_in_a_result_are_replaced_and_counted_in_a_header(path: str) -> None:
    to = App()
    for result in (CUT, [text_part(path, CUT)]):
        reply = await to.post(path, after_a_tool(path, result))
        assert text_of(heard(to)[-1]) == MENDED
        assert reply.headers[REPLACED_HEADER] == "4"
    again = await to.post(path, after_a_tool(path, MENDED))
    assert text_of(heard(to)[-1]) == MENDED and REPLACED_HEADER not in again.headers


@pytest.mark.parametrize("path", PATHS)
async def test_halves_of_users_are_refused_by_name(path: str) -> None:
    to = App()
    name = "input" if path.startswith("/v1/responses") else "messages"
    body = {"model": MODEL, "max_tokens": 5, name: [{"role": "user", "content": CUT}]}
    reply = await to.post(path, body)
    assert reply.status == 400 and to.engine.asked == []
    assert reply.json["error"]["message"].startswith(f"{name}[0]: it has half a character")


def use(kind: str = "tool_use", **fields: Any) -> tuple[str, dict[str, Any]]:
    """A block of Anthropic's; no prompt has those of its own tools, but clients send them again."""
    return "/v1/messages", {"type": kind, "id": "s1", "tool_use_id": "s1", "name": "f", **fields}


def call(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """A call in a chat."""
    field = "arguments" if kind == "function" else "input"
    said = {"id": "s1", "type": kind, kind: {"name": "f", field: text}}
    return "/v1/chat/completions", said


def item(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """An item of Responses."""
    return "/v1/responses", {"type": kind, "id": "s1", "call_id": "s1", "name": "f", **fields}


IN_JSON = json.dumps({"at": CUT})  # as a model writes them: vLLM reads it, and takes no half
SAID: list[tuple[tuple[str, dict[str, Any]], Any]] = [
    (use(input={"at": CUT}), {"at": MENDED}),
    (use("server_tool_use", input={"query": CUT}), None),
    (use("web_search_tool_result", content=[{"type": "web_search_result", "title": CUT}]), None),
    (use("mcp_tool_use", server_name="s", input={"at": CUT}), None),
    (use("mcp_tool_result", content=[{"type": "text", "text": CUT}]), None),
    (use("bash_code_execution_tool_result", content={"type": "x", "stdout": CUT}), None),
    (item("mcp_call", server_label="s", arguments="{}", output=CUT), None),
    (item("local_shell_call", status="completed", action={"command": [CUT]}), None),
    (item("mcp_list_tools", server_label="s", tools=[{"name": "f", "description": CUT}]), None),
    (item("function_call", arguments=CUT), MENDED),
    (item("function_call", arguments=IN_JSON), {"at": MENDED}),
    (item("custom_tool_call", input=CUT), {"input": MENDED}),
    (call("function", CUT), MENDED),
    (call("function", IN_JSON), {"at": MENDED}),
    (call("custom", CUT), {"input": MENDED}),
]


async def arguments_after(path: str, said: dict[str, Any]) -> tuple[Reply, Any]:
    """The answer, and the arguments of the first call, where an assistant ``said`` this before."""
    body, to = after_a_tool(path, "done"), App(RecordingEngine(chat_answer()))
    if path == "/v1/responses":
        body["input"].insert(1, said)
    else:
        place = "content" if path == "/v1/messages" else "tool_calls"
        body["messages"][1][place].insert(0, said)
    reply = await to.post(path, body)
    text = heard(to)[1]["tool_calls"][0]["function"]["arguments"]
    return reply, json.loads(text) if text[:1] in '{"' else text


@pytest.mark.parametrize(("said", "arguments"), SAID)
async def test_halves_in_what_an_assistant_said_are_replaced(said: Any, arguments: Any) -> None:
    reply, found = await arguments_after(*said)
    assert (reply.status, reply.headers[REPLACED_HEADER]) == (200, "4")
    assert found == arguments or arguments is None


@pytest.mark.parametrize("said", [call("function", r'"\\ud83d"'),
                                  item("function_call", arguments=r'"\\ud83d"')])  # fmt: skip
async def test_an_escaped_backslash_and_letters_are_no_half(said: Any) -> None:
    reply, found = await arguments_after(*said)
    assert found == r"\ud83d" and REPLACED_HEADER not in reply.headers


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_halves_that_a_model_writes_end_no_call(path: str) -> None:
    function = {"name": "write", "arguments": json.dumps({"input": CUT})}
    call = {"id": "c1", "type": "function", "function": function}
    to = App(RecordingEngine(chat_answer(None, "tool_calls", tool_calls=[call])))
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/messages":
        body["tools"] = [{"name": "write", "input_schema": {"type": "object"}}]
        (block,) = (await to.post(path, body)).json["content"]
        assert block["input"] == {"input": MENDED}
    elif path == "/v1/chat/completions":
        body["tools"] = [{"type": "custom", "custom": {"name": "write"}}]
        message = (await to.post(path, body)).json["choices"][0]["message"]
        assert message["tool_calls"][0]["custom"]["input"] == MENDED
    else:
        body = {"model": MODEL, "input": "hi", "tools": [{"type": "custom", "name": "write"}]}
        (item,) = (await to.post(path, body)).json["output"]
        assert item["input"] == MENDED


async def test_halves_in_items_of_a_conversation_are_replaced() -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": {HALF: [CUT]}}
    raw, num_replaced = parse_whole(json.dumps({"items": [output]}).encode())
    assert raw["items"][0]["output"] == {"\ufffd": [MENDED]}
    assert num_replaced == 5


def result(text: bytes) -> bytes:
    return b'{"messages": [{"role": "tool", "content": "' + text + b'"}]}'


WRITTEN = [
    (rb"\ud83d\ude00", "\U0001f600"),
    (rb"\uD83D\uDE00", "\U0001f600"),
    (rb"\\ud83d", r"\ud83d"),  # an escaped backslash, and letters
    (rb"\\\ud83d", "\\\ufffd"),
    (rb"\\\\ud83d\uDe00", "\\\\ud83d\ufffd"),
    (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    (rb"\ud83d\u0041", "\ufffdA"),
    (rb"\ud83d\n\"", '\ufffd\n"'),
    (b"\xed\xa0\xbdx\xed\xb8\x80", "\ufffdx\ufffd"),  # each half as bytes, as CESU-8 writes it
    ("\ud7ff\ue000é".encode(), "\ud7ff\ue000é"),
]


@pytest.mark.parametrize(("written", "text"), WRITTEN)
def test_each_way_of_writing_one(written: bytes, text: str) -> None:
    raw, num_replaced = parse_whole(result(written))
    assert raw["messages"][0]["content"] == text
    assert num_replaced == text.count("\ufffd")


BAD: list[tuple[Any, str | None]] = [
    ({"model": HALF}, "model"),
    ({"messages": "x", "stop": ["a", HALF]}, "stop[1]"),
    ({"messages": [{"role": "tool", "content": HALF, "name": HALF}]}, "messages[0]"),
    ({HALF: 1}, None),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_halves_elsewhere_name_the_field(body: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match="half a character") as refusal:
        parse_whole(json.dumps(body).encode())
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "body", [rb'{"a": "\ud8', rb'["\ud83d"]', rb'{"a": "\ud83d\x"}', b"\xed\xa0"]
)
def test_what_is_no_json_besides(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"JSON"):
        parse_whole(body)
