from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import json_tools, mistral

from engines.mlx_worker.answer.reply_format import merged_calls
from engines.mlx_worker.answer.tool_calls import (
    BareCalls,
    CallDelta,
    CallReader,
    LineCalls,
    MarkedCalls,
)

pytestmark = pytest.mark.mlx

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
CALL = '{"name": "look", "arguments": {"at": "é }"}}'


def marked() -> MarkedCalls:
    return MarkedCalls(json_tools.parse_tool_call, TOOLS, ("<tool_call>", "</tool_call>"))


def read(
    reader: CallReader, sections: Sequence[tuple[str, str]]
) -> tuple[str, list[tuple[str, object]]]:
    content, parts = "", list[CallDelta]()
    for section, text in sections:
        found = reader.feed(section, text)
        content += found.content
        parts += found.calls
    found = reader.finish()
    calls = merged_calls([*parts, *found.calls])
    assert sorted(calls) == list(range(reader.num_calls))
    assert len({call["id"] for call in calls.values()}) == len(calls)
    functions = [calls[i]["function"] for i in sorted(calls)]
    named = [(x["name"], json.loads(x["arguments"])) for x in functions]
    return content + found.content, named


def bare(text: str) -> tuple[str, list[tuple[str, object]]]:
    return read(BareCalls(["look", "go"]), [("normal", piece) for piece in text])


def lines(text: str) -> tuple[str, list[tuple[str, object]]]:
    return read(LineCalls(["look", "go"]), [("normal", piece) for piece in text])


NO_CALLS = ["{", "[]", "3", "null"]
NO_CALLS += ['{"name": "fly", "arguments": {}}', '{"name": "go", "arguments": 3}']


@pytest.mark.parametrize("text", NO_CALLS)
def test_text_that_is_no_call_is_shown_as_it_is(text: str) -> None:
    content, calls = read(marked(), [("tool", text), ("normal", " ok")])
    assert (content, calls) == (f"<tool_call>{text}</tool_call> ok", [])


def test_answer_that_ends_inside_a_call() -> None:
    reader = MarkedCalls(mistral.parse_tool_call, TOOLS, ("[TOOL_CALLS]", ""))
    assert read(reader, [("tool", 'go[ARGS]{"to": 1}')]) == ("", [("go", {"to": 1})])
    assert read(marked(), [("tool", CALL[:-4])]) == (f"<tool_call>{CALL[:-4]}</tool_call>", [])


SPELLINGS = [
    *(CALL, f" \n{CALL}\n", f"```json\n{CALL}\n```", f"<tool_call>{CALL}</tool_call>", f"[{CALL}]"),
    CALL.replace("arguments", "parameters"),
    json.dumps({"type": "function", "function": json.loads(CALL)}),
    json.dumps({"name": "look", "arguments": json.dumps({"at": "é }"})}),
]


@pytest.mark.parametrize("text", SPELLINGS)
def test_bare_calls_in_many_spellings(text: str) -> None:
    assert bare(text) == ("", [("look", {"at": "é }"})])


@pytest.mark.parametrize("text", ["Hello {x}", '{"a": 1}', "[]", "``` code", "", "  ", CALL[:-1]])
def test_bare_text_that_is_no_call(text: str) -> None:
    assert bare(text) == (text, [])


def test_bare_text_is_not_held_back_once_it_cannot_be_a_call() -> None:
    reader = BareCalls(["look"])
    assert reader.feed("normal", "  ").content == ""
    assert reader.feed("normal", "Hi").content == "  Hi"
    assert reader.feed("normal", " {").content == " {"


def test_lines_pass_arguments_on_as_they_come() -> None:
    reader = LineCalls(["look", "go"])
    assert reader.feed("normal", '{"name": "lo').calls == []
    (first, rest) = reader.feed("normal", 'ok", "arguments": {"at').calls
    assert (first.name, rest.arguments) == ("look", '{"a')
    (part,) = reader.feed("normal", '": 1}').calls
    assert part.arguments == 't": 1'
    (part,) = reader.feed("normal", "}").calls
    assert part.arguments == "}"
    assert reader.finish().calls == []


@pytest.mark.parametrize("text", ['{"name": "fly"}', '{"x": "look"}', "12", "", '{"name": "lo'])
def test_lines_that_are_answers(text: str) -> None:
    assert lines(text) == (text, [])


@given(st.lists(st.integers(1, 30), max_size=8))
def test_where_the_pieces_end_does_not_matter(cuts: list[int]) -> None:
    text, pieces = f'{CALL}\n{{"name": "go", "arguments": {{}}}}\n{CALL}', []
    for cut in cuts:
        pieces.append(text[:cut])
        text = text[cut:]
    sections = [("normal", piece) for piece in [*pieces, text]]
    look = ("look", {"at": "é }"})
    assert read(LineCalls(["look", "go"]), sections) == ("", [look, ("go", {}), look])
