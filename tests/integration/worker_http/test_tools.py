"""Tool calls and grammars."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.integration.worker_http.stage import CALL, CITY, LOOK, Open
from tests.tiny_tokenizer import PLAIN, THINKING, TOOLS

pytestmark = pytest.mark.mlx


def calls_of(chunks: list[Any]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.function.name:
                assert call.id and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


async def test_calls_in_the_models_own_syntax(toy: Open) -> None:
    async with toy(TOOLS) as stage:
        stage.script(f"So.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>")
        reply = await stage.chat(tools=[LOOK])
        chunks = await stage.chunks(tools=[LOOK])
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    assert [x.function.name for x in choice.message.tool_calls] == ["look", "look"]
    assert calls_of(chunks) == [("look", '{"city": "Paris"}')] * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_calls_by_a_model_that_was_never_taught(toy: Open) -> None:
    async with toy(PLAIN) as stage:
        stage.script(CALL)
        reply = await stage.chat(tools=[LOOK])
        stage.script("No need.")
        other = await stage.chat(tools=[LOOK])
        prompt = stage.tokenizer.decode(stage.owner.submitted[0].prompt)
    assert reply.choices[0].message.content is None
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert other.choices[0].message.content == "No need."
    assert "You can call these functions:" in prompt


@pytest.mark.parametrize("template", [PLAIN, TOOLS])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_calls_are_forced_against_the_model(toy: Open, template: str, choice: Any) -> None:
    """The toy wants to say something else; every token is held to the grammar."""
    other = {"type": "function", "function": {"name": "other"}}
    async with toy(template) as stage:
        stage.script("I would rather not.")
        fields = {"tools": [LOOK, other], "tool_choice": choice, "seed": 3, "max_tokens": 400}
        reply = await stage.chat(**fields)
        chunks = await stage.chunks(**fields)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    assert call.function.name in ("look", "other")
    json.loads(call.function.arguments)
    assert calls_of(chunks) == [(call.function.name, call.function.arguments)]


async def test_json_schema(toy: Open) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
    async with toy() as stage:
        stage.script("Never JSON.")
        reply = await stage.chat(response_format=wanted, seed=1, n=3, max_tokens=400)
        either = await stage.chat(response_format=wanted, tools=[LOOK], seed=1, max_tokens=400)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert list(json.loads(choice.message.content)) == ["city"]
    message = either.choices[0].message
    assert message.tool_calls or list(json.loads(message.content)) == ["city"]


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[0-9]{3}/[a-f]{2}"}, "[0-9]{3}/[a-f]{2}"),
        ({"choice": ["red", 'gr"ün']}, 'red|gr"ün'),
        ({"json": CITY}, r'\{\s*"city".*\}'),
        ({"json": json.dumps(CITY), "regex": None}, r'\{\s*"city".*\}'),
        ({"json_object": True}, r"\{.*"),
    ],
)
async def test_structured_outputs(toy: Open, outputs: Any, pattern: str) -> None:
    async with toy() as stage:
        stage.script("Never that.")
        extra = {"structured_outputs": outputs}
        reply = await stage.chat(extra_body=extra, seed=1, max_tokens=400)
    assert re.fullmatch(pattern, reply.choices[0].message.content, re.DOTALL)


async def test_keywords_that_no_grammar_knows_are_left_out(toy: Open) -> None:
    schema = {
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "idn-email", "maxLength": 3},
            "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "code": {"type": "string", "pattern": "^(?!x)[a-z]+$", "maxLength": 3},
            "few": {"enum": [2**64]},
        },
        "required": ["mail", "ids", "code", "few"],
        "propertyNames": {"pattern": "^[a-z]+$"},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    named = {"name": "look", "parameters": schema}
    async with toy() as stage:
        stage.script("Never JSON.")
        tools = [{"type": "function", "function": named}]
        shaped = await stage.chat(response_format=wanted, seed=1, max_tokens=400)
        forced = await stage.chat(tools=tools, tool_choice="required", seed=1, max_tokens=400)
    (call,) = forced.choices[0].message.tool_calls
    for written in (shaped.choices[0].message.content, call.function.arguments):
        assert list(json.loads(written)) == ["mail", "ids", "code", "few"]


async def test_grammar_begins_after_the_reasoning(toy: Open) -> None:
    async with toy(THINKING) as stage:
        stage.script("hm</think>{")
        reply = await stage.chat(response_format={"type": "json_object"}, seed=1, max_tokens=300)
    message = reply.choices[0].message
    assert message.reasoning_content == "hm"
    assert message.content.startswith("{")
