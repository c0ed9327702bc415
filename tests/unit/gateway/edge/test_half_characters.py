r"""Lone surrogates, as programs write them that cut text by UTF-16 (``\ud83d``)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.openai.errors import InvalidRequest
from gateway.edge.bodies import REPLACED_HEADER, parse_whole
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer
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


async def test_halves_in_a_call_of_anthropics() -> None:
    to = App()
    body = after_a_tool("/v1/messages", "done")
    body["messages"][1] = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {"at": CUT}}],
    }
    await to.post("/v1/messages", body)
    call = heard(to)[1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"at": MENDED}


@pytest.mark.parametrize(
    "call",
    [
        {"type": "mcp_call", "id": "m1", "name": "f", "server_label": "s", "arguments": "{}"},
        {"type": "local_shell_call", "id": "l1", "call_id": "c1", "status": "completed"},
        {"type": "mcp_list_tools", "id": "l1", "server_label": "s"},
    ],
)
async def test_halves_in_calls_of_the_server_with_their_results(call: dict[str, str]) -> None:
    fields = {
        "mcp_call": {"output": CUT},
        "local_shell_call": {"action": {"command": [CUT]}},
        "mcp_list_tools": {"tools": [{"name": "f", "description": CUT}]},
    }
    body = after_a_tool("/v1/responses", "done")
    body["input"].insert(1, {**call, **fields[call["type"]]})
    to = App()
    reply = await to.post("/v1/responses", body)
    assert (reply.status, reply.headers[REPLACED_HEADER]) == (200, "4")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("server_tool_use", {"name": "web_search", "input": {"query": CUT}}),
        ("web_search_tool_result", {"content": [{"type": "web_search_result", "title": CUT}]}),
        ("mcp_tool_use", {"name": "f", "server_name": "s", "input": {"at": CUT}}),
        ("mcp_tool_result", {"content": [{"type": "text", "text": CUT}]}),
        (
            "bash_code_execution_tool_result",
            {"content": {"type": "bash_code_execution_result", "stdout": CUT}},
        ),
    ],
)
async def test_halves_in_blocks_of_anthropics_own_tools(kind: str, fields: dict[str, Any]) -> None:
    """No prompt has them, but a client sends them again at every turn."""
    block = {"type": kind, "id": "s1", "tool_use_id": "s1", **fields}
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "so"}]}
    hi = {"role": "user", "content": "hi"}
    body = {"model": MODEL, "max_tokens": 5, "messages": [hi, said, hi]}
    reply = await App(RecordingEngine(chat_answer())).post("/v1/messages", body)
    assert (reply.status, reply.headers[REPLACED_HEADER]) == (200, "4")


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_halves_in_a_call_of_openais(path: str) -> None:
    for kind, field in (("function", "arguments"), ("custom", "input")):
        body = after_a_tool(path, "done")
        if path == "/v1/responses":
            call = {"type": f"{kind}_call" if kind == "function" else "custom_tool_call"}
            body["input"][1] = {**call, "call_id": "c1", "name": "read", field: CUT}
        else:
            call = {"id": "c1", "type": kind, kind: {"name": "read", field: CUT}}
            body["messages"][1] = {"role": "assistant", "tool_calls": [call]}
        to = App()
        reply = await to.post(path, body)
        (call,) = heard(to)[1]["tool_calls"]
        arguments = call["function"]["arguments"]
        assert (json.loads(arguments)["input"] if kind == "custom" else arguments) == MENDED
        assert reply.headers[REPLACED_HEADER] == "4"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_halves_that_a_model_wrote_into_arguments_are_replaced(path: str) -> None:
    """vLLM reads them, and its tokenizer takes no half: the conversation would end there."""
    for written, wanted in ((json.dumps({"at": CUT}), {"at": MENDED}), ('"\\\\ud83d"', r"\ud83d")):
        body = after_a_tool(path, "done")
        if path == "/v1/responses":
            body["input"][1]["arguments"] = written
        else:
            body["messages"][1]["tool_calls"][0]["function"]["arguments"] = written
        to = App()
        reply = await to.post(path, body)
        assert json.loads(heard(to)[1]["tool_calls"][0]["function"]["arguments"]) == wanted
        assert reply.headers.get(REPLACED_HEADER) == ("4" if wanted == {"at": MENDED} else None)


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
